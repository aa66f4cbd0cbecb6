"""A random model small enough for the float64 oracle, as a Hugging Face directory."""

import functools
import json

import jax
import numpy as np

from common.config import Config, ModelConfig, RolloutConfig
from common.model.geometry import Geometry
from sparrow_jax import hf
from sparrow_jax.backend import export_weights
from sparrow_jax.toy.random_init import random_decoder
from tests.common.task_files import write_tokenizer

PAGE, CONTEXT = 4, 96
MODEL = ModelConfig(
    vocab_size=260, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2,
    head_dim=8, rope_theta=1e4, qk_gain=2.0,
)  # fmt: skip
G = Geometry.from_config(MODEL)


@functools.cache
def params():
    """Weights with distributions that are peaked enough to tell tokens, and pages, apart."""
    _, drawn = random_decoder(MODEL)
    return jax.tree.map(lambda x: x * 1.2, drawn)


def write(folder):
    """The model with a byte tokenizer, CONTEXT tokens long; its path as text."""
    hf.save(folder, G, params(), extra={"max_position_embeddings": CONTEXT})
    write_tokenizer(folder)
    return str(folder)


def config(path, **rollout):
    settings = {"page_size": PAGE, "num_dense_layers": 1} | rollout
    return Config(model=ModelConfig(path=path), rollout=RolloutConfig(**settings))


def oracle_weights():
    """As common.oracles.float64.decoder_forward takes them, float64."""
    weights = export_weights(params())
    return {name.removeprefix("layers."): np.float64(x) for name, x in weights.items()}


def tokens(rows, length, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (rows, length)).astype(np.int32)


def write_ids(path, count, seed=1):
    path.write_text(json.dumps(tokens(1, count, seed)[0].tolist()))
    return path
