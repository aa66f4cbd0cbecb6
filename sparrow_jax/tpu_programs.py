"""Compiles whole programs for four TPU generations: python -m sparrow_jax.tpu_programs

A prefill chunk, a sparse decode step and a learner step of Qwen3 1.7B and 8B in bfloat16, split
over the smallest topology of each generation that holds them. It needs libtpu but no TPU. It shows
that the programs compile and fit; it says nothing about their speed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from common.config import GrpoConfig, LearnerConfig
from common.model.geometry import QWEN3
from kernels_pallas import aot
from kernels_pallas.layout import landmark_shape, page_shape
from kernels_pallas.ops import Ops, kernels
from kernels_pallas.readme_table import markdown_table
from sparrow_jax import learner
from sparrow_jax.model import Decoder
from sparrow_jax.placement import AXES, LANDMARKS, POOL, ROWS, Placement
from sparrow_jax.sharded_ops import shard_ops

Program = tuple[str, Any, list[Any], tuple[int, ...]]
"""Name, function, abstract arguments, and the numbers of the arguments that are donated."""
MODELS = {"1.7B": QWEN3["qwen3-1.7b"], "8B": QWEN3["qwen3-8b"]}
ROLLOUT = {
    ("v5e", "1.7B"): ("v5e:2x2", (1, 1, 4)),
    ("v5e", "8B"): ("v5e:2x4", (2, 1, 4)),
    ("v5p", "1.7B"): ("v5p:2x2x1", (1, 1, 4)),
    ("v5p", "8B"): ("v5p:2x2x1", (1, 1, 4)),
    ("v6e", "1.7B"): ("v6e:2x2", (1, 1, 4)),
    ("v6e", "8B"): ("v6e:2x2", (1, 1, 4)),
    ("tpu7x", "1.7B"): ("tpu7x:2x2x1", (2, 1, 4)),
    ("tpu7x", "8B"): ("tpu7x:2x2x1", (2, 1, 4)),
}
"""Topology and mesh (data, fsdp, tensor) of the rollout programs.

No fsdp, because XLA gathers the weights of all layers before the loop over layers. At least two KV
heads per chip, because XLA stores the landmarks of a single head in another layout than the kernels
read, and copies them.
"""
TRAINING = {
    ("v5e", "1.7B"): ("v5e:2x4", (1, 8, 1)),
    ("v5p", "1.7B"): ("v5p:2x2x1", (1, 4, 1)),
    ("v6e", "1.7B"): ("v6e:2x2", (1, 4, 1)),
    ("tpu7x", "1.7B"): ("tpu7x:2x2x1", (1, 8, 1)),
    ("v5p", "8B"): ("v5p:2x2x2", (1, 8, 1)),
}
"""Topology and mesh of the learner step."""
ROWS_DECODED, CONTEXT, PAGE, SELECTED, CHUNK = 8, 32_768, 16, 256, 512
ROWS_TRAINED, TOKENS_TRAINED = 8, 4096


def _params(state: Any, mesh: Mesh, dtype: Any) -> Any:
    """Abstract weights, placed as placement.py says."""

    def put(path, x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=Placement(mesh).weight(path))

    return jax.tree_util.tree_map_with_path(put, state)


def _ops(mesh: Mesh) -> Ops:
    return shard_ops(kernels(chip=mesh.devices.flat[0].device_kind), mesh)


def rollout_programs(name: str, mesh: Mesh) -> Iterator[Program]:
    """Prefill and decode, dense and sparse, of one model."""
    g = MODELS[name]
    ops = _ops(mesh)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(g, ops=ops)))
    array = lambda s, d, *where: aot.spec(s, d, (mesh, *where))  # noqa: E731
    params = _params(state, mesh, jnp.bfloat16)
    B, pages = ROWS_DECODED, CONTEXT // PAGE
    pool = (g.num_layers, g.num_kv_heads, (B + 1) * pages, *page_shape(PAGE, g.head_dim))
    cache = (
        array(pool, jnp.bfloat16, *POOL),
        array(
            (g.num_layers, pool[2], *landmark_shape(pool[1], g.head_dim)), jnp.bfloat16, *LANDMARKS
        ),
    )
    row, table = array((B,), jnp.int32, ROWS), array((B, pages), jnp.int32, ROWS)

    def extend(cache, params, tokens, start, new, table, k_B=None) -> Any:
        budget = {} if k_B is None else {"k_B": k_B, "max_selected": SELECTED, "num_dense": 2}
        model = nnx.merge(graph, params)
        return model.extend(cache, tokens, start, new, table, dtype=jnp.bfloat16, **budget)

    chunk, token = array((B, CHUNK), jnp.int32, ROWS), array((B, 1), jnp.int32, ROWS)
    yield f"prefill {CHUNK} ({name})", extend, [cache, params, chunk, row, row, table], (0,)
    yield f"decode, dense ({name})", extend, [cache, params, token, row, row, table], (0,)
    yield f"decode, sparse ({name})", extend, [cache, params, token, row, row, table, row], (0,)


def learner_program(name: str, mesh: Mesh) -> Program:
    """Gradient of a micro-batch and the optimizer step, with float32 weights."""
    g = MODELS[name]
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(g, ops=_ops(mesh))))
    params = _params(state, mesh, jnp.float32)
    optimizer = learner.make_optimizer(LearnerConfig())
    abstract = jax.eval_shape(optimizer.init, params)
    everywhere = Placement(mesh).everywhere
    shardings = {x.shape: x.sharding for x in jax.tree.leaves(params)}
    moments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=shardings.get(x.shape, everywhere)
        ),
        abstract,
    )
    shape = (ROWS_TRAINED, TOKENS_TRAINED)
    kinds = dict.fromkeys(learner.FIELDS, jnp.float32) | {"tokens_BT": jnp.int32}
    batch = {name: aot.spec(shape, kind, (mesh, ROWS)) for name, kind in kinds.items()} | {
        "loss_mask_BT": aot.spec(shape, jnp.bool_, (mesh, ROWS))
    }

    def step(params, moments, batch) -> Any:
        grads = jax.tree.map(jnp.zeros_like, params)
        grads, sums = learner.accumulate_gradient(
            params, grads, batch, GrpoConfig().loss_numbers, True, jnp.float32(1.0),
            graph=graph, dtype=jnp.dtype("bfloat16"), remat=True,
        )  # fmt: skip
        updates, moments = optimizer.update(grads, moments, params)
        return jax.tree.map(jnp.add, params, updates), moments, sums["loss"]

    label = f"learner, {ROWS_TRAINED} x {TOKENS_TRAINED} ({name})"
    return label, step, [params, moments, batch], (0, 1)


def compile_all(chips: Sequence[str], only: str = "") -> list[aot.Compiled]:
    """Compile and print the programs of all models, or those with a name that matches `only`."""
    aot.prepare()
    rows = []
    for chip in chips:
        for topology, (name, f, args, donate) in programs(chip):
            if re.search(only, name):
                row = aot.compile_program(chip, f"{name} on {topology}", f, args, donate=donate)
                print(aot.line(row), flush=True)
                rows.append(row)
    return rows


def programs(chip: str) -> Iterator[tuple[str, Program]]:
    """(topology, program) for each program of each model."""
    for model in MODELS:
        topology, shape = ROLLOUT[chip, model]
        for program in rollout_programs(model, aot.mesh(topology, shape, AXES)):
            yield topology, program
        if (chip, model) in TRAINING:
            topology, shape = TRAINING[chip, model]
            yield topology, learner_program(model, aot.mesh(topology, shape, AXES))


def table(rows: Sequence[aot.Compiled]) -> str:
    """The table of README.md, a row for each program."""
    header = [
        "program", "chips", "HBM arguments + temporaries, MiB a chip", "in place MiB",
        "largest copy MiB", "compiled in s",
    ]  # fmt: skip
    cells = []
    for r in rows:
        arguments, temporaries, aliased, largest = (
            f"{size / 2**20:.0f}"
            for size in (r.hbm_arguments, r.hbm_temporaries, r.aliased, r.largest_copy)
        )
        memory = f"{arguments} + {temporaries}"
        cells.append([*r.name.split(" on "), memory, aliased, largest, f"{r.seconds:.0f}"])
    return f"{len(rows)} programs; all compile ({aot.provenance()}).\n\n" + markdown_table(
        header, cells
    )


if __name__ == "__main__":
    sys.exit(aot.command(__doc__, "tpu-programs", compile_all, table))
