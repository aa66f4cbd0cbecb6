"""Measures the decode kernels on a GPU: python -m kernels_triton.bench [--out=bench.json]

First bench_check.py compares every kernel with float64. Then one layer of each Qwen3 geometry is
timed at several contexts and batches: medians by triton's do_bench of CUDA graphs, with a cleared
L2 cache. Each time is also given as GB/s of the bytes that have to be read, and as a share of what
a copy reaches on the card in the same run. Dense attention by PyTorch is timed for the same rows,
and by FlashInfer and FlashAttention if they are installed. It needs torch and triton only. Without
a GPU it lists the cases that it would measure.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels_triton.bench_peers import PEERS
from kernels_triton.cuda_graph import cuda_graph
from kernels_triton.layout import landmark_shape, page_shape
from kernels_triton.ops import Ops, kernels
from kernels_triton.reference import NUM_RESERVED

GEOMETRIES = {"1.7B": (16, 8), "4B, 8B": (32, 8), "14B": (40, 8)}
"""Query and KV heads of the Qwen3 models."""
CONTEXTS, BATCHES = (8192, 32_768, 131_072), (1, 16, 64)
SELECTED = 256
"""Pages that a row reads; at most a quarter of its pages."""
GOALS = {"dense": 0.85, "sparse": 0.75}
"""Goals: share of copy bandwidth."""
SELECT_SHARE = 0.15
"""Goal: time of the selection over time of sparse attention, selection included."""
COPY_BYTES = 2**32
CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One layer of a model.

    selected: pages that a row reads, the always-read ones included.
    """

    model: str
    heads: int
    kv_heads: int
    context: int
    batch: int
    selected: int
    head_dim: int = 128
    page: int = 16
    dtype: str = "bfloat16"

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that each part has to read: landmarks, listed pages, the whole cache."""
        token = 2 * self.kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize
        cached = self.batch * self.context * token
        listed = self.batch * self.selected * self.page * token
        select = cached // (2 * self.page)
        return {"select": select, "attend": listed, "sparse": select + listed, "dense": cached}


def cases(memory: int) -> Iterator[Case]:
    """Every geometry, context and batch for which the cache and another library's copy fit."""
    for model, (heads, kv_heads) in GEOMETRIES.items():
        for context in CONTEXTS:
            for batch in BATCHES:
                c = Case(
                    model=model, heads=heads, kv_heads=kv_heads, context=context, batch=batch,
                    selected=min(SELECTED, context // 64),
                )  # fmt: skip
                if 2.2 * c.bytes_read["dense"] < memory:
                    yield c


def inputs(c: Case, device) -> dict[str, Any]:
    """Normal keys, values and queries of full rows, with pages scattered in one layer's pool."""
    per_row = c.context // c.page
    pages = c.batch * per_row
    place = {"dtype": getattr(torch, c.dtype), "device": device}
    rows = {"dtype": torch.int32, "device": device}
    return {
        "q": torch.randn((c.batch, 1, c.heads, c.head_dim), **place),
        "kv": torch.randn((1, c.kv_heads, pages + 1, *page_shape(c.page, c.head_dim)), **place),
        "marks": torch.randn((1, pages + 1, *landmark_shape(c.kv_heads, c.head_dim)), **place),
        "table": 1 + torch.randperm(pages, device=device).int().reshape(c.batch, per_row),
        "pages": torch.full((c.batch,), per_row, **rows),
        "length": torch.full((c.batch,), c.context, **rows),
        "listed": torch.full((c.batch,), c.selected * c.page, **rows),
        "k": torch.full((c.batch,), c.selected - NUM_RESERVED, **rows),
    }


def parts(ops: Ops, c: Case, x: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What is timed: selection, attention over a selected list, both, dense attention."""

    def select() -> torch.Tensor:
        one = x["q"][:, 0]
        return ops.select_pages(
            one, x["marks"], 0, x["table"], x["pages"], x["k"], max_selected=c.selected
        )[0]

    def attend(ids) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.sparse_decode(x["q"], x["kv"], 0, ids, x["listed"] - 1, x["listed"])

    def dense() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.sparse_decode(x["q"], x["kv"], 0, x["table"], x["length"] - 1, x["length"])

    return {
        "select": select,
        "attend": functools.partial(attend, select()),
        "sparse": lambda: attend(select()),
        "dense": dense,
    }


def combine(c: Case, device) -> Callable[[], None] | None:
    """The launch that joins the splits of sparse attention; None if there is one split."""
    from kernels_triton import sparse_decode as module

    programs, tokens = c.batch * c.kv_heads, c.selected * c.page
    q = torch.empty((c.batch, 1, c.heads, c.head_dim), device=device)
    splits = module.tune_decode(
        getattr(torch, c.dtype).itemsize, c.head_dim, programs, tokens, module.processors(q)
    ).splits
    if splits == 1:
        return None
    part, part_lse = (
        torch.randn((splits, *shape), device=device) for shape in (q.shape, q.shape[:3])
    )
    lse = torch.empty(q.shape[:3], device=device)
    return lambda: module.join_splits(part, part_lse, q, lse)


def microseconds(f: Callable[[], Any]) -> float:
    """Median time of a call on the GPU, without the time that Python takes to launch it."""
    from triton.testing import do_bench

    return 1e3 * do_bench(cuda_graph(f), warmup=10, rep=40, return_mode="median")


def copy_gb_per_s(device) -> float:
    """Bandwidth of a large copy on this card, bytes read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds(lambda: target.copy_(source)) / 1e3


def measure(ops: Ops, c: Case, device, copy: float) -> dict[str, Any]:
    """Times in microseconds, GB/s of the bytes that have to be read, and share of a copy's GB/s."""
    x = inputs(c, device)
    out: dict[str, Any] = dataclasses.asdict(c)
    size = c.bytes_read
    for name, f in parts(ops, c, x).items():
        time = microseconds(f)
        speed = size[name] / time / 1e3
        out |= {f"{name}_us": time, f"{name}_gb_per_s": speed, f"{name}_share": speed / copy}
    joined = combine(c, device)
    out["combine_us"] = microseconds(joined) if joined else 0.0
    for name, build in PEERS.items():
        out[f"{name}_us"] = build(x, microseconds)
    return out | {
        "speedup": out["dense_us"] / out["sparse_us"],
        "select_time": out["select_us"] / out["sparse_us"],
        "combine_time": out["combine_us"] / out["sparse_us"],
    }


def text(r: dict[str, Any]) -> str:
    """The measurement of one case as a line; parts are timed alone and need not add up."""
    cells = "  ".join(
        f"{n} {r[f'{n}_us']:8.1f} us {r[f'{n}_gb_per_s']:5.0f} GB/s ({r[f'{n}_share']:4.0%})"
        for n in ("dense", "sparse")
    )
    peers = ", ".join(
        f"{n} {r[f'{n}_us']:.1f} us" if isinstance(r[f"{n}_us"], float) else f"{n} {r[f'{n}_us']}"
        for n in PEERS
    )
    return (
        f"{r['model']:6} {r['context']:6} x {r['batch']:2}  {cells}  {r['speedup']:5.2f}x  select "
        f"{r['select_time']:.0%}, combine {r['combine_time']:.0%} of sparse; dense by {peers}"
    )


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The number of rows that reach each goal."""
    out = [
        f"{name} at {goal:.0%} of copy bandwidth: {sum(r[f'{name}_share'] >= goal for r in rows)}"
        for name, goal in GOALS.items()
    ]
    few = sum(r["select_time"] <= SELECT_SHARE for r in rows)
    out.append(f"selection within {SELECT_SHARE:.0%} of sparse attention: {few}")
    return "; ".join(out) + f" of {len(rows)} rows"


def right(ops: Ops, device) -> bool:
    """Whether every comparison of bench_check.py holds; prints those that do not."""
    from kernels_triton.bench_check import checks

    results = list(checks(ops, device, CHECKED))
    for r in (r for r in results if not r.ok):
        print(f"WRONG: {r.name}: error {r.error:.2e}, accepted {r.limit:.0e}")
    wrong = sum(not r.ok for r in results)
    print(f"{len(results) - wrong} of {len(results)} comparisons with float64 hold")
    return not wrong


def provenance(device) -> dict[str, Any]:
    """Card, versions and date of a record."""
    import triton

    return {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__,
        "triton": triton.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons and the measurements; 1 if a kernel is wrong, without measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here; nothing was run. On a card with 141 GB it would measure:")
        for c in cases(141 * 10**9):
            mib = ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in c.bytes_read.items())
            print(f"  {c.model}: {c.batch} x {c.context} tokens, {c.selected} pages: {mib}")
        return 0
    record = run(torch.device("cuda"))
    if arguments.out and record:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record else 1


def run(device) -> dict[str, Any] | None:
    """All comparisons and measurements on a GPU; None if a kernel is wrong."""
    record = provenance(device)
    print(", ".join(f"{k} {v}" for k, v in record.items()))
    if not right(kernels(), device):
        print("the kernels are wrong; their speed says nothing")
        return None
    copy = copy_gb_per_s(device)
    print(f"copy bandwidth {copy:.0f} GB/s, read and written")
    rows = []
    for c in cases(torch.cuda.mem_get_info(device)[0]):
        rows.append(measure(kernels(), c, device, copy))
        print(text(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    print(verdict(rows))
    return record | {"copy_gb_per_s": copy, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
