"""`sparrow cost`: what a schedule saves for a model on a chip, in bytes, seconds and eFLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import overrides
from common.cost import decode_cost, prediction
from common.cost.prediction import Lengths, Setting
from common.errors import UserError
from common.model import hf_config
from common.model.geometry import QWEN3, Geometry
from common.records.json_checks import integer, parse_integer, read
from common.schedule import presets, schedule
from common.schedule.schedule import Schedule

FORMAT = "sparrow-cost-1"
TERMS = {
    "weights": "weights",
    "kv_dense_layers": "KV, dense layers",
    "kv_sparse_layers": "KV, other layers",
    "reserved_pages": "KV, reserved pages",
    "landmarks": "landmarks",
    "prefill": "prefill",
}
"""Name in the record -> name in the table."""


def read_model(name: str) -> Geometry:
    """The geometry of a built-in model, of a config.json, or of the directory that holds one."""
    if name in QWEN3:
        return QWEN3[name]
    path = Path(name)
    if path.is_dir() or (path.is_file() and path.name == "config.json"):
        return hf_config.read_geometry(path if path.is_dir() else path.parent)
    guess = overrides.nearest(name, list(QWEN3))
    hint = f"did you mean {guess}?" if guess else f"built in: {', '.join(QWEN3)}"
    raise UserError(
        f"--model={name}: no built-in model, model directory or config.json of that name; {hint}"
    )


def read_schedule(text: str) -> Schedule:
    """The Schedule of a published name, a file with pages of any size, or k=8 (pages of 16)."""
    path = Path(text)
    if text not in presets.PUBLISHED and path.is_file():
        return schedule.parse(read(path, schedule.FORMAT), text)
    found = schedule.resolve(text, page_size=presets.PAGE_SIZE, bin_tokens=presets.BIN_TOKENS)
    if found is None or found.is_dense:
        raise UserError(f"--schedule={text}: is dense; name one to compare with dense, e.g. k=64")
    return found if found.name else dataclasses.replace(found, name=text)


def read_page_sizes(text: str) -> list[int]:
    """The page sizes in tokens that a text such as "16,32,64,128" lists."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UserError(f"--page_sizes={text}: expected numbers with commas, e.g. 16,32,64,128")
    return [parse_integer(word, "--page_sizes", 1, 2**16) for word in words]


def compare(
    g: Geometry,
    found: Schedule,
    rows: Lengths,
    setting: Setting,
    page_sizes: Sequence[int],
    train_share: float,
) -> dict[str, Any]:
    """The record that --out writes: dense and sparse predictions, page sizes, eFLOPs.

    Dense and sparse decode the same batch: our engines keep landmarks in either case.
    """
    batch = prediction.batch_that_fits(g, rows, found.page_size, setting)
    dense = prediction.predict(g, None, rows, batch, setting)
    sparse = prediction.predict(g, found, rows, batch, setting)
    speedup = sparse["tokens_per_second"] / dense["tokens_per_second"]
    pages = []
    for size in sorted({*page_sizes, found.page_size}):
        other = decode_cost.same_tokens(found, size)
        rate = prediction.predict(g, other, rows, batch, setting)["tokens_per_second"]
        pages.append(
            {"page_size": size, "budgets": list(other.budgets),
             "tokens_per_second": rate, "speedup": rate / dense["tokens_per_second"]}
        )  # fmt: skip
    return {
        "format": FORMAT,
        "schedule": found.to_json(),
        "setting": dataclasses.asdict(setting),
        "prompt": rows.prompt,
        "mean_response": rows.mean_response,
        "longest_response": rows.longest_response,
        "mean_cached": rows.mean_cached,
        "batch": batch,
        "weights_bytes": setting.weight_bytes * decode_cost.num_parameters(g),
        "row_memory_bytes": prediction.row_memory(g, rows, found.page_size, setting),
        "dense": dense,
        "sparse": sparse,
        "speedup": speedup,
        "train_share": train_share,
        "whole_step_speedup": prediction.whole_step_speedup(speedup, train_share),
        "eflops": _eflops(g, found, rows, setting),
        "page_sizes": pages,
        "best_page_size": max(pages, key=lambda p: p["tokens_per_second"])["page_size"],
    }


def _eflops(g: Geometry, found: Schedule, rows: Lengths, setting: Setting) -> dict[str, Any]:
    """The paper's model for the samples of one prompt, responses at their mean length."""
    options = {
        "prompt": rows.prompt, "response": max(1, round(rows.mean_response)),
        "samples": setting.samples, "intensity": setting.chip.intensity,
    }  # fmt: skip
    return {
        "dense": decode_cost.eflops(g, None, **options),
        "sparse": decode_cost.eflops(g, found, **options),
        "speedup": decode_cost.eflops_speedup(g, found, **options),
    }


def text(model: str, r: dict[str, Any], setting: Setting) -> str:
    """The record of `compare` as one table."""
    gb = {key: r[key] / 1e9 for key in ("weights_bytes", "row_memory_bytes")}
    admitted = "reserved for the longest" if setting.reserve else "at the mean of rows in flight"
    lines = [
        f"{model}, {r['schedule']['name'] or 'schedule'} (pages of {r['schedule']['page_size']})",
        setting.chip.describe(),
        f"responses of {r['mean_response']:.0f} tokens (at most {r['longest_response']}) after "
        f"{r['prompt']}, {setting.samples} to a prompt; rows in flight have {r['mean_cached']:.0f} "
        "cached on average",
        f"{r['batch']} rows at once: {setting.memory_share:g} of the memory, less "
        f"{gb['weights_bytes']:.1f} GB of weights, {gb['row_memory_bytes']:.2f} GB a row "
        f"({admitted})",
        "",
        f"{'':20}{'dense':>16}{'sparse':>18}",
        _line("tokens/s", r, lambda p: f"{p['tokens_per_second']:.0f}") + f"   {r['speedup']:.2f}x",
        _line("decode step", r, lambda p: f"{1e3 * p['step_seconds']:.2f} ms"),
    ]
    for key, name in TERMS.items():
        lines.append(_line(name, r, lambda p, key=key: _share(p, key)))
    share = r["train_share"]
    lines += [
        "",
        f"whole RL step, {share:.0%} of a dense one not rollout: {r['whole_step_speedup']:.2f}x",
        f"eFLOPs of arXiv 2606.08446 (weights not read, no dense layers, no reserved pages): "
        f"{r['eflops']['speedup']:.2f}x",
        "",
        *_page_lines(r),
        "",
        "All at the chip's peaks, communication free: bounds, not times that were measured.",
    ]
    return "\n".join(lines)


def _line(name: str, r: dict[str, Any], cell: Any) -> str:
    return f"{name:<20}{cell(r['dense']):>16}{cell(r['sparse']):>18}"


def _share(prediction: dict[str, Any], key: str) -> str:
    seconds = prediction["seconds"][key]
    return f"{1e3 * seconds:.2f} ms {seconds / prediction['step_seconds']:4.0%}"


def _page_lines(r: dict[str, Any]) -> list[str]:
    lines = ["pages of     k          tokens/s   (as many tokens selected, as many rows)"]
    for p in r["page_sizes"]:
        k = f"{min(p['budgets'])}-{min(max(p['budgets']), 99999)}"
        best = "   cheapest" if p["page_size"] == r["best_page_size"] else ""
        lines.append(
            f"{p['page_size']:>8}     {k:<9}{p['tokens_per_second']:>10.0f}   "
            f"{p['speedup']:.2f}x{best}"
        )
    return [
        *lines,
        "Cost alone: whether larger pages keep alpha with as many tokens, only a profile shows.",
    ]


def run(flags: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(table, record) for the flags of `sparrow cost`."""
    from common.cost import chips

    for name, low in (("samples", 1), ("num_dense_layers", 0), ("batch", 0)):
        integer(flags[name], f"--{name}", low)
    for name in ("kv_bytes", "weight_bytes"):
        if flags[name] not in (1, 2, 4):
            raise UserError(f"--{name}={flags[name]}: expected 1 (float8), 2 (bfloat16) or 4")
    if not 0 < flags["memory_share"] <= 1:
        raise UserError(f"--memory_share={flags['memory_share']:g}: expected in (0, 1]")
    if not 0 <= flags["train_share"] < 1:
        raise UserError(f"--train_share={flags['train_share']:g}: expected in [0, 1)")
    g, found = read_model(flags["model"]), read_schedule(flags["schedule"])
    rows = prediction.read_lengths(flags["lengths"], flags["prompt"])
    page_sizes = read_page_sizes(flags["page_sizes"])
    options = {field.name: flags[field.name] for field in dataclasses.fields(Setting)[1:]}
    chip = chips.find(flags["chip"]).times(flags["chips"])
    setting = Setting(chip=chip, **options)
    record = compare(g, found, rows, setting, page_sizes, flags["train_share"])
    return text(flags["model"], record, setting), {"model": flags["model"], **record}
