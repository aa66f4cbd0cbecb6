"""Figures of runs, profiles and studies as SVG text, drawn with matplotlib (loaded on first use).

Every function returns one SVG, or None when there is nothing to draw. Colours are written as
`var(--ink, #24292f)`: inside report.html the page sets them for light and dark mode; `save` writes
a stand-alone file with the light ones. One user unit is one CSS pixel at full size, so text keeps
a readable size on a phone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.records.metrics import evaluations

WIDTH, HEIGHT = 340, 262
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8609a", "#b07d00", "#3a8fc4", "#7a6a53")
"""Okabe-Ito, light ones darkened for white paper; told apart by colour-blind people."""
INK, MUTED, GRID, PAPER = "#24292f", "#656d76", "#dfe3e8", "#fffffe"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card"} | {
    color: f"--c{i}" for i, color in enumerate(COLORS)
}
STAGES = ("rollout", "reward", "score", "mismatch", "pack", "update", "push", "checkpoint")
LARGEST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the figures need of one run.

    records: common.records.metrics.read_metrics. schedule: content of a schedule file, "dense", or
    None if unknown. tau: threshold of the run. page_size: tokens per page.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any] | str | None = None
    tau: float | None = None
    page_size: int = 16

    @property
    def is_dense(self) -> bool:
        """True for a run sampled with dense attention."""
        if isinstance(self.schedule, Mapping):
            return all(entry["k"] == "dense" for entry in self.schedule["bins"])
        return self.schedule == "dense"

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the records that have a finite value."""
        pairs = [(r["step"], r[key]) for r in self.records if is_number(r.get(key))]
        steps, values = np.array(pairs, float).reshape(-1, 2).T
        return steps, values

    def settled(self, key: str) -> np.ndarray:
        """Values without the first record (compilation), if there are more than two."""
        values = self.series(key)[1]
        return values[1:] if len(values) > 2 else values


def is_number(value: Any) -> bool:
    """True for an int or float that a figure can show, not for bool, None, NaN or 1e300."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and -LARGEST < value < LARGEST


def save(svg: str, path: Path | str) -> None:
    """Write a stand-alone SVG file: light colours, white paper, no CSS variables."""
    plain = re.sub(r"var\(--[a-z0-9]+, (#[0-9a-f]{6})\)", r"\1", svg)
    plain = plain.replace("<svg ", '<svg style="background: #ffffff" ', 1)
    Path(path).write_text(plain, encoding="utf-8")


def _style() -> dict[str, Any]:
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "sparrow",
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.labelsize": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
    }


class Canvas:
    """A figure of fixed size in user units; `with Canvas(title) as f: f.axes ...; f.svg`."""

    def __init__(
        self,
        title: str,
        *,
        labels: Sequence[str] = (),
        size: tuple[float, float] = (WIDTH, HEIGHT),
        rows: Sequence[float] = (1,),
        margins: tuple[float, float, float] = (46, 44, 50),
    ) -> None:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self._title, self.svg = title, ""
        self._context = matplotlib.rc_context(_style())
        self._context.__enter__()
        self._figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72)
        FigureCanvasSVG(self._figure)
        left, bottom, top = margins
        right = 12 + 6.4 * max((len(label) for label in labels), default=0)
        grid = self._figure.subplots(len(rows), 1, squeeze=False, height_ratios=list(rows))
        self._figure.subplots_adjust(
            left=left / size[0],
            right=1 - right / size[0],
            bottom=bottom / size[1],
            top=1 - top / size[1],
            hspace=0.45,
        )
        self._figure.text(8 / size[0], 1 - 18 / size[1], title, size=12.5, weight="bold")
        self.all_axes = list(grid[:, 0])
        self.axes = self.all_axes[0]

    def __enter__(self) -> Canvas:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self._make_room_for_labels()
            buffer = io.StringIO()
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            self.svg = _inline(buffer.getvalue(), self._title)
        self._context.__exit__(None, None, None)

    def _make_room_for_labels(self) -> None:
        """Move the left edge of the axes so far that the numbers beside them fit."""
        self._figure.draw_without_rendering()
        labels = [label for axes in self.all_axes for label in axes.get_yticklabels()]
        left = min((label.get_window_extent().x0 for label in labels), default=4)
        if left < 4:
            width = self._figure.get_figwidth() * self._figure.dpi
            self._figure.subplots_adjust(left=self._figure.subplotpars.left + (4 - left) / width)

    def unit(self, text: str, axes: Any = None) -> None:
        """Writes what the vertical axis shows above it, horizontally."""
        (axes or self.axes).set_title(text, loc="left", size=10, color=MUTED, pad=6)

    def end_labels(self, labels: Sequence[tuple[float, str, str]], axes: Any = None) -> None:
        """Names at the right ends of lines: (y, text, colour), pushed apart where they touch."""
        axes = axes or self.axes
        low, high = axes.get_ylim()
        gap = (high - low) * 13 / (axes.get_position().height * self._figure.get_figheight() * 72)
        order = sorted(labels, key=lambda label: label[0])
        heights = [min(max(y, low), high) for y, _, _ in order]
        for i in range(1, len(heights)):
            heights[i] = max(heights[i], heights[i - 1] + gap)
        if heights and heights[-1] > high:  # push back down from the top
            heights[-1] = high
            for i in range(len(heights) - 2, -1, -1):
                heights[i] = min(heights[i], heights[i + 1] - gap)
        for height, (_, text, color) in zip(heights, order, strict=True):
            axes.annotate(
                text,
                (1, height),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=color,
                annotation_clip=False,
            )


def _inline(svg: str, title: str) -> str:
    """The <svg> element alone: CSS variables for colours, unique ids, scalable, with a name."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    prefix = "f" + hashlib.sha1(svg.encode()).hexdigest()[:8] + "-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = svg.replace('href="#', f'href="#{prefix}').replace("url(#", f"url(#{prefix}")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, 'DejaVu Sans', sans-serif", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable}, {color})")
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1)
    name = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def short(name: str, limit: int = 13) -> str:
    """A run's name as drawn: cut in the middle, '$' and '_' harmless to matplotlib's math mode."""
    if len(name) > limit:
        name = name[: limit // 2] + ".." + name[-(limit - limit // 2 - 2) :]
    return name.replace("$", r"\$")


def color_of(index: int) -> str:
    """Colour of the index-th run, the same in all figures."""
    return COLORS[index % len(COLORS)]


def step_axis(axes: Any, steps: np.ndarray, label: str = "training step") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(steps):
        pad = max((steps.max() - steps.min()) * 0.02, 0.5)
        axes.set_xlim(steps.min() - pad, steps.max() + pad)


def tau_line(axes: Any, tau: float | None) -> None:
    if tau is not None:
        axes.axhline(tau, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"tau {tau:g}",
            (0, tau),
            xycoords=("axes fraction", "data"),
            xytext=(3, -4),
            textcoords="offset points",
            va="top",
            color=INK,
        )


def lines(
    runs: Sequence[Run],
    key: str,
    *,
    title: str,
    ylabel: str = "",
    tau: float | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> str | None:
    """One metric over the steps, all runs on the same axes, names at the ends of the lines."""
    drawn = [(i, run, *run.series(key)) for i, run in enumerate(runs)]
    drawn = [entry for entry in drawn if len(entry[2])]
    if not drawn:
        return None
    labels = [short(run.name) for _, run, _, _ in drawn]
    with Canvas(title, labels=labels) as figure:
        for i, _, steps, values in drawn:
            marker = "o" if len(steps) == 1 else None
            figure.axes.plot(steps, values, color=color_of(i), marker=marker, markersize=4)
        tau_line(figure.axes, tau)
        step_axis(figure.axes, np.concatenate([steps for _, _, steps, _ in drawn]))
        figure.unit(ylabel)
        figure.axes.set_ylim(*limits)
        ends = [
            (values[-1], label, color_of(i))
            for (i, _, _, values), label in zip(drawn, labels, strict=True)
        ]
        figure.end_labels(ends)
    return figure.svg


def reward_curves(runs: Sequence[Run], title: str = "Reward") -> str | None:
    """Training reward thin, held-out reward (dense decoding) with markers and 95 % intervals."""
    drawn = []
    for i, run in enumerate(runs):
        held = np.array([point[:2] for point in evaluations(run.records)], float).reshape(-1, 2).T
        drawn.append((i, run, run.series("reward/mean"), held))
    drawn = [entry for entry in drawn if len(entry[2][0]) or len(entry[3][0])]
    if not drawn:
        return None
    labels = [short(run.name) for _, run, _, _ in drawn]
    with Canvas(title, labels=labels) as figure:
        ends, steps = [], []
        for (i, run, train, held), label in zip(drawn, labels, strict=True):
            color, shift = color_of(i), 0.12 * (i - (len(runs) - 1) / 2)
            figure.axes.plot(*train, color=color, linewidth=0.9, alpha=0.6)
            figure.axes.plot(held[0] + shift, held[1], color=color, marker="o", markersize=4.5)
            for updates, _, low, high in evaluations(run.records):
                if is_number(low) and is_number(high):
                    x = updates + shift
                    figure.axes.plot((x, x), (low, high), color=color, linewidth=1.2)
            ends.append(((held if len(held[1]) else train)[1][-1], label, color))
            steps += [train[0], held[0]]
        step_axis(figure.axes, np.concatenate(steps))
        figure.unit("thin: training, dots: held-out")
        figure.end_labels(ends)
    return figure.svg


def acceptance_map(run: Run, statistic: str, *, title: str, columns: int = 60) -> str | None:
    """p5 or p1 of alpha by step and length bin: blue meets tau, orange does not.

    More than `columns` measured steps are grouped, the lowest value of a group is shown. A dot
    marks bins with too few tokens to be judged.
    """
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    measured = [r for r in run.records if any(is_number(b.get(statistic)) for b in r["bins"])]
    if not measured:
        return None
    bins = {b["bin"]: b for r in measured for b in r["bins"]}
    groups = np.array_split(np.arange(len(measured)), min(len(measured), columns))
    values = np.full((max(bins) + 1, len(groups)), np.nan)
    judged = np.zeros(values.shape, bool)
    for column, group in enumerate(groups):
        for entry in (b for i in group for b in measured[i]["bins"]):
            if is_number(entry.get(statistic)):
                at = (entry["bin"], column)
                values[at] = np.fmin(values[at], entry[statistic])
                judged[at] |= bool(entry.get("enough", True))
    steps = np.array([measured[g[0]]["step"] for g in groups] + [measured[-1]["step"] + 1], float)
    width = next(b["end"] - b["start"] for b in bins.values())
    edges = np.arange(len(values) + 1) * width
    tau = 0.86 if run.tau is None else run.tau
    colors = LinearSegmentedColormap.from_list(
        "tau", ["#a63600", "#f28e2b", "#f7f3ea", "#74add1", "#08519c"]
    )
    norm = TwoSlopeNorm(vcenter=tau, vmin=min(0.0, tau - 1e-3), vmax=max(1.0, tau + 1e-3))
    with Canvas(title, labels=["0.000"]) as figure:
        figure.axes.grid(False)
        look = {"cmap": colors, "norm": norm, "edgecolors": "face", "linewidth": 0.5}
        mesh = figure.axes.pcolormesh(steps, edges, values, **look)
        rows, cells = np.nonzero(~judged & ~np.isnan(values))
        middle = (steps[cells] + steps[cells + 1]) / 2
        figure.axes.plot(middle, (rows + 0.5) * width, "o", color="#333333", markersize=2)
        figure.unit("position in sequence, tokens")
        figure.axes.set_yticks(edges[:: max(1, len(edges) // 7)])
        step_axis(figure.axes, steps)
        figure.axes.set_xlim(steps[0], steps[-1])
        bar = figure.axes.figure.colorbar(mesh, ax=figure.axes, pad=0.03, aspect=16)
        bar.outline.set_visible(False)
        bar.set_ticks([0, tau, 1], labels=["0", f"{tau:g}", "1"])
    return figure.svg
