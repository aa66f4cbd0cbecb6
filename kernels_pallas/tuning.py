"""Block sizes of the kernels by chip, type and shape: from what compiles and from bytes in flight.

Nothing here was measured on a chip. Sizes change the speed and not the result.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

HBM_GB_PER_S = {
    "TPU v5 lite": 819,
    "TPU v5": 2765,
    "TPU v5p": 2765,
    "TPU v6 lite": 1640,
    "TPU7x": 3690,
}
"""HBM peak of a device by jax's device_kind, as its vendor states it (TPU7x: half a chip)."""
CORES = {"TPU v5": 2, "TPU v5p": 2}
"""Cores that share a device's HBM, where it is not one."""


LANES, SUBLANES = 128, 8


class DecodeTuning(NamedTuple):
    """sparse_decode: pages per block (one step of the softmax), blocks in the ring (even)."""

    pages_per_block: int
    num_buffers: int


class SelectTuning(NamedTuple):
    """select_pages.

    unit: pages fetched and scored in a step, a divisor of 128. ring: buffers of one unit, a power
    of 2; all but one are in flight while that one is scored. group: blocks of 128 pages handled
    together after the gather, the grain of a row's length. digit: bits of the threshold found per
    pass over the scores by 2**digit - 1 counts, a divisor of 32.
    """

    unit: int
    ring: int
    group: int
    digit: int


class PrefillTuning(NamedTuple):
    """flash_prefill: tokens in a block of queries and in a block of keys; multiples of 128."""

    queries: int
    keys: int


class HeadTuning(NamedTuple):
    """token_logprob: rows in a block of tokens and in a block of the vocabulary."""

    tokens: int
    vocabulary: int


def tune_decode(dtype, head_dim: int, page_size: int, chip: str | None = None) -> DecodeTuning:
    """Blocks of 32 pages and at most 256 KiB, and about a microsecond of HBM reads in flight.

    A block is the grain of what a short row computes, so it is no larger than the MXU needs.
    Little's law: bytes in flight = bandwidth x latency. The latency of a read is not published;
    1 us is assumed. At most 16 buffers: a row reads ahead of itself as far as the next row only.
    chip: jax's device_kind; None = the default device (v5e where that is no TPU).
    """
    chip = chip or jax.devices()[0].device_kind
    gb_per_s = HBM_GB_PER_S.get(chip, HBM_GB_PER_S["TPU v5 lite"])
    needed = 1000 * gb_per_s // CORES.get(chip, 1)  # bytes in a microsecond
    page_bytes = 2 * page_size * head_dim * jnp.dtype(dtype).itemsize
    pages = max(1, min(32, 2**18 // page_bytes))
    ahead = -(-needed // (pages * page_bytes))
    return DecodeTuning(pages, min(16, max(4, (ahead + 2) // 2 * 2)))


def tune_select(num_pages: int, rows: int) -> SelectTuning:
    """Units of 256 landmark rows (32 pages of 8 heads of 128 numbers): two passes of the MXU.

    rows: of 128 lanes, of one page. 15 units of 64 KiB are in flight.
    """
    unit = min(LANES, max(SUBLANES, 256 // (1 << (rows - 1).bit_length())))
    return SelectTuning(unit, ring=16, group=min(4, -(-num_pages // LANES)), digit=2)


def tune_prefill(num_tokens: int, ratio: int) -> PrefillTuning:
    """About 1,024 rows of queries x heads of a group, and 512 keys: 2 MiB of scores."""
    queries = max(LANES, 1024 // ratio // LANES * LANES)
    whole = max(LANES, 1 << (num_tokens - 1).bit_length())
    return PrefillTuning(min(512, queries, whole), min(512, whole))


def tune_head(dtype, num_tokens: int, vocabulary: int, width: int, chunk: int) -> HeadTuning:
    """At most 1,024 tokens and 512 words, in whole chunks, of at most 4 MiB each.

    A block of tokens reads the whole head once: 1,024 tokens make that 1,024 FLOP per byte.
    """
    rows = max(1, 2**22 // (width * jnp.dtype(dtype).itemsize) // chunk) * chunk
    whole = [-(-size // chunk) * chunk for size in (num_tokens, vocabulary)]
    return HeadTuning(min(1024, rows, whole[0]), min(512, rows, whole[1]))
