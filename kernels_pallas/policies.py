"""Policies of page selection: how a query ranks the pages before it. Decode has "mean" only.

    mean    mean query of the group . mean key of the page      (arXiv 2606.08446, section 2)
    quest   sum_h max(q_h min_h, q_h max_h), the largest product that the page's keys allow, of the
            mean query of the group and the page's extreme keys  (Quest, arXiv 2406.10774)
    window  the newest pages; with page 0, which is always read, a sink and a window
            (StreamingLLM, arXiv 2309.17453)
    random  a hash of (position, page, KV head)
    oracle  true attention mass: softmax weights over all visible keys, summed over the group

A policy is a pair of functions. `summary(k_BTKH, page)` returns what is stored of every page,
arrays [B, K, P, ...]. `scores(q_BKRtH, summary, k_BKSH, pos_t, page)` returns scores [B, K, t, P]
in float32; of pages with equal scores the lower one is chosen. A replay considers only pages that
are complete at pos_t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Policy(NamedTuple):
    """A summary of every page, and scores from it; the file's docstring has the signatures."""

    summary: Callable[..., Any]
    scores: Callable[..., jax.Array]


def page_means(k_BTKH, page) -> jax.Array:
    """Landmarks [B, P, K, H] of contiguous keys, rounded to the keys' type as append_kv does."""
    mean = _by_page(k_BTKH, page).astype(jnp.float32).mean(2)
    return mean.astype(k_BTKH.dtype).astype(jnp.float32)


def _by_page(k_BTKH, page) -> jax.Array:
    """The keys as [B, P, C, K, H], with zeros past the end."""
    B, T, K, H = k_BTKH.shape
    keys = jnp.pad(k_BTKH, ((0, 0), (0, -T % page), (0, 0), (0, 0)))
    return keys.reshape(B, -1, page, K, H)


def _mean_summary(k_BTKH, page) -> jax.Array:
    return page_means(k_BTKH, page).swapaxes(1, 2)


def _mean_scores(q_BKRtH, landmarks_BKPH, k_BKSH, pos_t, page) -> jax.Array:
    return jnp.einsum("bkth,bkph->bktp", q_BKRtH.mean(2), landmarks_BKPH)


def _quest_summary(k_BTKH, page) -> tuple[jax.Array, jax.Array]:
    keys = _by_page(k_BTKH, page).astype(jnp.float32)
    return keys.min(2).swapaxes(1, 2), keys.max(2).swapaxes(1, 2)


def _quest_scores(q_BKRtH, bounds, k_BKSH, pos_t, page) -> jax.Array:
    low_BKPH, high_BKPH = bounds
    q = q_BKRtH.mean(2)
    up = jnp.einsum("bkth,bkph->bktp", jnp.maximum(q, 0), high_BKPH)
    return up + jnp.einsum("bkth,bkph->bktp", jnp.minimum(q, 0), low_BKPH)


def _nothing(k_BTKH, page) -> tuple[()]:
    return ()


def _window_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> jax.Array:
    B, K, _, t, _ = q_BKRtH.shape
    pages = jnp.arange(_num_pages(k_BKSH, page), dtype=jnp.float32)
    return jnp.broadcast_to(pages, (B, K, t, len(pages)))


def _random_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> jax.Array:
    B, K, _, t, _ = q_BKRtH.shape
    pages, heads = jnp.arange(_num_pages(k_BKSH, page)), jnp.arange(K)
    x = _mix(
        jnp.uint32(pos_t)[:, None] * jnp.uint32(0x9E3779B1)
        ^ jnp.uint32(pages) * jnp.uint32(0x85EBCA77)
    )
    x = _mix(x[None] ^ (jnp.uint32(heads) * jnp.uint32(0xC2B2AE3D))[:, None, None])
    return jnp.broadcast_to((x >> 8).astype(jnp.float32), (B, *x.shape))


def _mix(x) -> jax.Array:
    """A hash of 32-bit numbers, one to one (lowbias32)."""
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15) * jnp.uint32(0x846CA68B)
    return x ^ x >> 16


def _oracle_scores(q_BKRtH, summary, k_BKSH, pos_t, page) -> jax.Array:
    B, K, R, t, H = q_BKRtH.shape
    S = k_BKSH.shape[2]
    s = jnp.einsum("bkrth,bksh->bkrts", q_BKRtH, k_BKSH.astype(jnp.float32)) * H**-0.5
    p = jax.nn.softmax(jnp.where(jnp.arange(S) <= pos_t[:, None], s, -1e30), -1).sum(2)
    return jnp.pad(p, ((0, 0),) * 3 + ((0, -S % page),)).reshape(B, K, t, -1, page).sum(-1)


def _num_pages(k_BKSH, page) -> int:
    return -(-k_BKSH.shape[2] // page)


POLICIES = {
    "mean": Policy(_mean_summary, _mean_scores),
    "quest": Policy(_quest_summary, _quest_scores),
    "window": Policy(_nothing, _window_scores),
    "random": Policy(_nothing, _random_scores),
    "oracle": Policy(_nothing, _oracle_scores),
}
