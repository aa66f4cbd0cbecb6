"""The operations of the model as one value: by Triton kernels, or by their plain-torch references.

`resolve` is called once, where a backend is built. There is no switch by environment or at import.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from kernels_triton import reference

CHOICES = ("auto", "kernel", "reference")
HEAD_DIMS = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Ops:
    """Six functions with the signatures of kernels_triton/reference.py."""

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
def kernels() -> Ops:
    """The Triton kernels; triton is imported here and not before."""
    from kernels_triton import append_kv, flash_prefill, select_pages, sparse_decode, token_logprob

    return Ops(
        "kernel",
        select_pages.select_pages,
        sparse_decode.sparse_decode,
        append_kv.append_kv,
        flash_prefill.flash_prefill,
        token_logprob.token_logprob,
        token_logprob.acceptance_overlap,
    )


def resolve(attention: str, device: str, *, head_dim: int) -> Ops:
    """auto: kernels on a GPU, references elsewhere; kernel: ValueError if they cannot run.

    References that stand in for kernels on a GPU say why in their name, which a run's log shows.
    """
    if attention not in CHOICES:
        raise ValueError(f"{attention=}: expected one of {', '.join(CHOICES)}")
    fits = device == "cuda" and head_dim in HEAD_DIMS
    if attention == "kernel" and not fits:
        raise ValueError(
            f"attention='kernel' with {device=}, {head_dim=}: kernels need a GPU and heads of "
            f"{', '.join(map(str, HEAD_DIMS))}; set reference or auto"
        )
    if attention == "auto" and device == "cuda" and not fits:
        return dataclasses.replace(REFERENCE, name=f"reference (no kernel for heads of {head_dim})")
    return kernels() if fits and attention != "reference" else REFERENCE
