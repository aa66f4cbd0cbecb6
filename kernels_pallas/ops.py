"""The operations that the model calls as one value: Pallas kernels, or plain-XLA references.

`resolve` is called once, where a backend is built. Its result is hashable, so that compiled
programs take it as a static argument. No environment variable and no import decides between the
two.
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
    """Six functions with the signatures of reference.py, and the name that a log shows."""

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
    """The Pallas kernels.

    interpret: None = compile for a TPU; a pltpu.InterpretParams runs them on a CPU, slowly. chip:
    jax's device_kind to choose block sizes for (None = the default device).
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
    """The operations for a setting of config.attention, one of CHOICES.

    `kernel` and `reference` name one of the two; `auto` takes kernels where they can run. Kernels
    need a TPU, heads of 64 or 128, and for now a single device: sparrow_jax/sharded_ops.py compiles
    for meshes, but no backend is built with it yet. If `auto` falls back to references on a TPU,
    their name says why. Raises ValueError for `kernel` where kernels cannot run.
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
