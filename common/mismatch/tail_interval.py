"""95 % interval of a lower percentile whose values come in few, unequal, dependent units.

A percentile's interval is that of a share, turned around (Woodruff, 1952): theta is too high for
p_q if certainly more than a share q of the values is under it. The share is taken on the logit
scale, since it is small and skewed, and its variance comes from leaving out one unit at a time:

    d_i  = logit(share without unit i) - their mean,       i = 1 ... m
    v_0  = 1 / (N p (1 - p))                               N independent values, p the share
    v    = max((m - 1) / m sum d_i^2, v_0)
    df   = max(2, 1 / (1 / (m - 1) + v - v_0))
    from logit(p) - t(m - 1) sqrt(v) to logit(p) + t(df) sqrt(v)

Where few units hold the tail, a sample that lacks them has too low a share and too low a v, and
shows none of the kurtosis that Satterthwaite's degrees of freedom would need; so df comes from v
itself. v is about s^2 / (m mean^2) of the counts under theta, and df is 2 / (its relative variance)
if these are of a gamma distribution: by the delta method 2 / (m - 1) + 2 s^2 / (m mean^2), of which
the part v_0 is known. A sample with too high a share has too high a v: t(m - 1) is enough there.

A bootstrap over 16 prompts x 4 rows covers 0.60 to 0.81 of 0.95 where samples of a prompt depend on
each other; this covers 0.94 to 0.95 for p5 from 8 prompts on, if up to half of the variance of the
tokens is common to a response and up to 0.9 of that to a prompt. Its limit is a tail that few
prompts hold: p1 of 8 prompts, in that last case, has 0.87 (a tenth of the prompts then hold 0.77 of
the low tokens), nearly all of the rest with too high a p1. No interval knows of units that the
sample lacks (tests/common/test_tail_interval.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from common.mismatch.tail_share import MIN_UNITS, student

Z = 1.96
"""Standard errors of a 95 % interval."""


def quantile_interval(units: Sequence[np.ndarray], q: float) -> tuple[float, float]:
    """95 % interval of the q-quantile of values in [0, 1]; units: the rising values of each.

    [0, 1] for fewer than three units. The ends are values that occurred, 0 or 1.
    """
    if len(units) < MIN_UNITS:
        return 0.0, 1.0
    size_G = np.asarray([len(unit) for unit in units], np.float64)
    values = np.unique(np.concatenate(units))

    def share(theta: float, side: Literal["left", "right"]) -> tuple[float, float]:
        return share_interval(
            size_G, np.asarray([u.searchsorted(theta, side) for u in units], np.float64)
        )

    # theta in [values[i], values[i + 1]) is too low if the share up to values[i] is surely under q.
    low = _first(len(values), lambda i: share(values[i], "right")[1] >= q)
    if share_interval(size_G, np.zeros(len(units)))[1] >= q:
        lowest = 0.0
    else:
        lowest = float(values[low]) if low < len(values) else 1.0
    # theta in (values[i - 1], values[i]] is too high if the share under values[i] is surely over q.
    high = _first(len(values), lambda i: share(values[i], "left")[0] > q)
    if high == len(values) and share_interval(size_G, size_G)[0] <= q:
        return lowest, 1.0
    return lowest, float(values[max(high, 1) - 1])


def share_interval(size_G: np.ndarray, under_G: np.ndarray) -> tuple[float, float]:
    """95 % interval of a share: under_G of the size_G values of each unit (three or more)."""
    size, under, m = size_G.sum(), under_G.sum(), len(size_G)
    share = (under + 0.5) / (size + 1)
    d = _logit(size - size_G, under - under_G)
    independent = float(1 / (size * share * (1 - share)))
    variance = max((m - 1) / m * float(((d - d.mean()) ** 2).sum()), independent)
    df = max(2.0, 1 / (1 / (m - 1) + variance - independent))
    middle, error = float(_logit(size, under)), math.sqrt(variance)
    return _share(middle - student(Z, m - 1) * error), _share(middle + student(Z, df) * error)


def _logit(size: np.ndarray, under: np.ndarray) -> np.ndarray:
    """log(under / (size - under)), half a value more on both sides: 0 of n is finite."""
    return np.log((under + 0.5) / (size - under + 0.5))


def _share(logit: float) -> float:
    """The logit undone."""
    return 1 / (1 + math.exp(min(-logit, 700.0)))


def _first(n: int, holds: Callable[[int], bool]) -> int:
    """Smallest i < n that holds, if all after it do too; n if none does."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
