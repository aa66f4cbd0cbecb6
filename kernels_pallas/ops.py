"""The operations of the model as one value: by Pallas kernels, or by their plain-XLA references.

`resolve` is called once, where a backend is built; what it returns is hashable and travels as a
static value. There is no switch by environment or at import.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from kernels_pallas import (
    append_kv,
    flash_prefill,
    reference,
    select_pages,
    sparse_decode,
    token_logprob,
)

CHOICES = ("auto", "kernel", "reference")
HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Ops:
    """Six functions with the signatures of kernels_pallas/reference.py."""

    name: str
    select_pages: Callable[..., Any]
    sparse_decode: Callable[..., Any]
    append_kv: Callable[..., Any]
    flash_prefill: Callable[..., Any]
    token_logprob: Callable[..., Any]
    acceptance_overlap: Callable[..., Any]


REFERENCE = Ops(
    "reference",
    reference.select_pages,
    reference.sparse_decode,
    reference.append_kv,
    reference.flash_prefill,
    reference.token_logprob,
    reference.acceptance_overlap,
)


@functools.cache
def kernels(interpret=None, chip: str | None = None) -> Ops:
    """The Pallas kernels; interpret: pltpu.InterpretParams to run them without a TPU, slowly.

    chip: jax's device_kind to choose block sizes for, where it is not that of the default device.
    """
    functions = (
        select_pages.select_pages,
        functools.partial(sparse_decode.sparse_decode, chip=chip),
        append_kv.append_kv,
        flash_prefill.flash_prefill,
        token_logprob.token_logprob,
        token_logprob.acceptance_overlap,
    )
    name = "kernel" if interpret is None else "kernel, interpreted"
    return Ops(name, *(functools.partial(f, interpret=interpret) for f in functions))


def resolve(attention: str, platform: str, *, head_dim: int, num_devices: int = 1) -> Ops:
    """auto: kernels where they can run, references elsewhere; kernel: ValueError if they cannot.

    They need a TPU, heads of 64 or 128, and for now one device (sparrow_jax/sharded_ops.py is
    compiled for meshes, but no backend is built with it yet). References that stand in for kernels
    on a TPU say why in their name, which a run's log shows.
    """
    if attention not in CHOICES:
        raise ValueError(f"{attention=}: expected one of {', '.join(CHOICES)}")
    fits = platform == "tpu" and head_dim in HEAD_DIMS and num_devices == 1
    if attention == "kernel" and not fits:
        raise ValueError(
            f"attention='kernel' with {platform=}, {head_dim=}, {num_devices=}: kernels need "
            f"one TPU device and heads of {' or '.join(map(str, HEAD_DIMS))}; set reference or auto"
        )
    if attention == "auto" and platform == "tpu" and not fits:
        cause = f"heads of {head_dim}" if head_dim not in HEAD_DIMS else f"{num_devices} devices"
        return dataclasses.replace(REFERENCE, name=f"reference (no kernel for {cause})")
    return kernels() if fits and attention != "reference" else REFERENCE
