"""Rules by which a query ranks the pages of its past: float64 oracle, and what each costs to read.

kernels_pallas/policies.py and kernels_triton/policies.py hold the same rules for replay, and say
where each comes from. Decode uses "mean".
"""

from __future__ import annotations

import numpy as np

VECTORS = {"mean": 1, "quest": 2, "window": 0, "random": 0, "oracle": 0}
"""Key vectors per page that a query reads to choose. The oracle's choice is free, as none can be:
it bounds what any rule could reach."""


def page_scores(policy: str, q_NH: np.ndarray, k_SKH: np.ndarray, page_size: int) -> np.ndarray:
    """Score [K, M] of each of the M whole pages for the newest token, position S - 1; float64.

    q_NH: its queries; k_SKH: keys of positions 0 .. S - 1. KeyError for an unknown policy.
    """
    q_NH, k_SKH = np.asarray(q_NH, np.float64), np.asarray(k_SKH, np.float64)
    S, K, H = k_SKH.shape
    M = S // page_size
    q_KRH = q_NH.reshape(K, -1, H)
    pages_MCKH = k_SKH[: M * page_size].reshape(M, page_size, K, H)
    return {
        "mean": _mean, "quest": _quest, "window": _window, "random": _random, "oracle": _oracle,
    }[policy](q_KRH, pages_MCKH, k_SKH)  # fmt: skip


def _mean(q_KRH, pages_MCKH, k_SKH):
    return np.einsum("kh,mkh->km", q_KRH.mean(1), pages_MCKH.mean(1))


def _quest(q_KRH, pages_MCKH, k_SKH):
    q_KH = q_KRH.mean(1)
    low, high = (q_KH * bound for bound in (pages_MCKH.min(1), pages_MCKH.max(1)))
    return np.maximum(low, high).sum(-1).T


def _window(q_KRH, pages_MCKH, k_SKH):
    return np.tile(np.arange(len(pages_MCKH), dtype=np.float64), (len(q_KRH), 1))


def _random(q_KRH, pages_MCKH, k_SKH):
    position = len(k_SKH) - 1
    return np.array([
        [_hash(position, page, head) >> 8 for page in range(len(pages_MCKH))]
        for head in range(len(q_KRH))
    ], np.float64).reshape(len(q_KRH), len(pages_MCKH))  # fmt: skip


def _hash(position: int, page: int, head: int) -> int:
    """32 bits, the same in every backend."""
    x = _mix(position * 0x9E3779B1 % 2**32 ^ page * 0x85EBCA77 % 2**32)
    return _mix(x ^ head * 0xC2B2AE3D % 2**32)


def _mix(x: int) -> int:
    """lowbias32: a permutation of 32-bit numbers that spreads every bit."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def _oracle(q_KRH, pages_MCKH, k_SKH):
    s_KRS = np.einsum("krh,skh->krs", q_KRH, k_SKH) * k_SKH.shape[-1] ** -0.5
    weights = np.exp(s_KRS - s_KRS.max(-1, keepdims=True))
    mass_KS = (weights / weights.sum(-1, keepdims=True)).sum(1)
    M, C = pages_MCKH.shape[:2]
    return mass_KS[:, : M * C].reshape(-1, M, C).sum(-1)


def equal_bytes(policy: str, budget_T: np.ndarray, page_size: int) -> np.ndarray:
    """Budgets int32 [T] with which a query at position t reads the bytes that "mean" reads with
    budget_T[t]; whole pages, rounded down, at least 0.

    A page is 2 C vectors (C keys and C values), and there are n = t // C + 1 pages to choose from:
    k' = floor(k + n (1 - v) / 2C) with v vectors per page.
    """
    n_T = np.arange(len(budget_T)) // page_size + 1
    pages_T = n_T * (1 - VECTORS[policy]) // (2 * page_size)
    return np.maximum(np.int64(budget_T) + pages_T, 0).astype(np.int32)
