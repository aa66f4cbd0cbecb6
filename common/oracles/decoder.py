"""A whole decoder in float64, dense or as the replay of a sparse decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.model.geometry import Geometry
from common.oracles.sparse_attention import Budgets, attention, replay_mask


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


def decoder_forward(
    weights: Mapping[str, Any],
    geometry: Geometry,
    tokens_T: np.ndarray,
    *,
    sparse_T: np.ndarray | None = None,
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
    With budgets, the queries in sparse_T (bool) of layers >= num_dense_layers read only their
    selected pages (the replay of a sparse decode), chosen by a policy of `page_scores`.
    ValueError for budgets without sparse_T.
    """
    if budgets is not None and sparse_T is None:
        raise ValueError("sparse_T=None with budgets: expected the queries that select, bool [T]")
    if sparse_T is None:
        sparse_T = np.zeros(len(tokens_T), bool)
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x_TD = w["embed_VD"][np.asarray(tokens_T)]
    for layer in range(geometry.num_layers):
        sparse = budgets if layer >= num_dense_layers else None
        rule = {"budgets": sparse, "page_size": page_size, "policy": policy}
        x_TD = x_TD + _attention_block(w, geometry, layer, x_TD, sparse_T=sparse_T, **rule)
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
