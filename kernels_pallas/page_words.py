"""The pages that each query of a replay reads, packed into bits for flash_prefill.

    scores[c, p] = mean query of the group at position c . landmark of page p          (float32)
    pages[c, p]  = reference.replayed_pages(scores)[c, p]: the page rule; all pages if not sparse

One int32 word holds 32 pages of one query (fewer where a block of keys has fewer), so that a page
and a query take 1 / 32 byte: 128 MiB for 16 groups of heads at 32K tokens. Words are computed in
chunks of queries, so that no array [queries, pages] of the whole sequence exists.

    block of keys j     |  word 0: pages 0..31  |  word 1: pages 32..63  |   counted in the block
    bit i of word w       page (j x keys + w x word_span) / page_size + i
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import reference
from kernels_pallas.policies import page_means

BITS = 32


def word_span(keys: int, page: int) -> int:
    """The number of keys in the pages of one word, for blocks of `keys` keys."""
    return min(BITS * page, keys)


def page_words(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    budget_T: jax.Array,
    sparse_BT: jax.Array,
    page: int,
    chunk: int,
    *,
    queries: int,
    keys: int,
) -> jax.Array:
    """The words as int32 [B x K, key blocks, words of a block, queries padded to whole blocks].

    chunk: queries handled together. queries, keys: tokens in a block of each, as flash_prefill
    reads the words. Queries of the prompt also have the bits of later pages set; the causal mask
    hides those keys. Queries that pad the last block get pages too; their results are cut off.
    """
    B, T, _, H = q_BTNH.shape
    K, span = k_BTKH.shape[2], word_span(keys, page)
    padded = -(-T // queries) * queries
    chunk = min(chunk, padded)
    firsts = jnp.arange(0, padded, chunk)
    q = jnp.pad(q_BTNH, ((0, 0), (0, len(firsts) * chunk - T), (0, 0), (0, 0)))
    landmarks_BKPH = page_means(k_BTKH, page).swapaxes(1, 2)
    num_words = -(-T // keys) * (keys // span)

    def choose(first: jax.Array) -> jax.Array:
        position = first + jnp.arange(chunk)
        q_BcKRH = lax.dynamic_slice_in_dim(q, first, chunk, 1).reshape(B, chunk, K, -1, H)
        q_BcKH = q_BcKRH.astype(jnp.float32).mean(3)
        highest = lax.Precision.HIGHEST
        scores = jnp.einsum("bckh,bkph->bkcp", q_BcKH, landmarks_BKPH, precision=highest)
        pages = reference.replayed_pages(scores, position, budget_T, sparse_BT, page)
        return _to_bits(pages, num_words, span // page)

    words = lax.map(choose, firsts)  # [chunks, B, K, words, chunk]
    words = jnp.moveaxis(words, 0, 3).reshape(B * K, num_words, -1)[..., :padded]
    return words.reshape(B * K, -1, keys // span, padded)


def _to_bits(pages_BKcP: jax.Array, num_words: int, bits: int) -> jax.Array:
    """bool [..., c, P] -> int32 [..., words, c]."""
    *lead, P = pages_BKcP.shape
    pages = jnp.pad(pages_BKcP, [(0, 0)] * len(lead) + [(0, num_words * bits - P)])
    pages = pages.reshape(*lead, num_words, bits).astype(jnp.uint32)
    words = (pages << jnp.arange(bits, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).swapaxes(-1, -2)
