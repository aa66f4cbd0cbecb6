"""The arrays of the paged KV cache; common/rollout/page_pool.py knows who owns which page."""

from __future__ import annotations

import torch

from kernels_triton.layout import landmark_shape, page_shape
from sparrow_torch.model import Decoder


def allocate(model: Decoder, num_pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_pages_LKMxCH and landmarks_LMKH, zeroed, with the null page, as the weights are placed."""
    g = model.geometry
    kv = (g.num_layers, g.num_kv_heads, num_pages, *page_shape(page_size, g.head_dim))
    marks = (g.num_layers, num_pages, *landmark_shape(g.num_kv_heads, g.head_dim))
    return model.embed_VD.new_zeros(kv), model.embed_VD.new_zeros(marks)
