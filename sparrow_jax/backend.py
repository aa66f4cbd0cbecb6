"""Builds the parts of the JAX backend for one configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import Config
from common.errors import UserError
from common.model.geometry import Geometry
from common.protocols import Backend
from kernels_pallas.ops import Ops, resolve
from kernels_pallas.sparse_decode import MIN_LINES
from kernels_pallas.tuning import LANES
from sparrow_jax import hf, placement
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.engine import Engine
from sparrow_jax.learner import Learner
from sparrow_jax.model import Decoder
from sparrow_jax.placement import Placement
from sparrow_jax.scorer import Scorer
from sparrow_jax.toy.random_init import random_decoder


def build(config: Config, *, vocab_size: int, stop_ids: Sequence[int]) -> Backend:
    """Engine, scorer and learner, all with the same weights under version 0.

    vocab_size: number of tokens of the task. A model from scratch gets max(vocab_size,
    model.vocab_size) tokens; a loaded one must have at least vocab_size.
    """
    geometry, graph, params = init_model(config, vocab_size)
    dtype = compute_dtype(config.learner.dtype)
    engine = Engine(graph, geometry, config.rollout, stop_ids, dtype)
    scorer, reference = Scorer(graph, config, dtype), Scorer(graph, config, dtype)
    learner = Learner(graph, params, config, dtype)
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
            extra={} if config.model.path else new_entries(config, stop_ids),
            source=config.model.path,
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
    """Context length and stop tokens of its run, for config.json of a model from scratch."""
    context = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return {"eos_token_id": list(stop_ids), "max_position_embeddings": max(32768, context)}


def build_scorer(config: Config) -> tuple[Scorer, Geometry, str]:
    """(A scorer with the weights of model.path, its geometry, one line on where it runs)."""
    geometry, graph, params = init_model(config, 1)
    dtype = compute_dtype(config.learner.dtype)
    scorer = Scorer(graph, config, dtype)
    scorer.load_weights(Placement.on_devices(config.learner.mesh).put_weights(params), 0)
    device = jax.devices()[0]
    num = math.prod(config.learner.mesh)
    where = f"jax {jax.__version__} on {device.platform}, {num} device{'s' * (num > 1)}"
    return scorer, geometry, f"{where}, {jnp.dtype(dtype).name}"


def export_weights(params: nnx.State) -> dict[str, Any]:
    """Weights by name ("layers.q_LDNH"); those that lie on several devices as numpy arrays."""
    return {name: placement.on_one_device(x) for name, x in hf.flat_weights(params).items()}


def init_model(config: Config, vocab_size: int) -> tuple[Geometry, nnx.GraphDef, nnx.State]:
    """Geometry, graph and float32 weights, from the directory model.path or from a random start.

    Raises: UserError if the model in the directory has fewer than vocab_size tokens.
    """
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
    model = dataclasses.replace(config.model, vocab_size=size)
    geometry = Geometry.from_config(model)
    return geometry, *random_decoder(model, ops=_ops(config, geometry))


def _ops(config: Config, geometry: Geometry) -> Ops:
    """Kernels or references for this device, model and mesh.

    attention="kernel" is a demand on the rollout engine. If the engine belongs to another
    framework, the learner cannot use its kernels and takes "auto".
    Raises: UserError if the configured kernels cannot run here.
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
    """Raise UserError for a page size that the Pallas kernels cannot read.

    Decode copies keys and values of a page as whole tiles of HBM. Replay cuts its blocks of keys,
    which are powers of 2 of at least 128 tokens, into whole pages.
    """
    least = MIN_LINES * LANES // head_dim
    if not least <= page_size <= LANES or page_size & (page_size - 1):
        raise UserError(
            f"rollout.page_size={page_size}: expected a power of 2 from {least} to {LANES} for "
            f"kernels with heads of {head_dim}; change it, or set attention=reference"
        )


def compute_dtype(name: str) -> jnp.dtype:
    """The type that passes compute in; "auto" is bfloat16 on an accelerator, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
