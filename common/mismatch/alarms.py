"""Alarms about the course of a run: collapsing lengths, drifting KL, steps that learn nothing.

They are the same with and without the controller, and compare a step with the steps before it.
Alarms about a single step, such as p5 below tau, are in common/mismatch/measure.py. A rollout that
is too sparse shows in responses that shrink and in a sparse policy that moves away from the dense
one (arXiv 2606.08446, section on the mismatch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LENGTH, K3, GRADIENT = "response/len_mean", "mismatch/k3", "grpo/grad_norm"
RECENT_STEPS = 40
"""The mean length of a step is compared with its median over this number of steps before."""
EARLY_STEPS = 10
"""Number of first steps: the median of their k3 is the start value, and none of them alarms."""
K3_FACTOR, K3_STEPS = 3.0, 5
"""k3 above K3_FACTOR times its start value, in K3_STEPS steps in a row, is an alarm."""
K3_FLOOR = 1e-4
"""Smallest start value of k3 in nats per token; below it, k3 is rounding error, not drift."""
IDLE_STEPS = 5
"""This number of steps in a row with a gradient of exactly 0, or without an update, is an alarm."""


class Watch:
    """Keeps the values of the run so far that the alarms compare."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        """records: those of the steps so far; a resumed run passes what it has on disk."""
        self._lengths: list[float] = []
        self._k3: list[float] = []
        self._idle = 0
        for record in records:
            self._add(record)

    def alarms(self, values: Mapping[str, Any]) -> list[str]:
        """Add the next step and return its alarms, one line each.

        Length collapse: mean length below half of the median of the RECENT_STEPS steps before.
        k3 rising: k3 above K3_FACTOR times its start value, in K3_STEPS steps in a row.
        nothing learnt: gradient norm 0 (as in a step without an update), in IDLE_STEPS in a row.
        """
        recent = self._lengths[-RECENT_STEPS:]
        self._add(values)
        found = []
        if len(recent) >= EARLY_STEPS and self._lengths[-1] < np.median(recent) / 2:
            found.append(
                f"length collapse: {self._lengths[-1]:.0f} tokens on average, "
                f"{np.median(recent):.0f} is the median of the last {len(recent)} steps"
            )
        start = max(float(np.median(self._k3[:EARLY_STEPS])), K3_FLOOR)
        last = self._k3[EARLY_STEPS:][-K3_STEPS:]
        if len(last) == K3_STEPS and min(last) > K3_FACTOR * start:
            found.append(
                f"k3-KL rising: {last[-1]:.2g} nats per token, {start:.2g} at the start, over "
                f"{K3_FACTOR:g} times that for {self._steps_over(K3_FACTOR * start)} steps"
            )
        if self._idle >= IDLE_STEPS:
            found.append(
                f"nothing learnt for {self._idle} steps: the gradient was exactly 0; see "
                "reward/groups_with_signal (all samples of a group alike), response/finished (cut "
                "before an answer) and grpo/masked_fraction (dropped by the correction)"
            )
        return found

    def _add(self, values: Mapping[str, Any]) -> None:
        """Append a step; a missing or not finite k3 counts as 0, a length as the one before."""
        last = self._lengths[-1] if self._lengths else 0.0
        for series, name, instead in ((self._lengths, LENGTH, last), (self._k3, K3, 0.0)):
            value = values.get(name)
            good = value is not None and np.isfinite(value)
            series.append(float(value) if good else instead)
        self._idle = self._idle + 1 if values.get(GRADIENT) == 0 else 0

    def _steps_over(self, limit: float) -> int:
        """Number of newest k3 values in a row above `limit`."""
        return sum(1 for _ in itertools.takewhile(lambda v: v > limit, reversed(self._k3)))
