"""Wire the torch engine for one configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common import hf
from common.config import Config, ModelConfig
from kernels_triton.ops import resolve
from sparrow_torch.engine import Engine
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import TorchScorer


def build_engine(config: Config, *, geometry: ModelConfig, stop_ids: Sequence[int]) -> Engine:
    """The engine, without weights yet: load_weights brings the learner's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops = resolve(config.attention, device, head_dim=geometry.head_dim)
    dtype = compute_dtype(config.learner.dtype, device)
    return Engine(geometry, config.rollout, stop_ids, dtype, ops=ops, device=device)


def build_scorer(config: Config) -> tuple[TorchScorer, ModelConfig, str]:
    """A scorer without a learner: (scorer with the weights of model.path, geometry, where)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    geometry, weights = hf.load(config.model.path)
    ops = resolve(config.attention, device, head_dim=geometry.head_dim)
    dtype = compute_dtype(config.learner.dtype, device)
    scorer = TorchScorer(Decoder(geometry, ops=ops, dtype=dtype, device=device), config)
    scorer.load_weights(dict(weights), 0)
    return scorer, geometry, f"torch {torch.__version__} on {device}, {dtype}"


def compute_dtype(name: str, device: str) -> torch.dtype:
    """'auto' is bfloat16 on a GPU, float32 on CPU."""
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)
