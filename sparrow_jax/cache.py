"""The arrays of the paged KV cache; common/rollout/page_pool.py knows who owns which page."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from common.config import ModelConfig
from kernels_pallas.layout import landmark_shape, page_shape


def allocate(g: ModelConfig, num_pages: int, page_size: int, dtype) -> tuple[jax.Array, jax.Array]:
    """kv_pages_LKM and landmarks_LMKH as stored, zeroed, with the null page."""
    L, K, H = g.num_layers, g.num_kv_heads, g.head_dim
    kv = jnp.zeros((L, K, num_pages, *page_shape(page_size, H)), dtype)
    return kv, jnp.zeros((L, num_pages, *landmark_shape(K, H)), dtype)
