"""How far two traces may lie apart, by the types they were computed in: (largest, mean) deviation.

    float32 with float32    rounding only, in another order
    with bfloat16           8 bits of precision, through all layers: single values may be far off,
                            so that it is the mean that tells a fault from rounding

Relative: to the rms of what stands at the position, or to the layer's median position if that is
more (activations), to the rms of the layer (scores), to the norm (gradients,
steps of the weights), to the terms' sizes (loss: terms cancel); the others are absolute, in nats or
shares. Sampled tokens of float32 traces have to be equal; with bfloat16 they part sooner or later,
and the first step of Adam is nearly the sign of each gradient: both are reported and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Limit(NamedTuple):
    """Of the largest and of the mean deviation."""

    largest: float
    mean: float


_FLOAT32 = {
    "forward": Limit(1e-4, 3e-5),
    "score": Limit(1e-4, 3e-5),
    "replay": Limit(1e-4, 3e-5),
    "page_scores": Limit(1e-4, 3e-5),
    "pages": Limit(1e-4, 3e-5),
    "lse": Limit(1e-4, 3e-5),
    "weight": Limit(1e-4, 3e-5),
    "loss": Limit(1e-5, 1e-5),
    "grad": Limit(1e-4, 1e-4),
    "grad_norm": Limit(1e-4, 1e-4),
    "step": Limit(1e-2, 1e-2),
    "step_norm": Limit(1e-2, 1e-2),
}
_BFLOAT16 = {
    "forward": Limit(0.5, 0.06),
    "score": Limit(1.5, 0.25),
    "replay": Limit(1.5, 0.25),
    "page_scores": Limit(0.5, 0.15),
    "pages": Limit(0.3, 0.05),
    "lse": Limit(1.0, 0.15),
    "weight": Limit(1.0, 0.06),
    "loss": Limit(0.05, 0.05),
    "grad": Limit(0.7, 0.7),
    "grad_norm": Limit(0.2, 0.2),
}


def of(dtypes: tuple[str, str]) -> Mapping[str, Limit]:
    """Limits for traces in these types, by stage or quantity; what has none is not judged."""
    return _FLOAT32 if set(dtypes) == {"float32"} else _BFLOAT16


def judges_tokens(dtypes: tuple[str, str]) -> bool:
    """True where sampled tokens have to be the same."""
    return set(dtypes) == {"float32"}
