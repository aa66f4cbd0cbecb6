"""The arrays of the paged KV cache; common/rollout/page_pool.py knows which row owns which page."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from common.model.geometry import Geometry
from kernels_pallas.layout import landmark_shape, page_shape


def allocate(
    g: Geometry, num_pages: int, page_size: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """kv_pages_LKM and landmarks_LMKH, all zeros; page 0 is the null page of padding."""
    L, K, H = g.num_layers, g.num_kv_heads, g.head_dim
    kv = jnp.zeros((L, K, num_pages, *page_shape(page_size, H)), dtype)
    return kv, jnp.zeros((L, num_pages, *landmark_shape(K, H)), dtype)
