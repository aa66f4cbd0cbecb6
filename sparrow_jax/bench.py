"""`sparrow bench decode`: one decode step, dense and sparse, with the bytes that each has to read.

Layers as in Qwen3-0.6B, 8 sequences, pages of 16 tokens. The sparse step reads as many pages as the
published schedule qwen3-1.7b-0.86 has at that context: 256 at 32K tokens, 224 at 16K, 128 at 8K.
All ratios are measured in one run on one machine. There are two dense paths: that of the engine,
over pages, and one over a contiguous cache, which no paged engine has.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from common.config import ModelConfig
from common.errors import UserError
from common.model.geometry import Geometry
from common.schedule import presets
from common.schedule import schedule as schedules
from kernels_pallas import reference as ops
from kernels_pallas.layout import logical_pages
from sparrow_jax import cache as kv_cache
from sparrow_jax.toy.random_init import random_decoder

QWEN3_06B = ModelConfig(
    vocab_size=8192,  # the real one has 151,936 rows, but the head is not measured here
    num_layers=2,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured; `selected` includes the reserved pages."""

    batch: int = 8
    context: int = 32768
    page: int = 16
    selected: int = 256
    repeats: int = 11


SCHEDULE = "qwen3-1.7b-0.86"
CHUNK = 4096
"""Tokens that the contiguous path reads at a time; the context must be a multiple of it."""


def main(context: int = Shape.context) -> dict[str, Any]:
    """Measure with `context` cached tokens per sequence, print, and return the numbers.

    Raises: UserError if not all paths can run with this context.
    """
    if context < CHUNK or context > 131072 or context % CHUNK:
        raise UserError(f"--context={context}: expected a multiple of {CHUNK} up to 131072")
    schedule = schedules.resolve(
        SCHEDULE, page_size=presets.PAGE_SIZE, bin_tokens=presets.BIN_TOKENS
    )
    assert schedule is not None
    selected = schedule.budget(context - 1) + ops.NUM_RESERVED
    return run(QWEN3_06B, Shape(context=context, selected=selected), print)


def run(model: ModelConfig, shape: Shape, say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements as a flat dictionary; `say` gets a line of text for each."""
    g = Geometry.from_config(model)
    device = jax.devices()[0]
    say(f"{device.platform} ({device.device_kind}), jax {jax.__version__}, {shape}")
    copy = copy_bandwidth()
    say(f"copy bandwidth of this machine, read + written: {copy:.1f} GB/s")
    table, cache = filled_cache(g, shape)
    length_B = jnp.full(shape.batch, shape.context, jnp.int32)
    result: dict[str, Any] = {"copy_gb_per_s": copy, "device": device.device_kind}
    result |= dataclasses.asdict(shape)
    result |= _attention(g, shape, cache, table, length_B, copy, say)
    result |= _step(model, shape, cache, table, length_B - 1, say)
    return result


def copy_bandwidth() -> float:
    """GB/s, read plus written, of an update in place of 256 MiB, more than any cache holds."""
    update = jax.jit(lambda a: a + 1, donate_argnums=0)
    x = update(jnp.zeros(2**26, jnp.float32))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        x = jax.block_until_ready(update(x))
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / float(np.median(times)) / 1e9


def filled_cache(g: Geometry, shape: Shape) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A page table in shuffled order, and a cache of normal keys and values, filled in blocks."""
    rng = np.random.default_rng(0)
    pages = shape.batch * (shape.context // shape.page)
    table = 1 + rng.permutation(pages).reshape(shape.batch, -1).astype(np.int32)
    kv, marks = kv_cache.allocate(g, pages + 1, shape.page, jnp.float32)
    width = 128
    block = rng.standard_normal((1, g.num_kv_heads, width, 2, shape.page, g.head_dim), np.float32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def write(kv, marks, block, layer, page) -> tuple[jax.Array, jax.Array]:
        block = jnp.roll(block, page % 97, 2)
        stored = block.reshape(*block.shape[:3], *kv.shape[3:])
        kv = lax.dynamic_update_slice(kv, stored, (layer, 0, page, 0, 0))
        means = block[:, :, :, 0].mean(3).swapaxes(1, 2).reshape(1, width, *marks.shape[2:])
        return kv, lax.dynamic_update_slice(marks, means, (layer, page, 0, 0))

    for layer in range(g.num_layers):
        for page in range(1, pages + 1, width):
            kv, marks = write(kv, marks, block, layer, min(page, pages + 1 - width))
            jax.block_until_ready(kv)  # so that the temporaries of only one call exist at a time
    return jnp.asarray(table), (kv, marks)


def _attention(g, shape, cache, table, length_B, copy, say) -> dict[str, Any]:
    """Measure decode attention of one layer: both dense paths, and selection plus attention."""
    q = jax.random.normal(jax.random.key(1), (shape.batch, 1, g.num_heads, g.head_dim))
    pages_B = length_B // shape.page
    k_B = jnp.full(shape.batch, shape.selected - ops.NUM_RESERVED, jnp.int32)
    kv, marks = cache
    select = functools.partial(ops.select_pages, max_selected=shape.selected)
    listed_B = jnp.full(shape.batch, shape.selected * shape.page, jnp.int32)

    def select_only(q, kv, marks) -> tuple[jax.Array, jax.Array]:
        return select(q[:, 0], marks, 0, table, pages_B, k_B)

    def sparse(q, kv, marks) -> tuple[jax.Array, jax.Array]:
        ids, _ = select_only(q, kv, marks)
        return ops.sparse_decode(q, kv, 0, ids, listed_B - 1, listed_B)

    def dense(q, kv, marks) -> tuple[jax.Array, jax.Array]:
        return ops.sparse_decode(q, kv, 0, table, length_B - 1, length_B)

    per_token = 2 * g.num_kv_heads * g.head_dim * 4
    cached = shape.batch * shape.context * per_token
    read = shape.batch * shape.selected * shape.page * per_token + cached // (2 * shape.page)
    seconds = _interleaved_seconds(
        {
            "dense_paged": dense,
            "dense_contiguous": _contiguous(shape),
            "sparse": sparse,
            "select": select_only,
        },
        (q, kv, marks),
        shape.repeats,
    )
    num_bytes = {"dense_paged": cached, "dense_contiguous": cached, "sparse": read}
    out: dict[str, Any] = {}
    for name, size in num_bytes.items():
        speed = size / seconds[name] / 1e9
        out |= {f"{name}_ms": seconds[name] * 1e3, f"{name}_gb_per_s": speed}
        say(
            f"{name:17} {seconds[name] * 1e3:8.1f} ms  {size / 2**20:7.0f} MiB  "
            f"{speed:5.1f} GB/s  {speed / copy:4.0%} of copy"
        )
    out |= {
        "speedup": out["dense_paged_ms"] / out["sparse_ms"],
        "speedup_over_contiguous": out["dense_contiguous_ms"] / out["sparse_ms"],
        "byte_bound": cached / read,
        "select_share": seconds["select"] / seconds["sparse"],
    }
    say(
        f"sparse is {out['speedup']:.1f}x faster than the engine's dense path, "
        f"{out['speedup_over_contiguous']:.1f}x than the contiguous one (bytes: "
        f"{out['byte_bound']:.1f}x); selection is {out['select_share']:.0%} of it"
    )
    return out


def _contiguous(shape: Shape) -> Callable[..., jax.Array]:
    """Dense decode without a page table: each (sequence, head) reads one slice of the pool."""

    def attention(q, kv, marks) -> jax.Array:
        B, K, H = shape.batch, kv.shape[1], q.shape[3]
        kv = logical_pages(kv, H)
        chunk = CHUNK // shape.page
        per_row = shape.context // shape.page

        def one(x) -> jax.Array:
            q, row = x

            def body(j, state) -> tuple[jax.Array, jax.Array, jax.Array]:
                start = (0, row % K, 1 + row // K * per_row + j * chunk, 0, 0, 0)
                block = lax.dynamic_slice(kv, start, (1, 1, chunk, 2, shape.page, H))[0, 0]
                return _online_softmax(state, q, block[:, 0], block[:, 1])

            R = q.shape[0]
            start = (jnp.full(R, ops.NEG), jnp.zeros(R), jnp.zeros((R, H)))
            _, denom, acc = lax.fori_loop(0, per_row // chunk, body, start)
            return acc / denom[:, None]

        return lax.map(one, (q.reshape(B * K, -1, H), jnp.arange(B * K)))

    return attention


def _online_softmax(state, q_RH, keys_PCH, values_PCH) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state (max, denominator, weighted sum) after some more pages, all of them visible."""
    m, denom, acc = state
    H = q_RH.shape[1]
    s = q_RH @ keys_PCH.reshape(-1, H).T * H**-0.5
    new = jnp.maximum(m, s.max(-1))
    p, scale = jnp.exp(s - new[:, None]), jnp.exp(m - new)
    acc = acc * scale[:, None] + p @ values_PCH.reshape(-1, H)
    return new, denom * scale + p.sum(-1), acc


def _step(model, shape, cache, table, cached_B, say) -> dict[str, Any]:
    """Measure a decode step of the whole model, in place: time, compiled memory, compilations."""
    graph, params = random_decoder(model)
    token, one = jnp.ones((shape.batch, 1), jnp.int32), jnp.ones(shape.batch, jnp.int32)
    k_B = jnp.full(shape.batch, shape.selected - ops.NUM_RESERVED, jnp.int32)
    num_traces = 0

    @functools.partial(jax.jit, static_argnames="sparse", donate_argnums=0)
    def step(cache, params, cached_B, k_B, sparse) -> Any:
        nonlocal num_traces
        num_traces += 1
        budget = {"k_B": k_B, "max_selected": shape.selected, "num_dense": 0} if sparse else {}
        decoder = nnx.merge(graph, params)
        return decoder.extend(cache, token, cached_B, one, table, dtype=jnp.float32, **budget)

    needed = sum(x.nbytes for x in (*jax.tree.leaves(params), *cache))
    out: dict[str, Any] = {"weights_and_cache_bytes": needed}
    for name, sparse in (("dense", False), ("sparse", True)):
        memory = step.lower(cache, params, cached_B, k_B, sparse).compile().memory_analysis()
        assert memory is not None, "XLA always says it"
        extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        times = []
        for i in range(shape.repeats + 1):
            start = time.perf_counter()  # lengths and budgets change every time: they are data
            cache, hidden = step(cache, params, cached_B - i, k_B - i, sparse)
            jax.block_until_ready((cache, hidden))
            times.append(time.perf_counter() - start)
        out |= {f"step_{name}_ms": float(np.median(times[1:])) * 1e3}
        out |= {f"step_{name}_memory": (needed + extra) / needed}
        say(
            f"whole step, {model.num_layers} layer(s), {name:6}: {out[f'step_{name}_ms']:8.1f} ms, "
            f"compiled memory {out[f'step_{name}_memory']:.3f}x of weights + cache"
        )
    unit = 1 if sys.platform == "darwin" else 1024
    out["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / needed
    out["compilations"] = num_traces
    say(
        f"whole step {out['step_dense_ms'] / out['step_sparse_ms']:.1f}x faster; "
        f"{out['compilations']} compilations for {2 * (shape.repeats + 1)} steps of different "
        f"lengths and budgets; peak memory of the process {out['peak_rss']:.2f}x of weights + cache"
    )
    return out


def _interleaved_seconds(functions, args, repeats: int) -> dict[str, float]:
    """Median wall time of each function.

    The functions are called in turn, so that a busy machine slows all of them alike. The first call
    of each, which compiles it, does not count.
    """
    compiled = {name: jax.jit(f) for name, f in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(each[1:])) for name, each in times.items()}
