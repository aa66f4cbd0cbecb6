"""Measures speed on one GPU: python -m sparrow_torch.bench [--out=bench.json]

First it runs kernels_triton/bench.py: kernels against float64, then one layer. Then it times whole
decode steps of the engine in CUDA graphs: Qwen3 1.7B, 4B and 8B with random weights in bfloat16 and
a full cache, dense and with the published 0.86 schedule in the same run, beside the bytes that each
step has to read. Each model has two batches: rows of all lengths up to 32K, as in a long rollout,
and rows of 32K. It takes at most 6 minutes and needs torch, triton and numpy but no files. Without
a GPU it lists what it would run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.cost import decode_cost
from common.model.geometry import QWEN3, Geometry
from common.rollout.budgets import plan_budgets
from common.rollout.device import Decoding
from common.schedule.presets import BIN_TOKENS, PAGE_SIZE, PUBLISHED
from common.schedule.schedule import Schedule
from kernels_triton import bench as kernel_bench
from kernels_triton.cuda_graph import cuda_graph
from kernels_triton.ops import Ops, kernels
from sparrow_torch import cache as kv_cache
from sparrow_torch.decode import Capture, DecodeStep, Programs, Shape
from sparrow_torch.model import Decoder

MODELS = {name: QWEN3[f"qwen3-{name}"] for name in ("1.7b", "4b", "8b")}
GOALS = {"1.7b": 3.0, "4b": 2.65, "8b": 2.35}
"""Speedup of a step over rows of all lengths; arXiv 2606.08446 measured 2.21, 2.41, 2.06."""
CONTEXT = 32_768
CACHE_BYTES = 110 * 2**30
NUM_DENSE = 2
MARGIN = 512  # tokens by which a row may grow while its step is timed


class Batch(NamedTuple):
    """Lengths of rows, chosen so that their keys and values fill the cache."""

    name: str
    lengths: np.ndarray


def schedule_of(model: str) -> Schedule:
    """The published schedule with tau = 0.86."""
    name = f"qwen3-{model}-0.86"
    return Schedule(page_size=PAGE_SIZE, bin_tokens=BIN_TOKENS, budgets=PUBLISHED[name], name=name)


def cache_room(g: Geometry, free: int) -> int:
    """Bytes for the cache beside weights and 4 GiB for the rest; 0 if no row of CONTEXT fits."""
    room = min(CACHE_BYTES, int(0.95 * free) - 2 * decode_cost.step_weights(g) - 2**32)
    return room if room >= CONTEXT * decode_cost.token_bytes(g) else 0


def batches(g: Geometry, cache_bytes: int, context: int = CONTEXT) -> Iterator[Batch]:
    """Two batches that fill the cache: lengths spread over (0, context], and all `context`."""
    longest = context - MARGIN
    tokens = cache_bytes // decode_cost.token_bytes(g)
    rows = max(1, int(2 * tokens // (context + MARGIN)))
    lengths = ((np.arange(rows) + 0.5) * longest / rows).astype(np.int32)
    yield Batch(f"1 to {context} tokens", np.maximum(lengths, 1))
    yield Batch(f"{context} tokens", np.full(max(1, tokens // context), longest, np.int32))


def random_model(g: Geometry, ops: Ops, dtype, device) -> Decoder:
    """A decoder with random weights, small enough that no hidden state overflows."""
    model = Decoder(g, ops=ops, dtype=dtype, device=device)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.fill_(1.0) if "norm" in name else x.normal_(std=0.02)
    return model


def build_step(
    model: Decoder, lengths: np.ndarray, schedule: Schedule | None, pool, capture: Capture,
    context: int,
) -> DecodeStep:  # fmt: skip
    """One captured decode step of the engine over these rows; every row has its own pages."""
    width = -(-context // PAGE_SIZE)
    rows = len(lengths)
    device = model.embed_VD.device
    programs = Programs(
        model, pool, num_slots=rows, table_width=width, chunk=1, num_dense=NUM_DENSE,
        stop_ids=[-1], capture=capture,
    )  # fmt: skip
    programs.hidden_AD.normal_()
    plan = plan_budgets(schedule, width)
    num = -(-(lengths + MARGIN) // PAGE_SIZE)
    pages = 1 + torch.randperm(int(num.sum()), device=device).int().cpu().numpy()
    table = np.zeros((rows, width), np.int32)
    for row, own in zip(table, np.split(pages, np.cumsum(num)[:-1]), strict=True):
        row[: len(own)] = own
    key_A = np.split(np.arange(2 * rows, dtype=np.uint32), 2)
    with torch.no_grad():
        shape = Shape(
            rows=rows, num_budgets=len(plan.budgets), bin_tokens=plan.bin_tokens,
            max_selected=plan.max_selected, temperature=1.0, top_p=1.0,
        )  # fmt: skip
        step = DecodeStep(programs, shape)
        decoding = Decoding(
            active_A=np.ones(rows, bool),
            cached_A=lengths,
            limit_A=lengths + MARGIN,
            key_A=(key_A[0], key_A[1]),
            page_table_AP=table,
            **plan._asdict(),
            temperature=1.0,
            top_p=1.0,
        )
        step.load(decoding, np.arange(rows))
    return step


def both_bytes(name: str, g: Geometry, batch: Batch) -> dict[str, int]:
    """Bytes that a dense step and a step under the model's schedule must read."""
    kinds = {"dense": None, "sparse": schedule_of(name)}
    return {
        kind: int(
            sum(
                decode_cost.step_bytes(
                    g, schedule, batch.lengths, num_dense_layers=NUM_DENSE
                ).values()
            )
        )
        for kind, schedule in kinds.items()
    }


def measure(
    name: str, g: Geometry, batch: Batch, times: dict[str, float], copy: float
) -> dict[str, Any]:
    """A row of the table from the milliseconds of a dense and a sparse step."""
    size = both_bytes(name, g, batch)
    out: dict[str, Any] = {"model": name, "lengths": batch.name, "rows": len(batch.lengths)}
    for kind, ms in times.items():
        speed = size[kind] / ms / 1e6
        out |= {f"{kind}_ms": ms, f"{kind}_gb_per_s": speed, f"{kind}_share": speed / copy}
        out[f"{kind}_tokens_per_s"] = len(batch.lengths) / ms * 1e3
    speedup, bound = times["dense"] / times["sparse"], size["dense"] / size["sparse"]
    return out | {"speedup": speedup, "bound": bound}


def text(r: dict[str, Any]) -> str:
    """One line of the table."""
    cells = "  ".join(
        f"{k} {r[f'{k}_ms']:7.2f} ms {r[f'{k}_gb_per_s']:5.0f} GB/s ({r[f'{k}_share']:4.0%} of "
        f"copy) {r[f'{k}_tokens_per_s']:7.0f} tokens/s"
        for k in ("dense", "sparse")
    )
    return (
        f"{r['model']:4} {r['rows']:3} rows of {r['lengths']:18}  {cells}  {r['speedup']:.2f}x, "
        f"bytes allow {r['bound']:.2f}x"
    )


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Each model's speedup over rows of all lengths beside its goal."""
    mixed = [r for r in rows if r["lengths"].startswith("1 to")]
    return "; ".join(f"{r['model']}: {r['speedup']:.2f}x, goal {GOALS[r['model']]}x" for r in mixed)


def run_model(
    name: str, g: Geometry, ops: Ops, device, clock: Callable[[DecodeStep], float],
    copy: float, *, capture: Capture, cache_bytes: int, dtype=torch.bfloat16, context=CONTEXT,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the table of one model; `clock` gives the milliseconds of a step."""
    model = random_model(g, ops, dtype, device)
    kinds = {"dense": None, "sparse": schedule_of(name)}
    for batch in batches(g, cache_bytes, context):
        num_pages = 1 + int((-(-(batch.lengths + MARGIN) // PAGE_SIZE)).sum())
        pool = kv_cache.allocate(g, num_pages, PAGE_SIZE, dtype, device=device)
        for x in pool:
            x.normal_()
        times = {}
        for kind, schedule in kinds.items():
            step = build_step(model, batch.lengths, schedule, pool, capture, context)
            times[kind] = clock(step)
        del pool, step
        yield measure(name, g, batch, times, copy)


def milliseconds(step: DecodeStep) -> float:
    """Median time of a step."""
    from triton.testing import do_bench

    time = do_bench(step.run, warmup=25, rep=300, return_mode="median")
    assert step.active_B.all(), "rows came to their end while they were timed; raise MARGIN"
    return time


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; the exit status is 1, without timing, if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        kernel_bench.main([])
        print("and decode steps, with 110 GiB of cache:")
        for name, g in MODELS.items():
            for batch in batches(g, CACHE_BYTES):
                size, rows = both_bytes(name, g, batch), len(batch.lengths)
                bound = size["dense"] / size["sparse"]
                print(f"  {name}: {rows} rows of {batch.name}, bytes allow {bound:.2f}x")
        return 0
    device = torch.device("cuda")
    record = kernel_bench.run(device)
    if record is None:
        return 1
    record["steps"] = []
    for name, g in MODELS.items():
        gc.collect()
        torch.cuda.empty_cache()
        room = cache_room(g, torch.cuda.mem_get_info(device)[0])
        if not room:
            print(f"{name}: does not fit with a row of {CONTEXT} tokens; not measured")
            continue
        for row in run_model(
            name, g, kernels(), device, milliseconds, record["copy_gb_per_s"],
            capture=cuda_graph, cache_bytes=room,
        ):  # fmt: skip
            record["steps"].append(row)
            print(text(row), flush=True)
    print(verdict(record["steps"]))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
