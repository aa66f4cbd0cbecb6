"""The pages that each query of a replay reads, packed into bits for flash_prefill.

    scores[c, p] = mean query of the group at position c . landmark of page p
    pages[c, p]  = reference.replayed_pages(scores)[c, p]: the page rule; all pages if not sparse

One int32 word holds 32 pages of one query, so that a page and a query take 1 / 32 byte: 64 MiB for
8 groups of heads at 32K tokens. Words are computed in chunks of queries, so that no array
[queries, pages] of the whole sequence exists.

    word 0: pages 0..31  |  word 1: pages 32..63  |  ...       bit i of word w: page 32 w + i

Scores are float64 products rounded to float32: no setting of torch (TF32) changes which pages are
read.
"""

from __future__ import annotations

import torch

from kernels_triton import reference
from kernels_triton.policies import page_means

BITS = 32


def page_words(
    q_BTNH: torch.Tensor,
    k_BTKH: torch.Tensor,
    budget_T: torch.Tensor,
    sparse_BT: torch.Tensor,
    page: int,
    chunk: int,
) -> torch.Tensor:
    """The words as int32 [B x K, words, T]. chunk: queries handled together.

    Queries of the prompt also have the bits of later pages set (unless their chunk ends before
    them); the causal mask hides those keys.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    landmarks_BKPH = page_means(k_BTKH, page).transpose(1, 2).double()
    words = q_BTNH.new_zeros((B, K, -(-T // (page * BITS)), T), dtype=torch.int32)
    for first in range(0, T, chunk):
        last = min(first + chunk, T)
        position = torch.arange(first, last, device=q_BTNH.device)
        q_BcKRH = q_BTNH[:, first:last].reshape(B, last - first, K, N // K, H)
        q_BKcH = q_BcKRH.float().mean(3).transpose(1, 2).double()
        scores = (q_BKcH @ landmarks_BKPH[:, :, : -(-last // page)].mT).float()
        bits = _to_bits(
            reference.replayed_pages(scores, position, budget_T.long(), sparse_BT.bool(), page)
        )
        words[:, :, : bits.shape[2], first:last] = bits
    return words.flatten(0, 1)


def _to_bits(pages_BKcP: torch.Tensor) -> torch.Tensor:
    """bool [..., c, P] -> int32 [..., words, c]."""
    pages = torch.nn.functional.pad(pages_BKcP, (0, -pages_BKcP.shape[-1] % BITS))
    weight = 1 << torch.arange(BITS, device=pages.device)
    words = (pages.unflatten(-1, (-1, BITS)) * weight).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int().mT
