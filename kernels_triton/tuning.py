"""Block sizes of the kernels by type and shape: from what compiles and from bytes in flight.

Nothing here was measured on a card. Sizes change the speed and not the result.
"""

from __future__ import annotations

from typing import NamedTuple

PROCESSORS = 132
"""Streaming multiprocessors of a device that is not asked (an H100 has 132)."""


class DecodeTuning(NamedTuple):
    """sparse_decode.

    tile: tokens of one step of the softmax, a power of 2 of at least 16. splits: programs that
    share a row, at most 64. least: tiles of a split, so that a short row is shared by fewer.
    """

    tile: int
    splits: int
    least: int
    num_warps: int
    num_stages: int


class SelectTuning(NamedTuple):
    """select_pages: powers of 2.

    score: pages that one program scores. count: scores that the search for the threshold holds at
    once; with at least as many as the row has pages they stay in registers. list: pages whose
    ranks are found together.
    """

    score: int
    count: int
    list: int
    num_warps: int


def tune_decode(
    itemsize: int, head_dim: int, programs: int, tokens: int, processors: int = PROCESSORS
) -> DecodeTuning:
    """Tiles of 8,192 numbers, and four programs per multiprocessor where the lists are long enough.

    itemsize: bytes of a number of the cache, 4 where products are float32; programs: rows x KV
    heads; tokens: width of a list.
    Little's law: 4.8 TB/s x 0.8 us = 30 KiB per multiprocessor: one tile of bfloat16 in flight, of
    keys and values, in one of the two or three programs that fit. float32 spills registers in
    larger blocks. Shares of fewer than four tiles are not worth their partial results.
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
    """64 landmarks (16 KiB of bfloat16) per program; up to 8,192 scores in registers, 32 each."""
    whole = max(128, 1 << (num_pages - 1).bit_length())
    count = whole if whole <= 8192 else 4096
    return SelectTuning(64, count, min(count, 1024), num_warps=8 if count > 2048 else 4)


class HeadTuning(NamedTuple):
    """token_logprob: rows in a block of tokens and of the vocabulary, columns of one product.

    parts: into which the vocabulary is cut, each walked by programs of its own.
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
    """128 x 128 logits a program, 64 x 64 in float32 (no tensor cores), two programs a processor.

    Few tokens make smaller blocks of them, and more parts of the vocabulary instead.
    """
    rows, words, columns, num_stages = (64, 64, 32, 2) if itemsize == 4 else (128, 128, 64, 3)
    tokens = max(16, min(rows, 1 << (num_tokens - 1).bit_length()))
    wanted = -(-2 * processors // -(-num_tokens // tokens))
    parts = max(1, min(512, wanted, -(-vocabulary // words)))
    return HeadTuning(tokens, words, columns, parts, 8 if tokens == 128 else 4, num_stages)


class PrefillBlocks(NamedTuple):
    """One kernel of flash_prefill: tokens in a block of queries and of keys, powers of 2."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class PrefillTuning(NamedTuple):
    """flash_prefill: blocks of the forward pass, and of dq, dk and dv."""

    forward: PrefillBlocks
    query_gradient: PrefillBlocks
    key_gradient: PrefillBlocks
    value_gradient: PrefillBlocks


def tune_prefill(itemsize: int, head_dim: int, page: int) -> PrefillTuning:
    """128 queries by 64 keys forward; what a program of dq, dk or dv owns is 64 or 128 tokens.

    Smaller in float32 (no tensor cores), and no more keys than the 32 pages of a word; page 0 is
    dense.
    """
    keys = 32 * (page & -page) if page else 128
    if itemsize == 4:
        return PrefillTuning(*[PrefillBlocks(32, min(32, keys), 4, 1)] * 4)
    forward = PrefillBlocks(128, min(64, keys), 8, 2)
    of_keys = PrefillBlocks(64, min(128, keys), 8, 2)
    return PrefillTuning(forward, PrefillBlocks(64, min(64, keys), 4, 2), of_keys, of_keys)


class SampleTuning(NamedTuple):
    """sample_tokens: entries in a block, a power of 2; parts: of the vocabulary, at most 64."""

    block: int
    parts: int
    num_warps: int


def tune_sample(rows: int, vocabulary: int, processors: int = PROCESSORS) -> SampleTuning:
    """Eight entries a thread; eight programs a processor, which hide the latency of Threefry."""
    block = 1024
    wanted = -(-8 * processors // max(rows, 1))
    return SampleTuning(block, max(1, min(64, wanted, -(-vocabulary // block))), num_warps=4)
