"""A comparison of two traces as one HTML page: verdict, who was compared, quantities, layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.crosscheck.compare import Comparison, meaning, shown
from common.crosscheck.deviations import FORWARD, Row
from common.crosscheck.trace_file import Trace
from common.records.run_dir import atomic_write_text
from common.report import html_page, plots
from common.report.html_page import text


def write(result: Comparison, a: Trace, b: Trace, out: Path) -> None:
    """Write the page; a reader never sees a half-written file."""
    title = f"{_who(a)} against {_who(b)}"
    parts = [
        f"<h1>{text(title)}</h1>",
        f'<p class="verdict">{text(result.verdict)}</p>',
        *(f"<p>{text(note)}</p>" for note in result.notes),
        "<h2>Quantities, in the order of computation</h2>",
        _rows(shown(result)),
        html_page.figures(list(_figures(result, a.meta["dtype"], b.meta["dtype"]))),
        "<h2>Noise floor</h2>",
        _floor(result),
        "<h2>What was compared</h2>",
        _about(a, b),
        f"<details><summary>Every parameter</summary>{_rows(_parameters(result))}</details>",
    ]
    atomic_write_text(out, html_page.page(title, parts))


def _who(trace: Trace) -> str:
    return f"{trace.meta['backend']} {trace.meta['dtype']} on {trace.meta['device']}"


def _rows(rows: list[Row]) -> str:
    words = {True: "same", False: "different", None: "-"}
    cells = []
    for row in rows:
        limit = "-" if row.limit is None else f"{row.limit.largest:.0e} / {row.limit.mean:.0e}"
        low = ' class="low"' if row.ok is False else ""
        cells.append([
            f"<td>{text(row.name)}</td>",
            f'<td class="number">{row.largest:.1e}</td><td class="number">{row.mean:.1e}</td>',
            f'<td class="number">{limit}</td><td{low}>{words[row.ok]}</td>',
            f'<td class="long">{text(row.where)}</td>',
            f'<td class="long">{text(meaning(row.name))}</td>',
        ])  # fmt: skip
    head = (
        "quantity",
        "largest",
        "mean",
        "tolerance (largest / mean)",
        "verdict",
        "where",
        "what it is",
    )
    return html_page.table(head, cells)


def _parameters(result: Comparison) -> list[Row]:
    return [row for row in result.rows if row.name.startswith(("grad", "step"))]


def _figures(result: Comparison, *dtypes: str) -> Iterator[tuple[str | None, str]]:
    """Largest deviation of the activations by layer, on a logarithmic axis, and the tolerance."""
    names = [f"forward/{kind}" for kind in FORWARD[:-1]]
    rows = [row for row in result.rows if row.name in names and len(row.by_layer)]
    if not rows:
        return
    labels = [row.name.split("/")[1] for row in rows]
    with plots.Canvas("Deviation by layer", labels=labels) as figure:
        ends = []
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            y = np.log10(np.maximum(row.by_layer, 1e-9))
            figure.axes.plot(range(len(y)), y, color=plots.color_of(i), marker="o", markersize=3)
            ends.append((y[-1], label, plots.color_of(i)))
        tolerance = rows[0].limit
        assert tolerance is not None, "rows by layer have a limit"
        limit = np.log10(tolerance.largest)
        figure.axes.axhline(limit, color=plots.INK, linewidth=1.2, linestyle=(0, (4, 3)))
        plots.step_axis(figure.axes, np.arange(len(rows[0].by_layer)), "layer")
        figure.unit("log10 of the largest deviation, relative; dashed: tolerance")
        figure.end_labels(ends)
    yield figure.svg, f"Dense pass over the same tokens, {' against '.join(dtypes)}."


def _floor(result: Comparison) -> str:
    if not result.floor:
        return '<p class="muted">The lists of likeliest tokens are missing.</p>'
    rows = [
        [f"<td>{first} to {last}</td>", *(f'<td class="number">{x}</td>' for x in
          (f"{count:,}", f"{mean:.6f}", f"{p5:.6f}"))]
        for first, last, count, mean, p5 in result.floor
    ]  # fmt: skip
    words = "Acceptance rate of the two dense policies, from their 20 likeliest tokens: what a "
    words += (
        "mismatch statistic shows without any sparsity. An upper bound, near where they hold most."
    )
    return f"<p>{text(words)}</p>" + html_page.table(
        ("positions", "tokens", "mean", "5th percentile"), rows
    )


def _about(a: Trace, b: Trace) -> str:
    keys = ("backend", "device", "dtype", "attention", "versions")
    rows = [
        [
            f"<td>{key}</td>",
            *(f'<td class="long">{text(_plain(t.meta.get(key, "-")))}</td>' for t in (a, b)),
        ]
        for key in keys
    ]
    rows.append(["<td>file</td>", *(f'<td class="long">{text(t.path.name)}</td>' for t in (a, b))])
    return html_page.table(("", "first", "second"), rows)


def _plain(value) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )
