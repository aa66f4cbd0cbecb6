"""Numpy float64 oracles: what every reference and kernel is compared with. Slow, obvious, exact.

Weights and activations are cast to float64; nothing is batched; a position is a Python loop where
that is clearer. Page rule: arXiv 2606.08446, section on sparse rollout (see `select_pages`).
Axes: T query tokens, S key tokens, N query heads, K KV heads, R = N / K query heads per KV head,
H head dim, J selected pages, V vocabulary. Query head n belongs to KV head n // R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from common.config import ModelConfig
from common.schedule import policies

Budgets = Callable[[int], int | None]
"""Position of the query -> k, the pages allowed beside the reserved ones; None = all pages."""


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x**2) + eps) * gain, over the last axis."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.float64(gain)


def rope(x_TNH: np.ndarray, positions_T: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding in the HF convention: dimension i is paired with i + H / 2.

    angle_i = position * theta ** (-2 i / H);  (a, b) -> (a cos - b sin, b cos + a sin)
    """
    x_TNH = np.asarray(x_TNH, np.float64)
    half = x_TNH.shape[-1] // 2
    angle = np.asarray(positions_T, np.float64)[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def num_pages(position: int, page_size: int) -> int:
    """Pages that a query at `position` (0-based) sees, the last one possibly part filled."""
    return position // page_size + 1


def select_pages(
    q_NH: np.ndarray, k_SKH: np.ndarray, *, k: int | None, page_size: int, policy: str = "mean"
) -> np.ndarray:
    """Pages read by the newest token: int64 [K, J], sorted; J = min(n, k + 3).

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
    scores_KM = policies.page_scores(policy, q_NH, k_SKH, page_size)[:, candidates]
    best = np.argsort(-scores_KM, axis=1, kind="stable")[:, :k]
    chosen = [np.concatenate([[0], candidates[b], [n - 2, n - 1]]) for b in best]
    return np.sort(np.array(chosen), axis=1)


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
    prompt_len: int,
    budgets: Budgets | None,
    page_size: int,
    policy: str = "mean",
) -> np.ndarray:
    """bool [K, T, T], causal: what each query read when it was decoded (before prompt_len: all).

    The query at position t selects with the keys of positions 0 .. t only, exactly as decode did.
    """
    T, K = k_TKH.shape[:2]
    visible_KTT = np.broadcast_to(np.tril(np.ones((T, T), bool)), (K, T, T)).copy()
    if budgets is None:
        return visible_KTT
    for t in range(prompt_len, T):
        pages = select_pages(
            q_TNH[t], k_TKH[: t + 1], k=budgets(t), page_size=page_size, policy=policy
        )
        visible_KTT[:, t] &= pages_to_tokens(pages, T, page_size)
    return visible_KTT


def log_softmax(logits_NV: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log softmax(logits / temperature) over the last axis."""
    x = np.float64(logits_NV) / temperature
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def token_logprob(
    logits_NV: np.ndarray, ids_N: np.ndarray, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(log-prob of ids[i] under row i, entropy of row i in nats); rows and ids are aligned."""
    logp_NV = log_softmax(logits_NV, temperature)
    p_NV = np.exp(logp_NV)
    entropy_N = -(p_NV * np.where(p_NV > 0, logp_NV, 0.0)).sum(axis=-1)
    return np.take_along_axis(logp_NV, np.asarray(ids_N)[:, None], axis=-1)[:, 0], entropy_N


def acceptance_overlap(
    logits_dense_NV: np.ndarray, logits_sparse_NV: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """alpha [N] = sum_v min(p_dense(v), p_sparse(v)) = 1 - total variation (paper, section 3)."""
    p = np.exp(log_softmax(logits_dense_NV, temperature))
    q = np.exp(log_softmax(logits_sparse_NV, temperature))
    return np.minimum(p, q).sum(axis=-1)


def decoder_forward(
    weights: Mapping[str, Any],
    geometry: ModelConfig,
    tokens_T: np.ndarray,
    *,
    prompt_len: int | None = None,
    budgets: Budgets | None = None,
    page_size: int = 16,
    num_dense_layers: int = 2,
    policy: str = "mean",
) -> np.ndarray:
    """Logits [T, V] of a whole decoder; row t is the distribution of the token at t + 1.

    weights: embed_VD, final_norm_D, head_VD (absent = tied), and stacked by layer attn_norm_LD,
    mlp_norm_LD, q_LDNH, k_LDKH, v_LDKH, o_LNHD, gate_LDF, up_LDF, down_LFD, q_norm_LH, k_norm_LH
    (the last two only with qk_norm, applied before RoPE). Pre-norm: x += attn(norm(x));
    x += down(silu(gate(h)) * up(h)), h = norm(x).
    With budgets, queries at positions >= prompt_len of layers >= num_dense_layers read only their
    selected pages (the replay of a sparse decode), chosen by a policy of
    common/schedule/policies.py. ValueError for budgets without prompt_len.
    """
    if budgets is not None and prompt_len is None:
        raise ValueError(
            "prompt_len=None with budgets: expected the number of prompt tokens (dense queries)"
        )
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x_TD = w["embed_VD"][np.asarray(tokens_T)]
    for layer in range(geometry.num_layers):
        sparse = budgets if layer >= num_dense_layers else None
        rule = {"budgets": sparse, "page_size": page_size, "policy": policy}
        x_TD = x_TD + _attention_block(w, geometry, layer, x_TD, prompt_len=prompt_len or 0, **rule)
        h_TD = rms_norm(x_TD, w["mlp_norm_LD"][layer], geometry.norm_eps)
        gate_TF = h_TD @ w["gate_LDF"][layer]
        up_TF = h_TD @ w["up_LDF"][layer]
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ w["down_LFD"][layer]
    x_TD = rms_norm(x_TD, w["final_norm_D"], geometry.norm_eps)
    return x_TD @ w.get("head_VD", w["embed_VD"]).T


def _attention_block(w, geometry, layer, x_TD, **rule) -> np.ndarray:
    h_TD = rms_norm(x_TD, w["attn_norm_LD"][layer], geometry.norm_eps)
    q = np.einsum("td,dnh->tnh", h_TD, w["q_LDNH"][layer])
    k = np.einsum("td,dkh->tkh", h_TD, w["k_LDKH"][layer])
    v = np.einsum("td,dkh->tkh", h_TD, w["v_LDKH"][layer])
    if geometry.qk_norm:
        q = rms_norm(q, w["q_norm_LH"][layer], geometry.norm_eps)
        k = rms_norm(k, w["k_norm_LH"][layer], geometry.norm_eps)
    positions = np.arange(len(x_TD))
    q, k = rope(q, positions, geometry.rope_theta), rope(k, positions, geometry.rope_theta)
    visible = replay_mask(q, k, **rule)
    out, _ = attention(q, k, v, visible)
    return np.einsum("tnh,nhd->td", out, w["o_LNHD"][layer])
