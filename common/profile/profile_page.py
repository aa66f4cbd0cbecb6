"""A profile as one HTML page: tail by length and budget, how alpha is distributed, the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import MismatchConfig
from common.records.run_dir import atomic_write_text
from common.report import html_page, plots, plots_schedules
from common.report.html_page import text

TAU = MismatchConfig().tau
"""Threshold of the paper, which the figures show as a line."""
Figures = Iterator[tuple[str | None, str]]
"""Pairs of an SVG and its caption."""
TICKS = ("0", "0.25", "0.5", "0.75", "0.95", "0.999")


def write(profile: Mapping[str, Any], out: Path, summary: Sequence[str] = ()) -> None:
    """Writes the page of a profile; a reader never sees a half-written file."""
    title = f"Profile: {Path(profile['model']).name or profile['model']}"
    about = f"{profile['source']}. Pages of {profile['page_size']} tokens, policy "
    about += f"{profile['policy']}. Intervals: {profile['interval']}."
    parts = [
        f"<h1>{text(title)}</h1>",
        f'<p class="muted">{text(about)}</p>',
        *(f"<p>{text(line)}</p>" for line in summary),
        html_page.figures([*_tails(profile)]),
        "<h2>How alpha is distributed</h2>",
        html_page.figures([*_mean_and_tail(profile), *_histograms(profile)]),
        _shapes(profile),
        "<h2>By budget and length</h2>",
        _rows(profile),
        _estimates(profile),
    ]
    atomic_write_text(out, html_page.page(f"Sparrow {title.lower()}", parts))


def _tails(profile: Mapping[str, Any]) -> Figures:
    for name, words in (("p5", "5th"), ("p1", "1st")):
        svg = plots_schedules.profile_plot(profile, None, statistic=name, tau=TAU)
        yield svg, f"{words} percentile of the acceptance rate; hollow: too few tokens to judge."


def _budgets(profile) -> list[Any]:
    """Returns the sparse budgets of a profile in rising order."""
    return sorted({row["k"] for row in profile["rows"] if row["k"] != "dense"})


def _mean_and_tail(profile: Mapping[str, Any]) -> Figures:
    """A figure of p5 against the mean of each bin, since bins of one mean differ in their tail."""
    budgets = _budgets(profile)
    labels = [f"k = {k}" for k in budgets]
    with plots.Canvas("Mean against p5", labels=labels) as figure:
        ends = []
        for k, color in plots_schedules.budget_colors(budgets).items():
            rows = [r for r in profile["rows"] if r["k"] == k and r["enough"]]
            if not rows:
                continue
            x, y = [r["mean"] for r in rows], [r["p5"] for r in rows]
            figure.axes.plot(x, y, "o", color=color, markersize=4.5)
            ends.append((sum(y) / len(y), f"k = {k}", color))
        if not ends:
            return
        figure.axes.set_xlabel("mean of alpha")
        figure.unit("p5 of alpha, a dot per length bin")
        figure.end_labels(ends)
    yield (
        figure.svg,
        "The statistic is the tail: two bins with equal means may differ in their tails.",
    )


def _histograms(profile: Mapping[str, Any]) -> Figures:
    """A histogram for each budget, with bars of one width.

    To scale the bar above 0.999, which holds most tokens, would be too narrow to see.
    """
    for shape in profile["shape"]:
        if shape["k"] == "dense" or not shape["count"]:
            continue
        edges, shares = shape["edges"], [c / shape["count"] for c in shape["counts"]]
        ticks = {i: f"{e:g}" for i, e in enumerate(edges) if f"{e:g}" in TICKS}
        with plots.Canvas(f"alpha at k = {shape['k']}") as figure:
            look = {"color": plots.COLORS[0], "edgecolor": plots.PAPER, "linewidth": 1}
            figure.axes.bar(range(len(shares)), shares, 1, align="edge", **look)
            figure.axes.set_xticks(list(ticks), list(ticks.values()))
            figure.axes.grid(False, axis="x")
            figure.axes.set_yscale("log")
            figure.axes.set_xlabel("acceptance rate alpha")
            figure.unit("share of tokens, logarithmic")
        below = f"{shape['share_below']:.1%} of {shape['count']:,} tokens are below 0.999; the "
        below += "last two bars stand for 0.99 to 0.999 and for what is above."
        yield figure.svg, below


def _shapes(profile) -> str:
    """Pearson's r and the Beta fit of each budget."""
    names = {
        "share_below": "share under 0.999",
        "pearson_alpha": "r, alpha and position",
        "pearson_p5": "r, p5 and position",
        "beta_a": "Beta a",
        "beta_b": "Beta b",
        "ks": "KS",
        "variance": "variance of the tail",
    }
    rows = [
        [f"<td>{text(shape['k'])}</td>", *(_number(shape[name]) for name in names)]
        for shape in profile["shape"]
    ]
    return html_page.table(["k", *names.values()], rows)


def _rows(profile) -> str:
    columns = ("p1", "p5", "p5_low", "p5_high", "p50", "mean", "share_above_0_999")
    rows = []
    for row in profile["rows"]:
        few = "" if row["enough"] else " (too few)"
        cells = [f"<td>{text(row['k'])}</td>", f"<td>{row['start']} to {row['end']}{few}</td>"]
        rows.append([*cells, *(_number(row[c]) for c in columns), _number(row["count"])])
    return html_page.table(["k", "positions", *columns, "tokens"], rows)


def _estimates(profile) -> str:
    """The paper's estimate from top log-probs beside the exact value."""
    if not profile.get("topk"):
        return ""
    names = ("p5", "p5_topk", "mean_bias")
    rows = [
        [f"<td>{text(r['k'])}</td>", f"<td>{r['bin']}</td>", *(_number(r[n]) for n in names)]
        for r in profile["topk"]
    ]
    head = "<h2>Estimated from the top log-probs of both sides</h2>"
    return head + html_page.table(["k", "bin", "p5, exact", "p5, estimated", "mean bias"], rows)


def _number(value: Any) -> str:
    shown = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    return f'<td class="number">{shown}</td>'
