"""`sparrow report RUN...`: one self-contained report.html of one or several runs.

No scripts, nothing fetched, light and dark mode, readable on a phone and in print. A run may be
running still, have a single step, no evaluation, or null values: what is missing is said or left
out. The words (verdict, tiles) are in common/report/report_words.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.records.metrics import METRICS
from common.report import html_page, plots, plots_overview, plots_schedules, report_words
from common.report.html_page import figures as _figures
from common.report.html_page import table as _table
from common.report.html_page import text as _text
from common.report.plots import is_number
from common.report.report_runs import LoadedRun, flatten, load_runs

_MAX_ALARMS = 40
_BENCH_PATHS = {
    "dense_paged": "dense, the engine's path",
    "dense_contiguous": "dense, contiguous cache",
    "sparse": "sparse, with its selection",
}
_BENCH_NUMBERS = (
    *("batch", "context", "selected", "page"),
    *("speedup", "byte_bound", "step_dense_ms", "step_sparse_ms"),
)


def write_report(
    run_dirs: Sequence[Path | str], out: Path | str, *, bench: Path | str | None = None
) -> None:
    """Write one HTML file about these runs, all on the same axes; the first gives the title.

    bench: a file of `sparrow bench decode --out=FILE`, shown as a table under Speed.
    Raises UserError if there is no run, or a directory holds neither metrics nor a configuration.
    """
    if not run_dirs:
        raise UserError("run_dirs=[]: expected at least one run directory")
    runs = load_runs(run_dirs)
    out = Path(out)
    temporary = out.with_name(out.name + ".tmp")
    text = _page(runs, bench_table(Path(bench)) if bench else "")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out)


def _page(runs: Sequence[LoadedRun], bench: str) -> str:
    title = "Sparrow: " + ", ".join(run.plot.name for run in runs)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="muted">{_text(report_words.subtitle(runs))}</p>',
        _key(runs),
        f'<p class="verdict">{_text(report_words.verdict(runs))}</p>',
        _tiles(runs),
        "<h2>Learning</h2>",
        _figures(_learning(runs)),
        "<h2>Sparse against dense</h2>",
        _figures(_mismatch(runs)),
        *[_bin_table(run) for run in runs],
        "<h2>Speed</h2>",
        _figures(_speed(runs)),
        bench,
        "<h2>Configuration</h2>",
        _config(runs),
        "<h2>Versions and machine</h2>",
        _about(runs),
        "<h2>Alarms</h2>",
        _alarms(runs),
        "<h2>What the names mean</h2>",
        _glossary(),
    ]
    return html_page.page(title, parts)


def _dot(index: int) -> str:
    color = index % len(plots.COLORS)
    return f'<span class="dot" style="background:var(--c{color})"></span>'


def _key(runs: Sequence[LoadedRun]) -> str:
    names = [f"<span>{_dot(i)}{_text(run.plot.name)}</span>" for i, run in enumerate(runs)]
    return f'<p class="key">{" ".join(names)}</p>'


def _tiles(runs: Sequence[LoadedRun]) -> str:
    tiles = []
    for title, values in report_words.tiles(runs):
        lines = []
        for i, (value, remark) in enumerate(values):
            who = f"{_dot(i)}{_text(plots.short(runs[i].plot.name, 16))}"
            number = f"<b>{_text(value)} <small>{_text(remark)}</small></b>"
            lines.append(f'<div><span class="who">{who}</span>{number}</div>')
        tiles.append(f'<div class="tile"><h3>{_text(title)}</h3>{"".join(lines)}</div>')
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _lines(runs: Sequence[LoadedRun], key: str, title: str, **options: Any) -> str | None:
    return plots.lines([run.plot for run in runs], key, title=title, **options)


def _learning(runs: Sequence[LoadedRun]) -> list[tuple[str | None, str]]:
    reward = plots.reward_curves([run.plot for run in runs])
    length = _lines(runs, "response/len_mean", "Response length", ylabel="tokens, mean")
    entropy = _lines(runs, "grpo/entropy", "Entropy of the policy", ylabel="nats per token")
    signal = _lines(
        runs,
        "reward/groups_with_signal",
        "Groups with signal",
        ylabel="share of groups",
        limits=(-0.02, 1.02),
    )
    clip = _lines(
        runs, "grpo/clip_fraction", "Clip fraction", ylabel="share of tokens", limits=(0, None)
    )
    norm = _lines(runs, "grpo/grad_norm", "Gradient norm", ylabel="global norm")
    held = "Held-out: dense decoding; bars are 95 % intervals over its prompts."
    return [
        (reward, held),
        (length, "A length that falls steadily is a sign of collapse."),
        (entropy, "Of the dense policy."),
        (signal, "Groups with different rewards; the others give no gradient."),
        (clip, "Tokens with a ratio that the update clipped."),
        (norm, "Before clipping."),
    ]


def _mismatch(runs: Sequence[LoadedRun]) -> list[tuple[str | None, str]]:
    tau = next((run.plot.tau for run in runs if run.plot.tau is not None), None)
    figures = []
    for name, words in (("p5", "5th"), ("p1", "1st")):
        svg = _lines(
            runs,
            f"mismatch/{name}_min",
            f"Lowest {name} of alpha",
            ylabel="acceptance rate",
            tau=tau,
            limits=(-0.02, 1.02),
        )
        caption = f"{words} percentile of the acceptance rate in the worst judged length bin."
        figures.append((svg, caption))
    for run in runs:
        for name in ("p5", "p1"):
            title = f"{name} of alpha by length: {plots.short(run.plot.name)}"
            caption = "Blue meets tau, orange does not; a dot: too few tokens to judge."
            figures.append((plots.acceptance_map(run.plot, name, title=title), caption))
    schedule = plots_schedules.schedule_steps([run.plot for run in runs])
    figures.append((schedule, "Budget and the 3 pages that are always read, by cached length."))
    for run in runs:
        moved = plots_schedules.budgets_by_step(
            run.plot, f"Budget by step: {plots.short(run.plot.name)}"
        )
        figures.append((moved, "Length bins with a budget that the controller changed."))
    tokens = "share of tokens"
    for key, title, ylabel, top, caption in (
        ("rollout/share_of_pages", "Share of pages read", "share", 1.02, "Pages read / present."),
        ("mismatch/ess", "Effective sample size", tokens, 1.02, "Of importance weights."),
        ("grpo/masked_fraction", "Masked tokens", tokens, None, "Dropped by the correction."),
        ("grpo/truncated_fraction", "Truncated weights", tokens, None, "Cut to the cap C."),
        ("mismatch/k3", "k3 estimate of KL", "nats per token", None, "KL(sparse || dense)."),
    ):
        figures.append((_lines(runs, key, title, ylabel=ylabel, limits=(0, top)), caption))
    return figures


def _speed(runs: Sequence[LoadedRun]) -> list[tuple[str | None, str]]:
    drawn = [run.plot for run in runs]
    ratio = "; the ratio is to the dense run." if any(run.is_dense for run in drawn) else "."
    return [
        (plots_overview.stage_times(drawn), "Mean over steps, the first (compilation) left out."),
        (plots_overview.throughput(drawn), "Median and quartiles over the same steps" + ratio),
        (
            _lines(
                runs, "throughput/rollout_tokens_per_second", "Rollout speed", ylabel="tokens/s"
            ),
            "Sampled tokens per second of rollout.",
        ),
    ]


def _bin_table(run: LoadedRun) -> str:
    measured = [record for record in run.plot.records if record["bins"]]
    last = measured[-max(1, len(measured) // 4) :]
    if not last:
        return ""
    columns = (
        "count",
        "k",
        "mean",
        "p5",
        "p1",
        "k1",
        "k3",
        "ess",
        "clip_fraction",
        "masked_fraction",
    )
    columns = (*columns, "masked_fraction")
    rows = []
    for number in sorted({entry["bin"] for record in last for entry in record["bins"]}):
        entries = [b for record in last for b in record["bins"] if b["bin"] == number]
        first = entries[0]
        row = [f"<td>{_text(first.get('start', ''))}..{_text(first.get('end', ''))}</td>"]
        row += [_bin_cell(entries, column, run.plot.tau) for column in columns]
        rows.append(row)
    name = f"Length bins of {run.plot.name}, mean over the last {len(last)} measured step(s)"
    return (
        f"<details><summary>{_text(name)}</summary>{_table(('tokens', *columns), rows)}</details>"
    )


def _bin_cell(entries: Sequence[Mapping[str, Any]], column: str, tau: float | None) -> str:
    if column == "k":
        return f'<td class="number">{_text(entries[-1].get("k", "-"))}</td>'
    values = [entry[column] for entry in entries if is_number(entry.get(column))]
    if not values:
        return '<td class="number">-</td>'
    mean = float(np.mean(values))
    low = column in ("p5", "p1") and tau is not None and mean < tau
    form = ".0f" if column == "count" else ".3f" if abs(mean) >= 0.001 or mean == 0 else ".1e"
    return f'<td class="number{" low" if low else ""}">{mean:{form}}</td>'


def _config(runs: Sequence[LoadedRun]) -> str:
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    if not keys:
        return '<p class="muted">No config.json in the run directories.</p>'
    differs = [k for k in keys if len({json.dumps(c.get(k)) for c in flat}) > 1]
    same = [k for k in keys if k not in differs]
    head = ("setting", *(run.plot.name for run in runs))

    def rows(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        return [
            [
                f"<td>{_text(k)}</td>",
                *(f'<td class="long">{_text(_shown(c, k))}</td>' for c in configs),
            ]
            for k in names
        ]

    parts = []
    if differs:
        parts.append("<p>Settings that differ:</p>" + _table(head, rows(differs, flat)))
    elif len(runs) > 1:
        parts.append("<p>The runs have equal settings.</p>")
    parts.append(
        f"<details><summary>{'Common' if len(runs) > 1 else 'All'} settings ({len(same)})"
        f"</summary>{_table(('setting', 'value'), rows(same, flat[:1]))}</details>"
    )
    return "".join(parts)


def _shown(config: Mapping[str, Any], key: str) -> Any:
    """A setting as config.json has it; - where it has none."""
    value = config.get(key, "-")
    return "null" if value is None else value


def _about(runs: Sequence[LoadedRun]) -> str:
    rows: list[list[str]] = []
    flat = [
        flatten({k: v for k, v in run.about.items() if k not in ("schedule", "kind")})
        for run in runs
    ]
    for key in dict.fromkeys(key for about in flat for key in about):
        cells = [f'<td class="long">{_text(about.get(key, "-"))}</td>' for about in flat]
        rows.append([f"<td>{_text(key)}</td>", *cells])
    if not rows:
        return '<p class="muted">No run.json in the run directories.</p>'
    return _table(("", *(run.plot.name for run in runs)), rows)


def _alarms(runs: Sequence[LoadedRun]) -> str:
    rows = []
    for run in runs:
        found = [(r["step"], a) for r in run.plot.records for a in r.get("alarms") or []]
        for step, alarm in found[:_MAX_ALARMS]:
            cells = (run.plot.name, step, alarm)
            rows.append([f'<td class="long">{_text(cell)}</td>' for cell in cells])
        if len(found) > _MAX_ALARMS:
            more = f"{len(found) - _MAX_ALARMS} more in metrics.jsonl"
            rows.append([f'<td>{_text(run.plot.name)}</td><td></td><td class="long">{more}</td>'])
    return _table(("run", "step", "alarm"), rows) if rows else "<p>No alarms.</p>"


def _glossary() -> str:
    rows = [
        [f"<td><code>{_text(k)}</code></td>", f'<td class="long">{_text(v)}</td>']
        for k, v in METRICS.items()
    ]
    return f"<details><summary>Metrics</summary>{_table(('name', 'meaning'), rows)}</details>"


def bench_table(path: Path) -> str:
    """What `sparrow bench decode` measured, as HTML; UserError if the file is something else."""
    data = _read_bench(path)
    rows = []
    for key, words in _BENCH_PATHS.items():
        values = [data.get(f"{key}_{unit}") for unit in ("ms", "gb_per_s")]
        if not all(is_number(value) for value in values):
            raise UserError(
                f"{path}: no {key}_ms; expected what `sparrow bench decode --out={path}` writes"
            )
        cells = [f'<td class="number">{value:.3g}</td>' for value in values]
        rows.append([f"<td>{words}</td>", *cells])
    numbers: dict[str, float] = {}
    for key in _BENCH_NUMBERS:
        value = data.get(key)
        if value is None or not is_number(value) or value <= 0:
            raise UserError(f"{path}: {key}={value!r}: expected a positive number; measure anew")
        numbers[key] = value
    whole = numbers["step_dense_ms"] / numbers["step_sparse_ms"]
    words = (
        f"{numbers['batch']:.0f} sequences of {numbers['context']:,.0f} tokens, "
        f"{numbers['selected']:.0f} pages of {numbers['page']:.0f} read: sparse attention is "
        f"{numbers['speedup']:.1f}x faster than the engine's dense attention (the bytes allow "
        f"{numbers['byte_bound']:.1f}x), a whole decode step of two layers {whole:.1f}x. At the "
        "lengths of the runs above there is little to gain."
    )
    head = ("attention of one layer", "ms", "GB/s")
    return f"<h3>Decode at length</h3><p>{_text(words)}</p>{_table(head, rows)}"


def _read_bench(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({str(error)[:80]}); measure anew") from None
    return data if isinstance(data, dict) else {}
