"""The operations that the model calls as one value: Triton kernels, or plain-torch references.

`resolve` is called once, where a backend is built. No environment variable and no import decides
between the two.
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
def kernels() -> Ops:
    """The Triton kernels; triton is imported when this is called."""
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
    """The operations for a setting of config.attention, one of CHOICES.

    `kernel` and `reference` name one of the two; `auto` takes kernels where they can run: on a GPU,
    with heads of HEAD_DIMS. If `auto` falls back to references on a GPU, their name says why.
    Raises ValueError for `kernel` where kernels cannot run.
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
