"""Builds the torch engine and scorer for one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.config import Config
from common.errors import UserError
from common.model import hf
from common.model.geometry import Geometry
from kernels_triton.ops import resolve
from sparrow_torch.engine import Engine
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import Scorer


def build_engine(config: Config, *, geometry: Geometry, stop_ids: Sequence[int]) -> Engine:
    """The engine; its weights come later, from the learner, by load_weights."""
    return Engine(geometry, config.rollout, stop_ids, **_how(config, geometry))


def build_scorer(config: Config) -> tuple[Scorer, Geometry, str]:
    """(A scorer with the weights of model.path, its geometry, one line on where it runs)."""
    geometry, weights = hf.load(config.model.path)
    how = _how(config, geometry)
    scorer = Scorer(Decoder(geometry, **how), config)
    scorer.load_weights(dict(weights), 0)
    return scorer, geometry, f"torch {torch.__version__} on {how['device']}, {how['dtype']}"


def _how(config: Config, geometry: Geometry) -> dict[str, Any]:
    """Device, compute type, and kernels or references.

    Raises: UserError if the configured kernels cannot run here.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        ops = resolve(config.attention, device, head_dim=geometry.head_dim)
    except ValueError as error:
        raise UserError(f"config.{error}") from error
    return {"ops": ops, "dtype": compute_dtype(config.learner.dtype, device), "device": device}


def compute_dtype(name: str, device: str) -> torch.dtype:
    """The type that passes compute in; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)
