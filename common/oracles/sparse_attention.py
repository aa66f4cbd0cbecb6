"""Page selection and attention over the selected pages, for one sequence, in float64.

The page rule is that of arXiv 2606.08446, section on sparse rollout (see `select_pages`); the other
policies only rank the pages differently. Query head n belongs to KV head n // R, R = N / K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Budgets = Callable[[int], int | None]
"""Maps the position of a query to k, the pages that it may choose beside the reserved ones; None
means all pages."""


def num_pages(position: int, page_size: int) -> int:
    """Pages that a query at `position` (0-based) sees, the last one possibly part filled."""
    return position // page_size + 1


def select_pages(
    q_NH: np.ndarray, k_SKH: np.ndarray, *, k: int | None, page_size: int, policy: str = "mean"
) -> np.ndarray:
    """Returns the pages that the newest token reads: int64 [K, J], sorted; J = min(n, k + 3).

    k_SKH holds the post-RoPE keys of positions 0 .. t, the query's own included: S = t + 1,
    n = t // page_size + 1 pages. Always read: page 0 and the last two. Of pages 1 .. n - 3 the k
    with the highest dot(mean of the group's queries, mean of the page's keys), ties to the lower
    page. k + 3 >= n, or k None: all pages. Raises ValueError for k < 0.
    """
    q_NH, k_SKH = np.asarray(q_NH, np.float64), np.asarray(k_SKH, np.float64)
    num_kv = k_SKH.shape[1]
    n = num_pages(k_SKH.shape[0] - 1, page_size)
    if k is not None and k < 0:
        raise ValueError(f"{k=}: expected a budget of at least 0, or None for all pages")
    if k is None or k + 3 >= n:
        return np.tile(np.arange(n), (num_kv, 1))
    candidates = np.arange(1, n - 2)
    scores_KM = page_scores(policy, q_NH, k_SKH, page_size)[:, candidates]
    best = np.argsort(-scores_KM, axis=1, kind="stable")[:, :k]
    chosen = [np.concatenate([[0], candidates[b], [n - 2, n - 1]]) for b in best]
    return np.sort(np.array(chosen), axis=1)


def page_scores(policy: str, q_NH: np.ndarray, k_SKH: np.ndarray, page_size: int) -> np.ndarray:
    """Score [K, P] of each of the P whole pages for the newest token, position S - 1; float64.

    q_NH: its queries; k_SKH: keys of positions 0 .. S - 1. KeyError for an unknown policy.
    """
    q_NH, k_SKH = np.asarray(q_NH, np.float64), np.asarray(k_SKH, np.float64)
    S, K, H = k_SKH.shape
    P = S // page_size
    q_KRH = q_NH.reshape(K, -1, H)
    pages_PCKH = k_SKH[: P * page_size].reshape(P, page_size, K, H)
    return {
        "mean": _mean, "quest": _quest, "window": _window, "random": _random, "oracle": _oracle,
    }[policy](q_KRH, pages_PCKH, k_SKH)  # fmt: skip


def _mean(q_KRH: np.ndarray, pages_PCKH: np.ndarray, k_SKH: np.ndarray) -> np.ndarray:
    return np.einsum("kh,mkh->km", q_KRH.mean(1), pages_PCKH.mean(1))


def _quest(q_KRH: np.ndarray, pages_PCKH: np.ndarray, k_SKH: np.ndarray) -> np.ndarray:
    q_KH = q_KRH.mean(1)
    low, high = (q_KH * bound for bound in (pages_PCKH.min(1), pages_PCKH.max(1)))
    return np.maximum(low, high).sum(-1).T


def _window(q_KRH: np.ndarray, pages_PCKH: np.ndarray, k_SKH: np.ndarray) -> np.ndarray:
    return np.tile(np.arange(len(pages_PCKH), dtype=np.float64), (len(q_KRH), 1))


def _random(q_KRH: np.ndarray, pages_PCKH: np.ndarray, k_SKH: np.ndarray) -> np.ndarray:
    position = len(k_SKH) - 1
    return np.array([
        [_hash(position, page, head) >> 8 for page in range(len(pages_PCKH))]
        for head in range(len(q_KRH))
    ], np.float64).reshape(len(q_KRH), len(pages_PCKH))  # fmt: skip


def _hash(position: int, page: int, head: int) -> int:
    """32 bits, the same in every backend."""
    x = _mix(position * 0x9E3779B1 % 2**32 ^ page * 0x85EBCA77 % 2**32)
    return _mix(x ^ head * 0xC2B2AE3D % 2**32)


def _mix(x: int) -> int:
    """lowbias32: a permutation of 32-bit numbers that spreads every bit."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def _oracle(q_KRH: np.ndarray, pages_PCKH: np.ndarray, k_SKH: np.ndarray) -> np.ndarray:
    s_KRS = np.einsum("krh,skh->krs", q_KRH, k_SKH) * k_SKH.shape[-1] ** -0.5
    weights = np.exp(s_KRS - s_KRS.max(-1, keepdims=True))
    mass_KS = (weights / weights.sum(-1, keepdims=True)).sum(1)
    P, C = pages_PCKH.shape[:2]
    return mass_KS[:, : P * C].reshape(-1, P, C).sum(-1)


def sparse_decode(
    q_NH: np.ndarray,
    k_SKH: np.ndarray,
    v_SKH: np.ndarray,
    page_ids_KJ: np.ndarray,
    *,
    page_size: int,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the newest token over the listed pages: (out [N, H], log-sum-exp [N])."""
    visible_KS = pages_to_tokens(page_ids_KJ, k_SKH.shape[0], page_size)
    out, lse = attention(q_NH[None], k_SKH, v_SKH, visible_KS[:, None, :], scale=scale)
    return out[0], lse[0]


def pages_to_tokens(page_ids_KJ: np.ndarray, num_tokens: int, page_size: int) -> np.ndarray:
    """bool [K, S]: token s is visible to KV head k if its page is listed."""
    page_S = np.arange(num_tokens) // page_size
    return np.stack([np.isin(page_S, pages) for pages in page_ids_KJ])


def attention(
    q_TNH: np.ndarray,
    k_SKH: np.ndarray,
    v_SKH: np.ndarray,
    visible_KTS: np.ndarray,
    *,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale q k) v over the visible keys: (out [T, N, H], natural log-sum-exp [T, N]).

    scale defaults to H ** -0.5. A query that sees no key gives out 0 and log-sum-exp -inf.
    """
    q_TNH, k_SKH, v_SKH = (np.asarray(x, np.float64) for x in (q_TNH, k_SKH, v_SKH))
    T, N, H = q_TNH.shape
    K = k_SKH.shape[1]
    q_TKRH = q_TNH.reshape(T, K, N // K, H)
    logits = np.einsum("tkrh,skh->tkrs", q_TKRH, k_SKH) * (H**-0.5 if scale is None else scale)
    visible = np.broadcast_to(np.asarray(visible_KTS, bool), (K, T, k_SKH.shape[0]))
    logits = np.where(visible.transpose(1, 0, 2)[:, :, None, :], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("tkrs,skh->tkrh", weights / np.where(total > 0, total, 1.0), v_SKH)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0.0)
    return out.reshape(T, N, H), lse.reshape(T, N)


def replay_mask(
    q_TNH: np.ndarray,
    k_TKH: np.ndarray,
    *,
    sparse_T: np.ndarray,
    budgets: Budgets | None,
    page_size: int,
    policy: str = "mean",
) -> np.ndarray:
    """Returns bool [K, T, T], causal: the keys that each query reads.

    Queries that are not in sparse_T read all. The others select with the keys of positions 0 .. t
    only, exactly as decode did.
    """
    T, K = k_TKH.shape[:2]
    visible_KTT = np.broadcast_to(np.tril(np.ones((T, T), bool)), (K, T, T)).copy()
    if budgets is None:
        return visible_KTT
    for t in np.flatnonzero(sparse_T).tolist():
        pages = select_pages(
            q_TNH[t], k_TKH[: t + 1], k=budgets(t), page_size=page_size, policy=policy
        )
        visible_KTT[:, t] &= pages_to_tokens(pages, T, page_size)
    return visible_KTT
