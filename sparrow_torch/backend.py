"""Wire the torch engine for one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.config import Config, ModelConfig
from common.errors import UserError
from common.model import hf
from kernels_triton.ops import resolve
from sparrow_torch.engine import Engine
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import TorchScorer


def build_engine(config: Config, *, geometry: ModelConfig, stop_ids: Sequence[int]) -> Engine:
    """The engine, without weights yet: load_weights brings the learner's."""
    return Engine(geometry, config.rollout, stop_ids, **_placement(config, geometry))


def build_scorer(config: Config) -> tuple[TorchScorer, ModelConfig, str]:
    """A scorer without a learner: (scorer with the weights of model.path, geometry, where)."""
    geometry, weights = hf.load(config.model.path)
    how = _placement(config, geometry)
    scorer = TorchScorer(Decoder(geometry, **how), config)
    scorer.load_weights(dict(weights), 0)
    return scorer, geometry, f"torch {torch.__version__} on {how['device']}, {how['dtype']}"


def _placement(config: Config, geometry: ModelConfig) -> dict[str, Any]:
    """Device, compute type, and kernels or references; UserError for what cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        ops = resolve(config.attention, device, head_dim=geometry.head_dim)
    except ValueError as error:
        raise UserError(f"config.{error}") from error
    return {"ops": ops, "dtype": compute_dtype(config.learner.dtype, device), "device": device}


def compute_dtype(name: str, device: str) -> torch.dtype:
    """'auto' is bfloat16 on a GPU, float32 on CPU."""
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)
