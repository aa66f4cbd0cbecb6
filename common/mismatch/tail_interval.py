"""95 % interval of a lower percentile of values that come in few, unequal, dependent units.

The interval of a percentile is the inverted interval of a share (Woodruff, 1952): theta is too high
for p_q if certainly more than a share q of the values is below it. The share is small and skewed,
so it is taken on the logit scale; its variance comes from leaving out one unit at a time:

    d_i  = logit(share without unit i) - their mean,       i = 1 ... m
    v_0  = 1 / (N p (1 - p))                               N independent values, p the share
    v    = max((m - 1) / m sum d_i^2, v_0)
    df   = max(2, 1 / (1 / (m - 1) + v - v_0))
    from logit(p) - t(m - 1) sqrt(v) to logit(p) + t(df) sqrt(v)

Why df comes from v: where few units hold the tail, a sample that lacks them has too low a share and
too low a v, and it does not show the kurtosis that Satterthwaite's degrees of freedom would need.
v is about s^2 / (m mean^2) of the counts below theta. For counts of a gamma distribution, the delta
method gives it the relative variance 2 / (m - 1) + 2 s^2 / (m mean^2), of which the part v_0 is
known; df is 2 over this relative variance. A sample with too high a share has too high a v, so
t(m - 1) is enough on the lower side.

Measured coverage (tests/common/mismatch/test_tail_interval.py), where 0.95 is nominal: a bootstrap
over 16 prompts x 4 rows has 0.60 to 0.81 if the samples of a prompt depend on each other. This
interval has 0.94 to 0.95 for p5 from 8 prompts on, if up to half of the variance of the tokens is
common to a response and up to 0.9 of that half to a prompt. Its limit is a tail that few prompts
hold: in that last case p1 of 8 prompts has 0.87 (a tenth of the prompts then hold 0.77 of the low
tokens), and nearly all misses have too high a p1. No interval can know of units that the sample
lacks.
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
    """95 % interval of the q-quantile of values in [0, 1]; [0, 1] for fewer than three units.

    units: the values of each unit in rising order. The ends of the interval are values that occur
    in the units, or 0 or 1.
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
    """95 % interval of a share; under_G of the size_G values of each of three or more units."""
    size, under, m = size_G.sum(), under_G.sum(), len(size_G)
    share = (under + 0.5) / (size + 1)
    d = _logit(size - size_G, under - under_G)
    independent = float(1 / (size * share * (1 - share)))
    variance = max((m - 1) / m * float(((d - d.mean()) ** 2).sum()), independent)
    df = max(2.0, 1 / (1 / (m - 1) + variance - independent))
    middle, error = float(_logit(size, under)), math.sqrt(variance)
    return _share(middle - student(Z, m - 1) * error), _share(middle + student(Z, df) * error)


def _logit(size: np.ndarray, under: np.ndarray) -> np.ndarray:
    """log(under / (size - under)) with half a value added to both, so that 0 of n is finite."""
    return np.log((under + 0.5) / (size - under + 0.5))


def _share(logit: float) -> float:
    """The share with this logit."""
    return 1 / (1 + math.exp(min(-logit, 700.0)))


def _first(n: int, holds: Callable[[int], bool]) -> int:
    """Smallest i < n for which `holds` is true, by bisection; n if there is none.

    If `holds` is true for an i, it must be true for all larger ones.
    """
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
