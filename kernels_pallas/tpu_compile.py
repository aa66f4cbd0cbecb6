"""Every kernel, compiled for four TPU generations: python -m kernels_pallas.tpu_compile

Shapes of Qwen3 1.7B and 8B: 64 rows of 40,960 tokens, 8 KV heads, pages of 16, 256 pages selected.
Needs libtpu, not a TPU. Exit status 1 if anything is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import aot
from kernels_pallas.ops import Ops, kernels
from kernels_pallas.reference import page_shape

VOCAB = 151_936


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A decode batch; selected counts the reserved pages."""

    name: str
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 2048
    layers: int = 28
    rows: int = 64
    pages: int = 2560
    page: int = 16
    selected: int = 256
    dtype: Any = jnp.bfloat16


SHAPES = (
    Shape(name="1.7B"),
    Shape(name="8B", heads=32, hidden=4096, layers=36),
    Shape(name="1.7B, H=64", head_dim=64),
    Shape(name="1.7B, float32", dtype=jnp.float32, rows=32),
    Shape(name="1.7B, 128K", pages=8192, rows=16, selected=1024),
)


def cases(ops: Ops, s: Shape, place) -> Iterator[tuple[str, Callable[..., Any], list[Any], tuple]]:
    """(name, function, abstract arguments, donated ones) of the kernels at one shape."""
    array = functools.partial(aot.spec, sharding=place)
    pool = array(
        (s.layers, s.kv_heads, s.rows * s.pages + 1, *page_shape(s.page, s.head_dim)), s.dtype
    )
    marks = array((s.layers, s.rows * s.pages + 1, s.kv_heads, s.head_dim), s.dtype)
    number, row = array((), jnp.int32), array((s.rows,), jnp.int32)
    table = array((s.rows, s.pages), jnp.int32)
    ids = array((s.rows, s.kv_heads, s.selected), jnp.int32)
    q = array((s.rows, 1, s.heads, s.head_dim), s.dtype)
    kv = array((s.rows, 1, s.kv_heads, s.head_dim), s.dtype)
    select = functools.partial(ops.select_pages, max_selected=s.selected)
    one = array((s.rows, s.heads, s.head_dim), s.dtype)
    yield "select_pages", select, [one, marks, number, table, row, row], ()
    yield "sparse_decode, list", ops.sparse_decode, [q, pool, number, ids, row, row], ()
    yield "sparse_decode, dense", ops.sparse_decode, [q, pool, number, table, row, row], ()
    yield "append_kv", ops.append_kv, [pool, marks, number, kv, kv, table, row, row], (0, 1)
    if s is SHAPES[0] or s is SHAPES[1]:
        yield from _training_cases(ops, s, array)


def _training_cases(ops: Ops, s: Shape, array):
    """flash_prefill and token_logprob, forward and backward; 2 x 4,096 tokens."""
    q = array((2, 4096, s.heads, s.head_dim), s.dtype)
    kv = array((2, 4096, s.kv_heads, s.head_dim), s.dtype)
    budget, prompt = array((4096,), jnp.int32), array((2,), jnp.int32)

    def replay(q, k, v, budget_T, prompt_len_B):
        return ops.flash_prefill(q, k, v, budget_T=budget_T, prompt_len_B=prompt_len_B, page=s.page)

    def gradient(q, k, v):
        loss = lambda *a: ops.flash_prefill(*a).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    yield "flash_prefill", ops.flash_prefill, [q, kv, kv], ()
    yield "flash_prefill, replay", replay, [q, kv, kv, budget, prompt], ()
    yield "flash_prefill, backward", gradient, [q, kv, kv], ()
    hidden, head = array((4096, s.hidden), s.dtype), array((VOCAB, s.hidden), s.dtype)
    token = array((4096,), jnp.int32)

    def head_gradient(hidden, head, token):
        loss = lambda h, w: sum(x.sum() for x in ops.token_logprob(h, w, token))  # noqa: E731
        return jax.grad(loss, (0, 1))(hidden, head)

    yield "token_logprob", ops.token_logprob, [hidden, head, token], ()
    yield "token_logprob, backward", head_gradient, [hidden, head, token], ()
    yield "acceptance_overlap", ops.acceptance_overlap, [hidden, hidden, head, token], ()


def compile_all(
    chips: Sequence[str], shapes: Sequence[Shape] = SHAPES, *, say=print, dump: Path | None = None
) -> list[aot.Compiled]:
    """Compile every kernel; `aot.prepare` has to come first."""
    rows = []
    for chip in chips:
        for s in shapes:
            for name, f, args, donate in cases(kernels(), s, aot.one_chip(chip)):
                label = f"{name} ({s.name})"
                row = aot.compile_program(chip, label, f, args, donate=donate, dump=dump)
                say(line(row))
                rows.append(row)
    return rows


def line(r: aot.Compiled) -> str:
    """One row of the table, for the terminal."""
    if r.error:
        return f"{r.chip:6} {r.name:42} REFUSED after {r.seconds:.1f} s: {r.error}"
    mib = 2.0**-20
    schedule = "" if r.bundles is None else f"  {r.bundles:5} bundles  {r.spills} spills"
    smem = "" if r.smem is None else f"  SMEM {r.smem / 1024:5.0f} KiB"
    hbm = f"HBM {r.hbm_arguments * mib:8.0f} + {r.hbm_temporaries * mib:7.2f} MiB"
    return (
        f"{r.chip:6} {r.name:42} VMEM {r.vmem * mib:5.2f} MiB{smem}  {hbm}  "
        f"in place {r.aliased * mib:8.0f}{schedule}  {r.seconds:.1f} s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it as JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(aot.CHIPS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    arguments = parser.parse_args(argv)
    chips = arguments.chips.split(",")
    if unknown := set(chips) - set(aot.CHIPS):
        parser.error(
            f"--chips: {', '.join(sorted(unknown))}: expected some of {', '.join(aot.CHIPS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        aot.prepare(Path(folder))
        rows = compile_all(chips, dump=Path(folder))
    if arguments.out:
        arguments.out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    refused = [r for r in rows if r.error]
    print(f"{len(rows) - len(refused)} of {len(rows)} programs compile")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
