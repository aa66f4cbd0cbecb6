"""Block sizes of the kernels by type and shape.

They follow from what compiles without spilled registers and from the bytes that must be in flight,
not from measurements on a card. They change the speed, not the result.
"""

from __future__ import annotations

from typing import NamedTuple

PROCESSORS = 132
"""Streaming multiprocessors to assume for an unknown device: those of an H100."""


class DecodeTuning(NamedTuple):
    """Sizes of sparse_decode.

    tile: tokens of one step of the softmax, a power of 2 of at least 16.
    splits: programs that share a row, at most 64.
    least: the fewest tiles of a split that is not empty, so that few programs share a short row.
    """

    tile: int
    splits: int
    least: int
    num_warps: int
    num_stages: int


class SelectTuning(NamedTuple):
    """Sizes of select_pages, powers of 2.

    score: pages that one program scores.
    count: scores that the search for the threshold holds in registers; if a row has more pages,
        the others are read again for every bit.
    list: pages that are ranked together.
    """

    score: int
    count: int
    list: int
    num_warps: int


def tune_decode(
    itemsize: int, head_dim: int, programs: int, tokens: int, processors: int = PROCESSORS
) -> DecodeTuning:
    """Tiles of 8,192 numbers, and four programs per multiprocessor if the lists are long enough.

    itemsize: bytes of a number of the cache, or 4 if products are float32. programs: rows x KV
    heads. tokens: width of a list. By Little's law 4.8 TB/s x 0.8 us = 30 KiB must be in flight per
    multiprocessor. That is one tile of bfloat16 keys and values in one of the two or three programs
    that fit. In float32 larger tiles spill registers. A split has at least four tiles of the widest
    list, since shorter ones cost more in partial results than they gain.
    """
    tile = max(16, min(128, (2**11 if itemsize == 4 else 2**13) // head_dim))
    splits = min(-(-4 * processors // max(programs, 1)), tokens // (4 * tile), 64)
    return DecodeTuning(
        tile,
        max(1, splits),
        least=2,
        num_warps=8 if itemsize == 4 else 4,
        num_stages=3,
    )


def tune_select(num_pages: int) -> SelectTuning:
    """64 landmarks (16 KiB of bfloat16) per program; up to 8,192 scores in registers."""
    whole = max(128, 1 << (num_pages - 1).bit_length())
    count = whole if whole <= 8192 else 4096
    return SelectTuning(64, count, min(count, 1024), num_warps=8 if count > 2048 else 4)


class HeadTuning(NamedTuple):
    """Sizes of token_logprob: rows in a block of tokens and of the head, columns of one product.

    parts: parts of the vocabulary, each with programs of its own.
    """

    tokens: int
    vocabulary: int
    columns: int
    parts: int
    num_warps: int
    num_stages: int


def tune_head(
    itemsize: int, num_tokens: int, vocabulary: int, processors: int = PROCESSORS
) -> HeadTuning:
    """128 x 128 logits per program, 64 x 64 in float32, and two programs per multiprocessor.

    With few tokens their blocks are smaller and the vocabulary has more parts.
    """
    rows, words, columns, num_stages = (64, 64, 32, 2) if itemsize == 4 else (128, 128, 64, 3)
    tokens = max(16, min(rows, 1 << (num_tokens - 1).bit_length()))
    wanted = -(-2 * processors // -(-num_tokens // tokens))
    parts = max(1, min(512, wanted, -(-vocabulary // words)))
    return HeadTuning(tokens, words, columns, parts, 8 if tokens == 128 else 4, num_stages)


class PrefillBlocks(NamedTuple):
    """Sizes of one kernel of flash_prefill: tokens in a block of queries and of keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class PrefillTuning(NamedTuple):
    """Sizes of flash_prefill: of the forward pass, and of dq, dk and dv."""

    forward: PrefillBlocks
    query_gradient: PrefillBlocks
    key_gradient: PrefillBlocks
    value_gradient: PrefillBlocks


def tune_prefill(itemsize: int, head_dim: int, page: int) -> PrefillTuning:
    """128 queries by 64 keys forward; 64 queries or 128 keys that a backward program owns.

    Blocks are smaller in float32, which has no tensor cores. page: tokens of a page in a replay,
    where a block has at most the keys of 32 pages; 0 = dense.
    """
    keys = 32 * (page & -page) if page else 128
    if itemsize == 4:
        return PrefillTuning(*[PrefillBlocks(32, min(32, keys), 4, 1)] * 4)
    forward = PrefillBlocks(128, min(64, keys), 8, 2)
    of_keys = PrefillBlocks(64, min(128, keys), 8, 2)
    return PrefillTuning(forward, PrefillBlocks(64, min(64, keys), 4, 2), of_keys, of_keys)


class SampleTuning(NamedTuple):
    """Sizes of sample_tokens: logits in a block, a power of 2; parts of a row, at most 64."""

    block: int
    parts: int
    num_warps: int


def tune_sample(rows: int, vocabulary: int, processors: int = PROCESSORS) -> SampleTuning:
    """Eight logits per thread; eight programs per multiprocessor hide Threefry's latency."""
    block = 1024
    wanted = -(-8 * processors // max(rows, 1))
    return SampleTuning(block, max(1, min(64, wanted, -(-vocabulary // block))), num_warps=4)
