"""Random weights of a policy that starts from scratch.

Weights are normal numbers with mean 0 and variance 1 / fan_in; the two projections that write to
the residual stream (o and down) get half that deviation. Norms start at 1, the QK norms at
`qk_gain`. `embed_offset` adds one random direction to all embeddings, and `induction_init` puts a
rough induction circuit into layers 0 and 1 (induction_init.py).
"""

from __future__ import annotations

import numpy as np
from flax import nnx

from common.config import ModelConfig
from common.model.geometry import Geometry, layer_shapes
from kernels_pallas.ops import REFERENCE, Ops
from sparrow_jax import hf
from sparrow_jax.model import Decoder
from sparrow_jax.toy import induction_init


def random_decoder(c: ModelConfig, *, ops: Ops = REFERENCE) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and float32 weights of a decoder; the weights are a pure function of the settings."""
    geometry = Geometry.from_config(c)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(geometry, ops=ops)))
    return graph, hf.to_state(geometry, random_weights(c).items())


def random_weights(c: ModelConfig) -> dict[str, np.ndarray]:
    """float32 weights by name ("layers.q_LDNH"), from a generator seeded with c.init_seed."""
    geometry, rng = Geometry.from_config(c), np.random.default_rng(c.init_seed)
    V, D = geometry.vocab_size, geometry.hidden_size
    embed_VD = _normal(rng, (V, D), D**-0.5)
    if c.embed_offset:
        signs_D = rng.choice((-1, 1), D).astype(np.float32)
        embed_VD += np.float32(c.embed_offset * D**-0.5) * signs_D
    weights = {"embed_VD": embed_VD, "final_norm_D": np.ones(D, np.float32)}
    if not geometry.tie_embeddings:
        weights["head_VD"] = _normal(rng, (V, D), D**-0.5)
    layers = {name: _layer(c, rng, name, s) for name, s in layer_shapes(geometry).items()}
    if c.induction_init:
        layers = induction_init.add_circuit(c, embed_VD, layers, rng)
    return weights | {f"layers.{name}": value for name, value in layers.items()}


def _layer(
    c: ModelConfig, rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """One stacked layer parameter."""
    if "norm" in name:
        gain = c.qk_gain if name in ("q_norm_LH", "k_norm_LH") else 1.0
        return np.full(shape, gain, np.float32)
    fan_in = shape[1] * shape[2] if name == "o_LNHD" else shape[1]
    gain = 0.5 if name in ("o_LNHD", "down_LFD") else 1.0
    return _normal(rng, shape, gain * fan_in**-0.5)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """float32 normal numbers of standard deviation `scale`."""
    return rng.standard_normal(shape, np.float32) * np.float32(scale)
