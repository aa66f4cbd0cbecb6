"""The arrays of the paged KV cache; common/rollout/page_pool.py knows which row owns which page."""

from __future__ import annotations

from typing import Any

import torch

from common.model.geometry import Geometry
from kernels_triton.layout import landmark_shape, page_shape


def allocate(
    g: Geometry, num_pages: int, page_size: int, dtype: torch.dtype, *, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_pages_LKMxCH and landmarks_LMKH, all zeros; page 0 is the null page of padding."""
    L, K, H = g.num_layers, g.num_kv_heads, g.head_dim
    place = {"dtype": dtype, "device": device}
    kv = torch.zeros((L, K, num_pages, *page_shape(page_size, H)), **place)
    return kv, torch.zeros((L, num_pages, *landmark_shape(K, H)), **place)
