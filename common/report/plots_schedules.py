"""Figures of schedules and profiles: budgets, pages read and the tail of alpha over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.report import plots
from common.report.plots import COLORS, MUTED, Run, color_of, short
from common.schedule.schedule import DENSE, NUM_RESERVED, Schedule

_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)))
"""One style for every round of the colours."""


def pages_read(schedule: Mapping[str, Any], longest: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(length in tokens, pages read) corners of a schedule: min(k + 3, all pages) per bin.

    Up to its last bin's end or, if that is further, to `longest`, as the last bin holds beyond it.
    """
    x, y = [], []
    *bins, last = schedule["bins"]
    for entry in (*bins, {**last, "end": max(last["end"], longest)}):
        lengths = np.linspace(entry["start"], entry["end"], 33)
        everything = lengths / schedule["page_size"]
        budget = np.inf if entry["k"] == "dense" else entry["k"] + NUM_RESERVED
        x.append(lengths)
        y.append(np.minimum(everything, budget))
    return np.concatenate(x), np.concatenate(y)


def schedule_steps(runs: Sequence[Run], title: str = "Schedule: pages read") -> str | None:
    """Pages a query reads (budget and reserved ones) over the length; dashed: every page."""
    drawn = [
        (i, run.name, run.schedule)
        for i, run in enumerate(runs)
        if isinstance(run.schedule, Mapping)
    ]
    if not drawn:
        return None
    labels = [short(name) for _, name, _ in drawn]
    with plots.Canvas(title, labels=[*labels, "every page"]) as figure:
        ends = []
        longest = float(max(schedule["bins"][-1]["end"] for _, _, schedule in drawn))
        for (i, _, schedule), label in zip(drawn, labels, strict=True):
            x, y = pages_read(schedule, longest)
            figure.axes.plot(x, y, color=color_of(i))
            ends.append((float(y[-1]), label, color_of(i)))
        all_pages = longest / drawn[0][2]["page_size"]
        figure.axes.plot((0, longest), (0, all_pages), color=MUTED, linestyle="--", linewidth=1)
        ends.append((all_pages, "every page", MUTED))
        figure.axes.set(xlabel="length, tokens", xlim=(0, longest))
        figure.unit("pages")
        figure.axes.set_ylim(0, all_pages * 1.05)
        figure.end_labels(ends)
    return figure.svg


def reach(schedules: Sequence[Schedule]) -> int:
    """Tokens up to the end of the last bin of the schedule that goes furthest."""
    return max(len(schedule.budgets) * schedule.bin_tokens for schedule in schedules)


def comparison(schedules: Mapping[str, Schedule], title: str = "Schedules compared") -> str:
    """Tokens read (above; dashed: all) and the budget k (below) over the cached length.

        tokens(length) = min(length, (k + 3) C);   k is drawn up to all pages, length / C

    schedules: name -> Schedule, at least one; page sizes C may differ. Returns an SVG.
    """
    longest = reach(list(schedules.values()))
    names = {name: short(name, 22) for name in schedules}
    height = 90 + 2 * max(185.0, 18.0 * (len(schedules) + 1))
    labels = [*names.values(), "every token"]
    with plots.Canvas(title, labels=labels, size=(640, height), rows=(1, 1)) as figure:
        above, below = figure.all_axes
        tokens_ends = [(float(longest), "every token", MUTED)]
        k_ends = []
        for i, (name, schedule) in enumerate(schedules.items()):
            length, tokens, k = curves(schedule, longest)
            look = {"color": color_of(i), "linestyle": _STYLES[i // len(COLORS) % len(_STYLES)]}
            above.plot(length, tokens, **look)
            below.plot(length, k, **look)
            tokens_ends.append((float(tokens[-1]), names[name], color_of(i)))
            k_ends.append((float(k[-1]), names[name], color_of(i)))
        above.plot((0, longest), (0, longest), "--", color=MUTED, linewidth=1)
        above.set(xlim=(0, longest), ylim=(0, longest * 1.03))
        below.set(xlim=(0, longest), ylim=(0, None), xlabel="cached length, tokens")
        figure.unit("tokens that a query reads", above)
        figure.unit("k, pages chosen beside the 3 always read", below)
        figure.end_labels(tokens_ends, above)
        figure.end_labels(k_ends, below)
    return figure.svg


def curves(schedule: Schedule, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, tokens read, k) at up to 2,000 lengths and on both sides of every step of k."""
    steps = np.arange(schedule.bin_tokens, longest, schedule.bin_tokens)
    length = np.linspace(1, longest, 400).astype(np.int64)
    length = np.unique(np.concatenate([length, steps, steps + 1]))
    budget = schedule.budgets_at(length - 1).astype(np.int64)
    tokens = np.minimum(length, (budget + NUM_RESERVED) * schedule.page_size)
    k = np.minimum(budget, length / schedule.page_size)
    return length, tokens, np.where(budget == DENSE, length / schedule.page_size, k)


def budgets_by_step(run: Run, title: str = "Budget by step") -> str | None:
    """k of every length bin over the steps, bins with one history as one line; None if none moved.

    Only bins that changed are shown; dense is placed above the largest k.
    """
    tracks: dict[tuple[int, int], dict[int, Any]] = {}
    for record in run.records:
        for entry in record["bins"]:
            if "k" in entry:
                track = tracks.setdefault((entry["start"], entry["end"]), {})
                track[record["step"]] = entry["k"]
    histories: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for span, track in sorted(tracks.items()):
        if len(set(track.values())) > 1:
            histories.setdefault(tuple(track.items()), []).append(span)
    if not histories:
        return None
    numbers = [k for history in histories for _, k in history if k != "dense"]
    top = 1.15 * max(numbers, default=1) + 1
    labels = [f"{spans[0][0]}-{spans[-1][1]}" for spans in histories.values()]
    with plots.Canvas(title, labels=labels) as figure:
        ends, steps = [], []
        for i, (history, label) in enumerate(zip(histories, labels, strict=True)):
            x = np.array([step for step, _ in history], float)
            y = [top if k == "dense" else k for _, k in history]
            marks = {"marker": "o", "markersize": 3} if len(history) < 3 else {}
            figure.axes.step(x, y, where="post", color=color_of(i), **marks)
            ends.append((float(y[-1]), label, color_of(i)))
            steps.append(x)
        plots.step_axis(figure.axes, np.concatenate(steps))
        figure.axes.set_ylim(0, 1.06 * top)
        if any(k == "dense" for history in histories for _, k in history):
            ticks = [t for t in figure.axes.get_yticks() if 0 <= t < 0.95 * top]
            figure.axes.set_yticks([*ticks, top], [*(f"{t:g}" for t in ticks), "dense"])
        figure.unit("k; labels: positions, tokens")
        figure.end_labels(ends)
    return figure.svg


def profile_plot(
    profile: Mapping[str, Any],
    schedule: Mapping[str, Any] | None,
    *,
    statistic: str,
    tau: float,
    title: str | None = None,
) -> str | None:
    """Tail of alpha against length, one line per budget with its 95 % band, tau, and below it the
    schedule that was chosen.

    profile: content of a profile file (common.schedule.profile_file); schedule: content of a
    schedule file. statistic: 'p5' or 'p1'. Bins with too few tokens are drawn hollow.
    """
    rows = [row for row in profile["rows"] if plots.is_number(row.get(statistic))]
    if not rows:
        return None
    budgets = sorted({row["k"] for row in rows if row["k"] != "dense"})
    colors = budget_colors(budgets) | {"dense": MUTED}
    title = title or f"{statistic} of the acceptance rate by length and budget"
    share = (2.6, 1) if schedule else (1,)
    with plots.Canvas(title, labels=["every page"], size=(640, 470), rows=share) as figure:
        ends = []
        for k in [*budgets, *(["dense"] if any(r["k"] == "dense" for r in rows) else [])]:
            mine = sorted((r for r in rows if r["k"] == k), key=lambda row: row["bin"])
            _budget_line(figure.axes, mine, statistic, colors[k])
            text = "dense" if k == "dense" else f"k = {k}"
            ends.append((mine[-1][statistic], text, colors[k]))
        plots.tau_line(figure.axes, tau)
        longest = max(row["end"] for row in rows)
        figure.axes.set(xlim=(0, longest), ylim=(-0.02, 1.02))
        figure.unit(f"{statistic} of alpha, 95 % bands")
        figure.end_labels(ends)
        if schedule:
            _schedule_below(figure.all_axes[1], schedule, longest)
            figure.unit("pages read under the schedule", figure.all_axes[1])
        figure.all_axes[-1].set_xlabel("position in sequence, tokens")
    return figure.svg


def budget_colors(budgets: Sequence[int]) -> dict[int, Any]:
    """A colour for each budget, along a ramp from the smallest to the largest."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("budget", ["#e69f00", "#d55e00", "#b8609a", "#0072b2"])
    return {k: ramp(i / max(len(budgets) - 1, 1)) for i, k in enumerate(budgets)}


def _budget_line(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, color: Any) -> None:
    x = [(row["start"] + row["end"]) / 2 for row in rows]
    y = [row[name] for row in rows]
    axes.plot(x, y, color=color)
    for at, value, row in zip(x, y, rows, strict=True):
        face = color if row.get("enough", True) else "none"
        axes.plot(at, value, "o", color=color, markerfacecolor=face, markersize=4.5)
    low, high = ([row.get(f"{name}{end}") for row in rows] for end in ("_low", "_high"))
    if all(plots.is_number(v) for v in [*low, *high]):
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _schedule_below(axes: Any, schedule: Mapping[str, Any], longest: float) -> None:
    x, y = pages_read(schedule, longest)
    axes.plot(x, y, color=COLORS[0])
    axes.plot((0, longest), (0, longest / schedule["page_size"]), "--", color=MUTED, linewidth=1)
    axes.annotate(
        "every page",
        (1, longest / schedule["page_size"]),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=MUTED,
        annotation_clip=False,
    )
    axes.set(xlim=(0, longest), ylim=(0, None))
