"""Policies of page selection: how a query ranks the pages before it. Decode has "mean" only.

They are the five of kernels_pallas/policies.py, which has formulas and sources.
common/oracles/sparse_attention.py has them in float64.

A policy is a pair of functions. `summary(k_BTKH, page)` returns what is stored of every page, a
list of tensors [B, K, P, ...]. `scores(q_BKRtH, summary, k_BKSH, pos_t, page)` returns scores
[B, K, t, P] in float32; of pages with equal scores the lower one is chosen. A replay considers only
pages that are complete at pos_t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Policy(NamedTuple):
    """A summary of every page, and scores from it; the file's docstring has the signatures."""

    summary: Callable[..., list[torch.Tensor]]
    scores: Callable[..., torch.Tensor]


def page_means(k_BTKH, page) -> torch.Tensor:
    """Landmarks [B, P, K, H] of contiguous keys, rounded to the keys' type as append_kv does."""
    return _by_page(k_BTKH, page).float().mean(2).to(k_BTKH.dtype).float()


def _by_page(k_BTKH, page) -> torch.Tensor:
    """The keys as [B, P, C, K, H], with zeros past the end."""
    B, T, K, H = k_BTKH.shape
    keys = torch.nn.functional.pad(k_BTKH, (0, 0, 0, 0, 0, -T % page))
    return keys.reshape(B, -1, page, K, H)


def _mean_summary(k_BTKH, page) -> list[torch.Tensor]:
    return [page_means(k_BTKH, page).transpose(1, 2)]


def _mean_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> torch.Tensor:
    return torch.einsum("bkth,bkph->bktp", q_BKRtH.mean(2), summary[0])


def _quest_summary(k_BTKH, page) -> list[torch.Tensor]:
    keys = _by_page(k_BTKH, page).float()
    return [keys.amin(2).transpose(1, 2), keys.amax(2).transpose(1, 2)]


def _quest_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> torch.Tensor:
    low_BKPH, high_BKPH = summary
    q = q_BKRtH.mean(2)
    up = torch.einsum("bkth,bkph->bktp", q.clamp(min=0), high_BKPH)
    return up + torch.einsum("bkth,bkph->bktp", q.clamp(max=0), low_BKPH)


def _nothing(k_BTKH, page) -> list[torch.Tensor]:
    return []


def _window_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> torch.Tensor:
    B, K, _, t, _ = q_BKRtH.shape
    pages = torch.arange(_num_pages(k_BKSH, page), device=pos_t.device).float()
    return pages.expand(B, K, t, -1)


def _random_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> torch.Tensor:
    B, K, _, t, _ = q_BKRtH.shape
    pages = torch.arange(_num_pages(k_BKSH, page), device=pos_t.device)
    heads = torch.arange(K, device=pos_t.device)
    x = _mix(_low(pos_t[:, None] * 0x9E3779B1) ^ _low(pages * 0x85EBCA77))
    x = _mix(x[None] ^ _low(heads * 0xC2B2AE3D)[:, None, None])
    return (x >> 8).float().expand(B, -1, -1, -1)


def _low(x) -> torch.Tensor:
    """The low 32 bits of an int64."""
    return x & 0xFFFFFFFF


def _mix(x) -> torch.Tensor:
    """A hash of 32-bit numbers, one to one (lowbias32)."""
    x = _low((x ^ x >> 16) * 0x7FEB352D)
    x = _low((x ^ x >> 15) * 0x846CA68B)
    return x ^ x >> 16


def _oracle_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> torch.Tensor:
    B, K, _, t, H = q_BKRtH.shape
    S = k_BKSH.shape[2]
    s = torch.einsum("bkrth,bksh->bkrts", q_BKRtH, k_BKSH.float()) * H**-0.5
    visible = torch.arange(S, device=pos_t.device) <= pos_t[:, None]
    p = torch.where(visible, s, -1e30).softmax(-1).sum(2)
    return torch.nn.functional.pad(p, (0, -S % page)).reshape(B, K, t, -1, page).sum(-1)


def _num_pages(k_BKSH, page) -> int:
    return -(-k_BKSH.shape[2] // page)


POLICIES = {
    "mean": Policy(_mean_summary, _mean_scores),
    "quest": Policy(_quest_summary, _quest_scores),
    "window": Policy(_nothing, _window_scores),
    "random": Policy(_nothing, _random_scores),
    "oracle": Policy(_nothing, _oracle_scores),
}
