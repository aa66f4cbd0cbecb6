"""Wire the parts of the JAX backend for one configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import Config, ModelConfig
from common.errors import UserError
from common.protocols import Backend
from kernels_pallas.ops import Ops, resolve
from kernels_pallas.sparse_decode import MIN_LINES
from kernels_pallas.tuning import LANES
from sparrow_jax import hf, sharding
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.engine import Engine
from sparrow_jax.learner import JaxLearner
from sparrow_jax.model import Decoder
from sparrow_jax.scorer import JaxScorer


def build(config: Config, *, vocab_size: int, stop_ids: Sequence[int]) -> Backend:
    """Engine, scorer and learner with the same weights, version 0 already pushed.

    vocab_size: tokens the task uses; a from-scratch model takes max(it, model.vocab_size), a loaded
    one must have at least as many.
    """
    geometry, graph, params = init_model(config, vocab_size)
    dtype = compute_dtype(config.learner.dtype)
    engine = Engine(graph, geometry, config.rollout, stop_ids, dtype)
    scorer, reference = JaxScorer(graph, config, dtype), JaxScorer(graph, config, dtype)
    learner = JaxLearner(graph, params, config, dtype)
    for part in (engine, scorer):
        part.load_weights(learner.params, 0)
    if config.grpo.kl_coef > 0:
        reference.load_weights(params, 0)
    device = jax.devices()[0]
    return Backend(
        engine=engine,
        scorer=scorer,
        reference=reference if config.grpo.kl_coef > 0 else None,
        learner=learner,
        open_checkpoints=lambda path: Checkpoints(path, learner, config.keep_checkpoints),
        save_model=lambda path: hf.save(
            path,
            geometry,
            learner.params,
            extra={} if geometry.path else new_entries(config, stop_ids),
        ),
        export_weights=export_weights,
        geometry=geometry,
        description={
            "backend": f"jax {jax.__version__} on {device.platform} ({device.device_kind})",
            "compute dtype": jnp.dtype(dtype).name,
            "parameters": f"{sum(x.size for x in jax.tree.leaves(params)):,}",
            "attention": nnx.merge(graph, params).ops.name,
        },
    )


def new_entries(config: Config, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Context and stop tokens in config.json of a model from scratch: those of its run."""
    context = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return {"eos_token_id": list(stop_ids), "max_position_embeddings": max(32768, context)}


def build_scorer(config: Config) -> tuple[JaxScorer, ModelConfig, str]:
    """A scorer without a learner: (scorer with the weights of model.path, geometry, where)."""
    geometry, graph, params = init_model(config, 1)
    dtype = compute_dtype(config.learner.dtype)
    scorer = JaxScorer(graph, config, dtype)
    params = sharding.shard_params(params, sharding.make_mesh(config.learner.mesh))
    scorer.load_weights(params, 0)
    device = jax.devices()[0]
    num = math.prod(config.learner.mesh)
    where = f"jax {jax.__version__} on {device.platform}, {num} device{'s' * (num > 1)}"
    return scorer, geometry, f"{where}, {jnp.dtype(dtype).name}"


def export_weights(params: nnx.State) -> dict[str, Any]:
    """Weights by name ("layers.q_LDNH"); numpy arrays where they lie on several devices."""
    one = lambda x: len(x.sharding.device_set) == 1  # noqa: E731
    return {name: x if one(x) else np.asarray(x) for name, x in hf.flat_weights(params).items()}


def init_model(config: Config, vocab_size: int) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """Geometry, graph and float32 weights: from the HF directory, or drawn from model.init_seed."""
    if config.model.path:
        geometry, params = hf.load(Path(config.model.path))
        if geometry.vocab_size < vocab_size:
            raise UserError(
                f"model.path={config.model.path!r} has {geometry.vocab_size} tokens, "
                f"the task needs {vocab_size}"
            )
        ops = _ops(config, geometry)
        graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(geometry, ops=ops)))
        return geometry, graph, params
    size = max(vocab_size, config.model.vocab_size)
    geometry = dataclasses.replace(config.model, vocab_size=size)
    rng = np.random.default_rng(config.model.init_seed)
    graph, params = nnx.split(Decoder(geometry, rng, ops=_ops(config, geometry)))
    return geometry, graph, params


def _ops(config: Config, geometry: ModelConfig) -> Ops:
    """Kernels or references for this device, model and mesh; UserError for what cannot run.

    "kernel" is a demand on the rollout engine. A learner beside an engine of another framework, of
    whose kernels it has none, takes what it can ("auto").
    """
    where = jax.devices()[0].platform, math.prod(config.learner.mesh)
    foreign = config.rollout.engine != "jax" and config.attention == "kernel"
    attention = "auto" if foreign else config.attention
    try:
        ops = resolve(attention, where[0], head_dim=geometry.head_dim, num_devices=where[1])
    except ValueError as error:
        raise UserError(f"config.{error}") from error
    if ops.name == "kernel":
        check_page(config.rollout.page_size, geometry.head_dim)
    return ops


def check_page(page_size: int, head_dim: int) -> None:
    """UserError for pages that the Pallas kernels cannot read.

    Decode copies keys and values of a page as whole tiles of HBM; replay cuts its blocks of keys,
    which are powers of 2 of at least 128 tokens, into whole pages.
    """
    least = MIN_LINES * LANES // head_dim
    if not least <= page_size <= LANES or page_size & (page_size - 1):
        raise UserError(
            f"rollout.page_size={page_size}: expected a power of 2 from {least} to {LANES} for "
            f"kernels with heads of {head_dim}; change it, or set attention=reference"
        )


def compute_dtype(name: str):
    """'auto' is bfloat16 where the device computes in it, float32 on CPU."""
    if name == "auto":
        name = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
