"""Hugging Face model directories (common/model/hf.py) into and out of a Flax decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from common.model import hf
from common.model.geometry import Geometry
from sparrow_jax.model import Decoder


def load(path: str | Path, dtype: Any = jnp.float32) -> tuple[Geometry, nnx.State]:
    """Geometry and weights in `dtype`; the state fits `nnx.split(Decoder(geometry, ...))`."""
    geometry, weights = hf.load(path, jnp.dtype(dtype))
    return geometry, to_state(geometry, weights)


def to_state(geometry: Geometry, weights: Iterable[tuple[str, Any]]) -> nnx.State:
    """A Decoder's state from (name, array) pairs, names as in "layers.q_LDNH"."""
    params = nnx.traversals.unflatten_mapping(
        {tuple(name.split(".")): jnp.asarray(x) for name, x in weights}
    )
    state = nnx.split(nnx.eval_shape(lambda: Decoder(geometry)))[1]
    nnx.replace_by_pure_dict(state, params)
    return state


def flat_weights(params: nnx.State | Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name ("layers.q_LDNH") of a Decoder's state or its pure dict."""
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return nnx.traversals.flatten_mapping(pure, sep=".")


def save(
    path: str | Path,
    geometry: Geometry,
    params: nnx.State | Mapping[str, Any],
    dtype: str = "float32",
    extra: Mapping[str, Any] | None = None,
    *,
    source: str = "",
) -> None:
    """Write config.json and model.safetensors; the arguments are those of common/model/hf.py."""
    hf.save(path, geometry, flat_weights(params), dtype, extra, source=source)
