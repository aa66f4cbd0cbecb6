"""The small matrix of backends and types on this machine: `make crosscheck`, a few minutes.

`make crosscheck-vllm` adds vLLM.

Random weights of a Qwen3 and a Llama geometry, written as Hugging Face directories; each backend
records a trace in each type, over the tokens of the first; each is compared with that first one.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.crosscheck import compare, compare_page
from common.crosscheck.compare import Comparison
from common.crosscheck.trace_file import Trace
from common.errors import UserError
from common.model import hf
from common.model.geometry import Geometry, param_shapes
from common.records.progress import Progress
from common.records.run_dir import atomic_write_text
from common.report import html_page
from common.report.html_page import text

QWEN3 = Geometry(
    vocab_size=512, num_layers=2, hidden_size=96, intermediate_size=192, num_heads=4,
    num_kv_heads=2, head_dim=64, rope_theta=1e6,
)  # fmt: skip
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, tie_embeddings=False, rope_theta=1e4)
MODELS = {"qwen3": QWEN3, "llama": LLAMA}
SETTINGS = ("--num_prompts=2", "--prompt_tokens=160", "--num_tokens=24",
            "--config.rollout.prefill_chunk=64", "--config.rollout.temperature=0.8",
            "--config.rollout.num_dense_layers=1")  # fmt: skip
FIRST = ("jax", "float32")
OTHERS = (
    ("jax", "bfloat16"),
    ("torch", "float32"),
    ("transformers", "float32"),
    ("torch", "bfloat16"),
)
COLUMNS = {
    "activations": ("forward/",), "log-probs": ("score/",), "alpha": ("replay/",),
    "pages": ("decode/page",), "LSE": ("decode/lse",), "loss": ("grpo/",),
    "gradients": ("grad/",), "step": ("step/",), "tokens": ("stream/",),
}  # fmt: skip


def write_model(path: Path, geometry: Geometry) -> None:
    """Random weights, large enough for distributions that tell tokens apart, and token ids."""
    rng = np.random.default_rng(0)
    params = {}
    for name, shape in param_shapes(geometry).items():
        scale = 1.2 / np.sqrt(np.prod(shape[1:3] if name.endswith("o_LNHD") else shape[1:2]))
        noise = rng.standard_normal(shape, np.float32)
        params[name] = np.float32(1 + 0.1 * noise) if "norm" in name else np.float32(noise * scale)
    hf.save(path, geometry, params, extra={"max_position_embeddings": 4096})
    ids = rng.integers(0, geometry.vocab_size, (4, 160)).tolist()
    atomic_write_text(path / "prompts.json", json.dumps(ids) + "\n")


def record(model: Path, backend: str, dtype: str, force: Path | None) -> Path:
    """A trace, recorded by a process of its own: backends set up their devices once."""
    out = model / f"{backend}-{dtype}.npz"
    command = [
        sys.executable, "-m", "common.cli", "trace",
        f"--backend={backend}", f"--model={model}",
        f"--prompts={model / 'prompts.json'}", f"--out={out}", f"--config.learner.dtype={dtype}",
        *SETTINGS, *([f"--force_tokens={force}"] if force else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command[2:])} failed: {done.stderr.strip().splitlines()[-1]}")
    return out


def record_all(out: Path, more: Sequence[str] = ()) -> dict[tuple[str, str, str], Path]:
    """Traces by (model, backend, type), two at a time, the first of each model before the rest.

    more: further backends.
    """
    for name, geometry in MODELS.items():
        write_model(out / name, geometry)
    firsts = [(name, *FIRST) for name in MODELS]
    # bfloat16 of one model: what its geometry changes shows in float32.
    others = [*OTHERS, *((backend, dtype) for backend in more for dtype in ("float32", "bfloat16"))]
    rest = [(name, *other) for name in MODELS for other in others
            if name == "qwen3" or other[1] == "float32"]  # fmt: skip
    found: dict[tuple[str, str, str], Path] = {}
    with Progress("crosscheck") as progress, ThreadPoolExecutor(2) as pool:
        for jobs in (firsts, rest):
            forced = [found.get((name, *FIRST)) for name, *_ in jobs]
            models = [out / name for name, *_ in jobs]
            paths = pool.map(record, models, *list(zip(*jobs, strict=True))[1:], forced)
            for job, path in zip(jobs, paths, strict=True):
                found[job] = path
                progress(len(found), len(firsts) + len(rest))
    return found


def cell(result: Comparison, prefixes: Sequence[str]) -> str:
    """Largest deviation of some quantities; of tokens, the share that is the same."""
    rows = [row for row in result.rows if row.name.startswith(tuple(prefixes))]
    rows = [row for row in rows if row.where != "not compared"]
    if not rows:
        return "-"
    mark = " !" if any(row.ok is False for row in rows) else ""
    if prefixes == COLUMNS["tokens"]:
        parted = max(row.largest for row in rows if not row.name.endswith("/logp"))
        return (f"{1 - parted:.0%} same" if parted else "same") + mark
    return f"{max(row.largest for row in rows):.0e}{mark}"


def main(out: Path, more: Sequence[str] = ()) -> int:
    """Record, compare, write `out`/index.html and print the table; 1 if anything differs."""
    rows, links, ok = [], [], True
    found = record_all(out, more)
    for (name, backend, dtype), path in found.items():
        if (backend, dtype) == FIRST:
            continue
        a, b = Trace(found[(name, *FIRST)]), Trace(path)
        result = compare.compare(a, b)
        page = out / f"{name}-{backend}-{dtype}.html"
        compare_page.write(result, a, b, page)
        ok &= result.ok
        floor = min((p5 for *_, p5 in result.floor), default=1.0)
        cells = [cell(result, prefixes) for prefixes in COLUMNS.values()]
        rows.append((name, f"{backend} {dtype}", *cells, f"{floor:.4f}"))
        links.append(f'<td><a href="{page.name}">page</a></td>')
    head = ("model", f"{' '.join(FIRST)} against", *COLUMNS, "p5 of dense")
    print("\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)))
    verdict = "All pairs agree." if ok else "Some pairs differ: look for the ! below."
    cells = [[*(f"<td>{text(x)}</td>" for x in row), k] for row, k in zip(rows, links, strict=True)]
    parts = [
        "<h1>Cross-check of backends</h1>",
        f'<p class="verdict">{verdict}</p>',
        html_page.table((*head, ""), cells),
        "<p>Largest deviations; their limits follow from the types, see each page.</p>",
    ]
    atomic_write_text(out / "index.html", html_page.page("Cross-check", parts))
    print(f"{verdict} wrote {out / 'index.html'}")
    return 0 if ok else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m common.crosscheck.matrix OUT [BACKEND...]")
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except UserError as error:
        sys.exit(f"crosscheck: {error}")
