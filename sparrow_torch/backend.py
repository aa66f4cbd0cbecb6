"""Wire the torch engine for one configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.config import Config, ModelConfig
from kernels_triton.ops import resolve
from sparrow_torch.engine import Engine


def build_engine(config: Config, *, geometry: ModelConfig, stop_ids: Sequence[int]) -> Engine:
    """The engine, without weights yet: load_weights brings the learner's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops = resolve(config.attention, device, head_dim=geometry.head_dim)
    dtype = compute_dtype(config.learner.dtype, device)
    return Engine(geometry, config.rollout, stop_ids, dtype, ops=ops, device=device)


def compute_dtype(name: str, device: str) -> torch.dtype:
    """'auto' is bfloat16 on a GPU, float32 on CPU."""
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)
