"""Measures the decode kernels on a TPU: python -m kernels_pallas.bench [--out=bench.json]

First it compares the kernels with the references. Then it times one layer of Qwen3 at several
contexts: selection (over pages that follow one another in the pool, over scattered pages, and by
XLA's gather and top_k), attention over the selected pages, and dense attention. Each time is also
given as GB/s of the bytes that the part has to read and as a share of the chip's HBM peak. Without
a TPU it lists the cases that it would measure. It has not run on a TPU yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.layout import landmark_shape, page_shape
from kernels_pallas.ops import REFERENCE, Ops, kernels
from kernels_pallas.reference import NUM_RESERVED
from kernels_pallas.tuning import HBM_GB_PER_S

POOL_BYTES = 4 * 2**30
GOALS = {"dense": 0.85, "attend": 0.6}
"""Goals: share of the HBM peak."""
SELECT_SHARE = 0.2
"""Goal: time of the selection over time of the attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One layer of Qwen3 1.7B (16 query heads) or 8B (32 query heads).

    selected: pages that a row reads, the always-read ones included.
    """

    context: int
    heads: int
    batch: int
    selected: int
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    dtype: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that each part has to read: landmarks, listed pages, the whole cache."""
        cached = self.batch * self.context * self.token_bytes
        listed = self.batch * self.selected * self.page * self.token_bytes
        return {"select": cached // (2 * self.page), "attend": listed, "dense": cached}


def cases() -> Iterator[Case]:
    """Contexts of 4K to 128K tokens; at most 64 rows, and POOL_BYTES of one layer's cache."""
    for heads in (16, 32):
        for context in (4096, 8192, 16_384, 32_768, 65_536, 131_072):
            row = Case(context=context, heads=heads, batch=1, selected=1)
            batch = max(1, min(64, POOL_BYTES // row.bytes_read["dense"]))
            pages = context // row.page
            yield dataclasses.replace(row, batch=batch, selected=min(256, pages // 4))


def inputs(c: Case, seed: int = 0) -> dict[str, Any]:
    """Normal keys, values and queries of full rows, with pages in order and scattered."""
    pages = c.batch * (c.context // c.page)
    keys = jax.random.split(jax.random.key(seed), 3)
    pool = (1, c.kv_heads, pages + 1, *page_shape(c.page, c.head_dim))
    marks = (1, pages + 1, *landmark_shape(c.kv_heads, c.head_dim))
    scattered = 1 + np.random.default_rng(seed).permutation(pages).reshape(c.batch, -1)
    return {
        "q": jax.random.normal(keys[0], (c.batch, 1, c.heads, c.head_dim), c.dtype),
        "kv": jax.random.normal(keys[1], pool, c.dtype),
        "marks": jax.random.normal(keys[2], marks, c.dtype),
        "table": 1 + jnp.arange(pages, dtype=jnp.int32).reshape(c.batch, -1),
        "scattered": jnp.asarray(scattered, jnp.int32),
        "length": jnp.full(c.batch, c.context, jnp.int32),
        "k": jnp.full(c.batch, c.selected - NUM_RESERVED, jnp.int32),
    }


def parts(ops: Ops, c: Case) -> dict[str, Any]:
    """What is timed, as functions of `inputs`; attend also takes a list of pages."""
    listed = jnp.full(c.batch, c.selected * c.page, jnp.int32)

    def select(x, ops=ops, table="table") -> jax.Array:
        pages = x["length"] // c.page
        one = x["q"][:, 0]
        return ops.select_pages(
            one, x["marks"], 0, x[table], pages, x["k"], max_selected=c.selected
        )[0]

    def attend(x, ids) -> tuple[jax.Array, jax.Array]:
        return ops.sparse_decode(x["q"], x["kv"], 0, ids, listed - 1, listed)

    def dense(x) -> tuple[jax.Array, jax.Array]:
        return ops.sparse_decode(x["q"], x["kv"], 0, x["table"], x["length"] - 1, x["length"])

    return {
        "select": select,
        "scattered": functools.partial(select, table="scattered"),
        "top_k": functools.partial(select, ops=REFERENCE),
        "attend": attend,
        "sparse": lambda x: attend(x, select(x)),
        "dense": dense,
    }


def check(ops: Ops, c: Case) -> dict[str, float]:
    """Share of page ids that differ from the reference's, and the largest errors of the output.

    Ids are compared for pages in order and for scattered pages, output and log-sum-exp for the list
    of the reference. The reference runs on the host's CPU in float32, because a TPU would round its
    products to bfloat16.
    """
    x = inputs(c, seed=1)
    with jax.default_device(jax.devices("cpu")[0]):
        host = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), x)
        host = {n: a.astype(jnp.float32) if a.ndim > 2 else a for n, a in host.items()}
        plain = parts(REFERENCE, c)
        want, other = plain["select"](host), plain["scattered"](host)
        expected = [np.asarray(a, np.float32) for a in plain["attend"](host, want)]
    kernel = parts(ops, c)
    ids = [np.asarray(jax.jit(kernel[name])(x)) for name in ("select", "scattered")]
    got = jax.jit(kernel["attend"])(x, jnp.asarray(np.asarray(want)))
    error = [
        float(np.abs(np.asarray(a, np.float32) - b).max())
        for a, b in zip(got, expected, strict=True)
    ]
    differ = float((np.stack(ids) != np.stack([want, other])).mean())
    return {"ids_differ": differ, "out_error": error[0], "lse_error": error[1]}


def seconds(f, x, repeats: int = 5, inner: int = 20) -> float:
    """Median time of one call, from `inner` calls in a loop on the device, without dispatch.

    Each call depends on the one before: its queries are changed by 1e-30 of that call's result.
    """

    @jax.jit
    def many(x) -> jax.Array:
        def body(_, q) -> jax.Array:
            first = jax.tree.leaves(f({**x, "q": q}))[0]
            return q + (first.ravel()[0].astype(jnp.float32) * 1e-30).astype(q.dtype)

        return jax.lax.fori_loop(0, inner, body, x["q"])

    jax.block_until_ready(many(x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(many(x))
        times.append((time.perf_counter() - start) / inner)
    return float(np.median(times))


def measure(ops: Ops, c: Case, peak: float) -> dict[str, Any]:
    """Times in microseconds, GB/s of the bytes that have to be read, and share of the HBM peak."""
    x = inputs(c)
    out: dict[str, Any] = dataclasses.asdict(c)
    functions = parts(ops, c)
    ids = jax.jit(functions["select"])(x)
    functions["attend"] = functools.partial(functions["attend"], ids=ids)
    size = c.bytes_read
    size |= {"scattered": size["select"], "top_k": size["select"]}
    size["sparse"] = size["select"] + size["attend"]
    for name, f in functions.items():
        time_ = seconds(f, x)
        speed = size[name] / time_ / 1e9
        out |= {f"{name}_us": time_ * 1e6, f"{name}_gb_per_s": speed, f"{name}_share": speed / peak}
    return out | {
        "speedup": out["dense_us"] / out["sparse_us"],
        "select_time": out["select_us"] / out["attend_us"],
        "select_bytes": size["select"] / size["attend"],
    }


def text(r: dict[str, Any]) -> str:
    """The measurement of one case as a line for the terminal."""
    cells = "  ".join(
        f"{n} {r[f'{n}_us']:8.1f} us {r[f'{n}_gb_per_s']:6.0f} GB/s ({r[f'{n}_share']:4.0%})"
        for n in ("select", "attend", "dense")
    )
    return (
        f"{r['heads']:3} heads {r['context']:7} x {r['batch']:2}  {cells}  {r['speedup']:.2f}x  "
        f"select {r['select_time']:.0%} of attend (bytes {r['select_bytes']:.0%}); scattered "
        f"{r['scattered_us']:.1f} us, XLA {r['top_k_us']:.1f} us"
    )


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The number of rows that reach each goal."""
    out = [
        f"{name} at {goal:.0%} of peak: {sum(r[f'{name}_share'] >= goal for r in rows)}"
        for name, goal in GOALS.items()
    ]
    few = sum(r["select_time"] <= SELECT_SHARE for r in rows)
    out.append(f"selection within {SELECT_SHARE:.0%} of attention: {few}")
    return "; ".join(out) + f" of {len(rows)} rows"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons and the measurements; 1 if a kernel is wrong, without measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    arguments = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "tpu":
        print(f"no TPU here (the device is {device.platform}); nothing was run. It would measure:")
        for c in cases():
            mib = ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in c.bytes_read.items())
            size = f"{c.batch} x {c.context} tokens, {c.selected} pages"
            print(f"  {c.heads} heads, {size}: {mib}")
        return 0
    peak = HBM_GB_PER_S.get(device.device_kind)
    if peak is None:
        raise ValueError(f"{device.device_kind=}: add its HBM peak to kernels_pallas/tuning.py")
    print(f"{device.device_kind}, HBM peak {peak} GB/s, jax {jax.__version__}")
    tolerance = {"ids_differ": 0.01, "out_error": 0.03, "lse_error": 0.01}  # of bfloat16 inputs
    for c in (Case(context=4096, heads=h, batch=2, selected=64) for h in (16, 32)):
        errors = check(kernels(), c)
        print(f"{c.heads} heads against the reference: {errors}")
        if wrong := [n for n, e in errors.items() if not e <= tolerance[n]]:
            print(f"the kernels are wrong ({', '.join(wrong)}); their speed says nothing")
            return 1
    rows = []
    for c in cases():
        rows.append(measure(kernels(), c, peak))
        print(text(rows[-1]), flush=True)
    print(verdict(rows))
    if arguments.out:
        record = {"device": device.device_kind, "jax": jax.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
