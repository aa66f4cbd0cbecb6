"""Compiles every kernel for four TPU generations: python -m kernels_pallas.tpu_compile

The shapes are those of Qwen3 1.7B and 8B, with 8 KV heads and pages of 16; SHAPES lists the decode
batches, most of them 64 rows of 40,960 tokens with 256 selected pages. It needs libtpu, but no TPU.
The exit status is 1 if the compiler refuses a program.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import aot
from kernels_pallas.layout import landmark_shape, page_shape
from kernels_pallas.ops import Ops, kernels
from kernels_pallas.readme_table import markdown_table

VOCAB = 151_936


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A decode batch over one layer's cache of 5 to 10 GiB.

    selected: pages that a row reads, the always-read ones included.
    """

    name: str
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 2048
    rows: int = 64
    pages: int = 2560
    page: int = 16
    selected: int = 256
    dtype: Any = jnp.bfloat16


SHAPES = (
    Shape(name="1.7B"),
    Shape(name="8B", heads=32, hidden=4096),
    Shape(name="1.7B, H=64", head_dim=64),
    Shape(name="1.7B, float32", dtype=jnp.float32, rows=32),
    Shape(name="1.7B, float8", dtype=jnp.float8_e4m3fn),
    Shape(name="1.7B, 128K", pages=8192, rows=16, selected=1024),
)


Case = tuple[str, Callable[..., Any], list[Any], tuple[int, ...]]
"""Name, function, abstract arguments, indices of donated arguments."""


def decode_cases(ops: Ops, s: Shape, place) -> Iterator[Case]:
    """The kernels of a decode step; with a float8 cache, only the attention."""
    array = functools.partial(aot.spec, sharding=place)
    scaled = jnp.dtype(s.dtype).itemsize == 1
    dtype = jnp.bfloat16 if scaled else s.dtype
    pool = array((1, s.kv_heads, s.rows * s.pages + 1, *page_shape(s.page, s.head_dim)), s.dtype)
    number, row = array((), jnp.int32), array((s.rows,), jnp.int32)
    table = array((s.rows, s.pages), jnp.int32)
    ids = array((s.rows, s.kv_heads, s.selected), jnp.int32)
    q = array((s.rows, 1, s.heads, s.head_dim), dtype)
    scales = [array((*pool.shape[:3], 2), jnp.float32)] if scaled else []

    def attend(q, pool, layer, ids, start, length, scales=None) -> Any:
        return ops.sparse_decode(q, pool, layer, ids, start, length, page_scales_LKM=scales)

    yield "sparse_decode, list", attend, [q, pool, number, ids, row, row, *scales], ()
    yield "sparse_decode, dense", attend, [q, pool, number, table, row, row, *scales], ()
    if scaled:
        return
    marks = array((1, s.rows * s.pages + 1, *landmark_shape(s.kv_heads, s.head_dim)), dtype)
    one = array((s.rows, s.heads, s.head_dim), dtype)
    kv = array((s.rows, 1, s.kv_heads, s.head_dim), dtype)
    select = functools.partial(ops.select_pages, max_selected=s.selected)
    yield "select_pages", select, [one, marks, number, table, row, row], ()
    if s.name != "8B":  # the same program as for 1.7B
        yield "append_kv", ops.append_kv, [pool, marks, number, kv, kv, table, row, row], (0, 1)


def training_cases(ops: Ops, s: Shape, place) -> Iterator[Case]:
    """The kernels of training, forward and backward: 2 x 4,096 tokens, shapes of 1.7B and 8B."""
    if s not in SHAPES[:2]:
        return
    array = functools.partial(aot.spec, sharding=place)
    q = array((2, 4096, s.heads, s.head_dim), s.dtype)
    kv = array((2, 4096, s.kv_heads, s.head_dim), s.dtype)
    budget, sparse = array((4096,), jnp.int32), array((2, 4096), jnp.bool)

    def replay(q, k, v, budget_T, sparse_BT) -> jax.Array:
        return ops.flash_prefill(q, k, v, budget_T=budget_T, sparse_BT=sparse_BT, page=s.page)

    def gradient(q, k, v) -> tuple[jax.Array, ...]:
        loss = lambda *a: ops.flash_prefill(*a).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    yield "flash_prefill", ops.flash_prefill, [q, kv, kv], ()
    yield "flash_prefill, replay", replay, [q, kv, kv, budget, sparse], ()
    yield "flash_prefill, backward", gradient, [q, kv, kv], ()
    hidden, head = array((4096, s.hidden), s.dtype), array((VOCAB, s.hidden), s.dtype)
    token = array((4096,), jnp.int32)

    def head_gradient(hidden, head, token) -> tuple[jax.Array, ...]:
        loss = lambda h, w: sum(x.sum() for x in ops.token_logprob(h, w, token))  # noqa: E731
        return jax.grad(loss, (0, 1))(hidden, head)

    yield "token_logprob", ops.token_logprob, [hidden, head, token], ()
    yield "token_logprob, backward", head_gradient, [hidden, head, token], ()
    yield "acceptance_overlap", ops.acceptance_overlap, [hidden, hidden, head, token], ()


def compile_all(chips: Sequence[str], only: str = "") -> list[aot.Compiled]:
    """Compile and print every kernel with a name in which the regular expression `only` is found.

    Schedules are dumped for decode kernels only; those of training kernels are so long that writing
    them takes minutes. Since libtpu reads its flags once, each kind has a process of its own.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        work = ((decode_cases, True), (training_cases, False))
        parts = [pool.submit(_compile, list(chips), only, *w).result() for w in work]
    return [row for part in parts for row in part]


def _compile(chips: list[str], only: str, cases, schedules: bool) -> list[aot.Compiled]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) if schedules else None
        aot.prepare(dump)
        for chip in chips:
            ops, place = kernels(chip=aot.device_kind(chip)), aot.one_chip(chip)
            for s in SHAPES:
                for name, f, args, donate in cases(ops, s, place):
                    label = f"{name} ({s.name})"
                    if not re.search(only, label):
                        continue
                    row = aot.compile_program(chip, label, f, args, donate=donate, dump=dump)
                    print(aot.line(row), flush=True)
                    rows.append(row)
    return rows


def table(rows: Sequence[aot.Compiled]) -> str:
    """The table of README.md: one row for each kernel and shape, for all generations."""
    header = [
        "kernel (shape)", "VMEM MiB, v5e", "SMEM KiB", "HBM temporaries MiB",
        f"bundles: largest loop (longest straight stretch) on {', '.join(aot.CHIPS)}",
        "compiled in s",
    ]  # fmt: skip
    by_name: dict[str, dict[str, aot.Compiled]] = {}
    for r in rows:
        by_name.setdefault(r.name, {})[r.chip] = r
    cells = []
    for name, chips in by_name.items():
        some = [chips[chip] for chip in aot.CHIPS]
        v5e, dumped = chips["v5e"], all(r.bundles is not None for r in some)
        cells.append([
            name,
            f"{v5e.vmem / 2**20:.1f}",
            "-" if v5e.smem is None else f"{v5e.smem / 1024:.0f}",
            _span([f"{r.hbm_temporaries / 2**20:.1f}" for r in some]),
            ", ".join(f"{r.bundles} ({r.straight})" for r in some) if dumped else "-",
            _span([f"{r.seconds:.0f}" for r in some]),
        ])  # fmt: skip
    kinds = f"{len(by_name)} programs on each of {', '.join(aot.CHIPS)}"
    return f"{kinds}; all compile ({aot.provenance()}).\n\n{markdown_table(header, cells)}"


def _span(numbers: Sequence[str]) -> str:
    """The least and the largest of some numbers, or one number if they are equal."""
    least, largest = min(numbers, key=float), max(numbers, key=float)
    return least if least == largest else f"{least}-{largest}"


if __name__ == "__main__":
    sys.exit(aot.command(__doc__, "tpu-compile", compile_all, table))
