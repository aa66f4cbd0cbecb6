"""Schedules side by side: budgets and what they read over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from common.report import plots
from common.report.plots import COLORS, MUTED, color_of, short
from common.schedule.schedule import DENSE, NUM_RESERVED, Schedule

_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)))
"""One style for every round of the colours."""


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
