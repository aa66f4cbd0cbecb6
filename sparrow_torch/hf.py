"""Hugging Face model directories (common/model/hf.py) into and out of a torch decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.model import hf
from kernels_triton.ops import REFERENCE, Ops
from sparrow_torch.model import Decoder


def load(path: str | Path, *, ops: Ops = REFERENCE, dtype=torch.float32, device=None) -> Decoder:
    """A decoder with geometry and weights from a model directory."""
    geometry, weights = hf.load(path)
    model = Decoder(geometry, ops=ops, dtype=dtype, device=device)
    model.load(dict(weights))
    return model


def save(
    path: str | Path,
    model: Decoder,
    extra: Mapping[str, Any] | None = None,
    *,
    source: str = "",
) -> None:
    """Write config.json and model.safetensors in the type of the decoder's weights.

    extra and source: see `save` of common/model/hf.py.
    """
    dtype = "bfloat16" if model.embed_VD.dtype == torch.bfloat16 else "float32"
    params = {name: x.detach().float().cpu().numpy() for name, x in model.named_parameters()}
    hf.save(path, model.geometry, params, dtype, extra, source=source)
