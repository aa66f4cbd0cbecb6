"""Figures that sum up: stage times, throughput, a profile with its schedule, a study over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.report import plots
from common.report.plots import COLORS, INK, MUTED, PAPER, Run, color_of, short

STAGE_COLORS = dict(
    zip((*plots.STAGES, "other"), (*COLORS[:6], "#8c6bb1", COLORS[6], MUTED), strict=True)
)


def stage_means(run: Run) -> dict[str, float]:
    """Mean seconds per step of each stage, `other` = the rest of time/step.

    time/step does not contain push and checkpoint, which follow it.
    The first record is left out when there are more than two: it contains compilation.
    """
    means = {}
    for stage in plots.STAGES:
        values = run.settled(f"time/{stage}")
        if len(values):
            means[stage] = float(values.mean())
    step = run.settled("time/step")
    if len(step):
        inside = sum(t for stage, t in means.items() if stage not in ("push", "checkpoint"))
        means["other"] = max(float(step.mean()) - inside, 0.0)
    return means


def stage_times(runs: Sequence[Run], title: str = "Seconds per step") -> str | None:
    """One stacked bar per run; the legend below names the stages that take time."""
    from matplotlib.patches import Patch

    drawn = [(run, stage_means(run)) for run in runs]
    drawn = [(run, means) for run, means in drawn if sum(means.values()) > 0]
    if not drawn:
        return None
    longest = max(sum(means.values()) for _, means in drawn)
    used = [s for s in STAGE_COLORS if any(m.get(s, 0) > 0.005 * longest for _, m in drawn)]
    rows = -(-len(used) // 4)
    size = (plots.WIDTH, 70 + 44 * len(drawn) + 19 * rows + 24)
    bottom = 34 + 19 * rows
    with plots.Canvas(title, size=size, margins=(92, bottom, 34)) as figure:
        axes = figure.axes
        for row, (_, means) in enumerate(drawn):
            left = 0.0
            for stage, color in STAGE_COLORS.items():
                seconds = means.get(stage, 0.0)
                edge = {"edgecolor": PAPER, "linewidth": 1}
                axes.barh(row, seconds, left=left, height=0.62, color=color, **edge)
                left += seconds
            _beside(axes, f"{left:.3g} s", left, row)
        axes.set_yticks(range(len(drawn)), [short(run.name) for run, _ in drawn])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(False, axis="y")
        axes.set_xlim(0, longest * 1.2)
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.figure.legend(
            handles=[Patch(color=STAGE_COLORS[s], label=s) for s in used],
            loc="lower left",
            ncols=4,
            frameon=False,
            fontsize=10,
            handlelength=0.9,
            handletextpad=0.4,
            columnspacing=1.1,
            borderaxespad=0.2,
        )
    return figure.svg


def throughput(runs: Sequence[Run], title: str = "Tokens per second") -> str | None:
    """Median and quartiles of rollout and whole-step throughput; ratios to the dense run."""
    keys = {
        "rollout": "throughput/rollout_tokens_per_second",
        "whole step": "throughput/step_tokens_per_second",
    }
    drawn = [(i, r) for i, r in enumerate(runs) if any(len(r.settled(k)) for k in keys.values())]
    if not drawn:
        return None
    dense = next((run for _, run in drawn if run.is_dense), None)
    size = (plots.WIDTH, 74 + 2 * (26 + 34 * len(drawn)))
    with plots.Canvas(title, size=size, rows=(1, 1), margins=(92, 16, 52)) as figure:
        for axes, (label, key) in zip(figure.all_axes, keys.items(), strict=True):
            base = None if dense is None else _median(dense, key)
            _bars(axes, drawn, key, base)
            figure.unit(label, axes)
    return figure.svg


def _beside(axes: Any, text: str, x: float, y: float) -> None:
    offset = {"xytext": (5, 0), "textcoords": "offset points"}
    axes.annotate(text, (x, y), va="center", color=INK, **offset)


def _median(run: Run, key: str) -> float | None:
    values = run.settled(key)
    return float(np.median(values)) if len(values) else None


def _bars(axes: Any, drawn: Sequence[tuple[int, Run]], key: str, base: float | None) -> None:
    highest = 0.0
    for row, (i, run) in enumerate(drawn):
        values = run.settled(key)
        if not len(values):
            continue
        low, middle, high = np.percentile(values, (25, 50, 75))
        axes.barh(row, middle, height=0.6, color=color_of(i))
        axes.plot((low, high), (row, row), color=INK, linewidth=1.4)
        ratio = f" ({middle / base:.2f}x)" if base and not run.is_dense else ""
        _beside(axes, f"{middle:,.0f}{ratio}", high, row)
        highest = max(highest, high)
    axes.set_yticks(range(len(drawn)), [short(run.name) for _, run in drawn])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.grid(False)
    axes.set_xlim(0, highest * 1.55 or 1)
    axes.set_ylim(len(drawn) - 0.4, -0.6)


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t (two-sided 95 % interval), df >= 1 degrees of freedom."""
    if df < 1:
        raise ValueError(f"{df=}: expected at least 1, that is two seeds")
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    if df <= len(table):
        return table[df - 1]
    z = 1.959964  # Cornish-Fisher series in 1/df, off by less than 2e-4 for df > 10
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / df + second / df**2 + third / df**3


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): mean -+ t * s / sqrt(n); one value has no interval: (v, nan, nan)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, np.nan, np.nan
    half = t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return mean, mean - half, mean + half


Seeds = Sequence[Sequence[tuple[int, float]]]
"""One list of (step, value) per seed."""


def study_figure(
    rewards: Mapping[str, Seeds],
    tails: Mapping[str, Seeds],
    *,
    title: str = "Held-out reward",
) -> str | None:
    """Arms of a study: reward, and below it the tail of alpha, each mean over seeds and seeds thin.

    rewards, tails: arm -> its seeds. An arm without alpha (dense) has no tail. Bands are 95 %
    intervals over seeds (Student's t). Steps that only some seeds have reached are drawn thin but
    do not enter the mean. None if there is no reward.
    """
    rewards = {name: [s for s in seeds if s] for name, seeds in rewards.items()}
    rewards = {name: seeds for name, seeds in rewards.items() if seeds}
    if not rewards:
        return None
    colors = {name: color_of(i) for i, name in enumerate(rewards)}
    labels = {name: f"{short(name, 20)} (n={len(seeds)})" for name, seeds in rewards.items()}
    below = {name: [s for s in tails.get(name, ()) if s] for name in rewards}
    below = {name: seeds for name, seeds in below.items() if seeds}
    rows = (1.0, 0.7) if below else (1.0,)
    size = (640, 560 if below else 380)
    with plots.Canvas(title, labels=list(labels.values()), size=size, rows=rows) as figure:
        figure.unit("mean over seeds with 95 % interval; thin: single seeds")
        figure.end_labels(_arms(figure.axes, rewards, labels, colors))
        if below:
            axes = figure.all_axes[1]
            figure.unit("5th percentile of alpha, worst length bin of a step", axes)
            ends = _arms(axes, below, labels, colors, marker=None)
            axes.set_ylim(0, 1.03)  # an interval over seeds does not know that alpha is at most 1
            figure.end_labels(ends, axes)
    return figure.svg


def _arms(
    axes: Any,
    arms: Mapping[str, Seeds],
    labels: Mapping[str, str],
    colors: Mapping[str, str],
    marker: str | None = "o",
) -> list[tuple[float, str, str]]:
    """Draw every arm; returns (last value, label, colour) of each."""
    ends, all_steps = [], []
    for name, seeds in arms.items():
        for seed in seeds:
            axes.plot(*zip(*seed, strict=True), color=colors[name], linewidth=0.7, alpha=0.45)
            all_steps += [step for step, _ in seed]
        steps = sorted(set.intersection(*({step for step, _ in seed} for seed in seeds)))
        end = seeds[0][-1][1]
        if steps:
            table = [[dict(seed)[step] for seed in seeds] for step in steps]
            mean, low, high = zip(*(mean_interval(row) for row in table), strict=True)
            axes.plot(steps, mean, color=colors[name], marker=marker, markersize=4.5)
            if len(seeds) > 1:
                axes.fill_between(steps, low, high, color=colors[name], alpha=0.16, lw=0)
            end = mean[-1]
        ends.append((end, labels[name], colors[name]))
    plots.step_axis(axes, np.array(all_steps, float))
    return ends
