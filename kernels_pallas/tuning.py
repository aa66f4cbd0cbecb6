"""Block sizes of the kernels by chip, type and shape.

They follow from what the compiler accepts and from the bytes that must be in flight, not from
measurements on a chip. They change the speed, not the result.
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
"""Peak bandwidth of a device's HBM by jax's device_kind, as published (TPU7x: half a chip)."""
CORES = {"TPU v5": 2, "TPU v5p": 2}
"""Cores that share the HBM of a device, if there is more than one."""

LANES, SUBLANES = 128, 8


class DecodeTuning(NamedTuple):
    """Sizes of sparse_decode: pages per block, and buffers of one block in the ring (even)."""

    pages_per_block: int
    num_buffers: int


class SelectTuning(NamedTuple):
    """Sizes of select_pages.

    unit: pages fetched and scored in one step, a divisor of 128.
    ring: buffers of one unit, a power of 2; all but one are in flight while that one is scored.
    group: blocks of 128 pages handled together after the gather.
    digit: bits of the threshold found in one pass over the scores, a divisor of 32; a pass counts
        for 2**digit - 1 thresholds.
    """

    unit: int
    ring: int
    group: int
    digit: int


class PrefillTuning(NamedTuple):
    """Sizes of flash_prefill: tokens in a block of queries and of keys; multiples of 128."""

    queries: int
    keys: int


class HeadTuning(NamedTuple):
    """Sizes of token_logprob: rows in a block of tokens and in a block of the head."""

    tokens: int
    vocabulary: int


def tune_decode(dtype, head_dim: int, page_size: int, chip: str | None = None) -> DecodeTuning:
    """Blocks of 32 pages and at most 256 KiB, and about a microsecond of HBM reads in flight.

    A short row computes a whole block, so a block is no larger than the MXU needs. Little's law
    gives the ring: bytes in flight = bandwidth x latency, with an assumed latency of 1 us, as none
    is published. There are at most 16 buffers, because a row reads ahead no further than into the
    next row. chip: jax's device_kind; None = the default device (v5e where that is not a TPU).
    """
    chip = chip or jax.devices()[0].device_kind
    gb_per_s = HBM_GB_PER_S.get(chip, HBM_GB_PER_S["TPU v5 lite"])
    needed = 1000 * gb_per_s // CORES.get(chip, 1)  # bytes in flight: those of a microsecond
    page_bytes = 2 * page_size * head_dim * jnp.dtype(dtype).itemsize
    pages = max(1, min(32, 2**18 // page_bytes))
    ahead = -(-needed // (pages * page_bytes))
    return DecodeTuning(pages, min(16, max(4, (ahead + 2) // 2 * 2)))


def tune_select(num_pages: int, rows: int) -> SelectTuning:
    """Units of 256 rows of landmarks (32 pages of 8 heads of 128), which are two MXU passes.

    rows: rows of 128 lanes in the landmarks of one page. 15 units of 64 KiB are in flight.
    """
    unit = min(LANES, max(SUBLANES, 256 // (1 << (rows - 1).bit_length())))
    return SelectTuning(unit, ring=16, group=min(4, -(-num_pages // LANES)), digit=2)


def tune_prefill(num_tokens: int, ratio: int) -> PrefillTuning:
    """About 1,024 rows of queries x heads of a group and 512 keys, which are 2 MiB of scores."""
    queries = max(LANES, 1024 // ratio // LANES * LANES)
    whole = max(LANES, 1 << (num_tokens - 1).bit_length())
    return PrefillTuning(min(512, queries, whole), min(512, whole))


def tune_head(dtype, num_tokens: int, vocabulary: int, width: int, chunk: int) -> HeadTuning:
    """Blocks of at most 1,024 tokens and 512 rows of the head, in whole chunks, at most 4 MiB each.

    Every block of tokens reads the whole head; with 1,024 tokens that is 1,024 FLOP per byte.
    """
    rows = max(1, 2**22 // (width * jnp.dtype(dtype).itemsize) // chunk) * chunk
    whole = [-(-size // chunk) * chunk for size in (num_tokens, vocabulary)]
    return HeadTuning(min(1024, rows, whole[0]), min(512, rows, whole[1]))
