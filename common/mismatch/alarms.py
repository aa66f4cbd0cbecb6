"""Alarms about the course of a run, from the records of the steps before.

Collapse, drift, and steps that change nothing.

They hold with or without the controller. (That p5 is under tau is one step's matter:
common/mismatch/rollout_stats.py.) A too sparse rollout shows itself by responses that shrink, and
by a sparse policy that moves away from the dense one (arXiv 2606.08446, section on the mismatch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LENGTH, K3, GRADIENT = "response/len_mean", "mismatch/k3", "grpo/grad_norm"
RECENT_STEPS = 40
"""Steps whose median length is what a response is measured against."""
EARLY_STEPS = 10
"""First steps of the run: their median k3 is the start; no alarm before them."""
K3_FACTOR, K3_STEPS = 3.0, 5
"""k3 above its start times the factor in so many steps in a row is an alarm."""
K3_FLOOR = 1e-4
"""Nats per token: below it, k3 is rounding, not drift."""
IDLE_STEPS = 5
"""So many steps in a row with a gradient of exactly 0, or without an update, are an alarm."""


class Watch:
    """The run so far. `records`: those before the next step (a resumed run reads its own)."""

    def __init__(self, records: Iterable[Mapping[str, Any]]):
        self._lengths: list[float] = []
        self._k3: list[float] = []
        self._idle = 0
        for record in records:
            self._add(record)

    def alarms(self, values: Mapping[str, Any]) -> list[str]:
        """Take in the next step; what is wrong with it, in words.

        Length collapse: mean length under half of the median of the RECENT_STEPS before.
        k3 rising: k3 over K3_FACTOR times the median of the run's first steps, K3_STEPS in a row.
        nothing learnt: gradient norm 0 (as in a step without an update), IDLE_STEPS in a row.
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
        """A value that a record lacks (not finite) counts as 0 in k3, and as the last length."""
        last = self._lengths[-1] if self._lengths else 0.0
        for series, name, instead in ((self._lengths, LENGTH, last), (self._k3, K3, 0.0)):
            value = values.get(name)
            good = value is not None and np.isfinite(value)
            series.append(float(value) if good else instead)
        self._idle = self._idle + 1 if values.get(GRADIENT) == 0 else 0

    def _steps_over(self, limit: float) -> int:
        """Length of the run of values over the limit that ends with the newest."""
        return sum(1 for _ in itertools.takewhile(lambda v: v > limit, reversed(self._k3)))
