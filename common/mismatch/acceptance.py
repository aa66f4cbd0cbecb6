"""Mismatch between the sparse actor and the dense policy, per length bin.

alpha_t = sum_v min(p_dense(v), p_sparse(v)), the acceptance rate of speculative decoding, is exact
here (from a replay). The statistic of a bin is a lower percentile of its tokens: most tokens have
alpha > 0.999 whatever the budget, so the mean hides the tail (arXiv 2606.08446, sections on the
mismatch statistic and on the schedule). Tokens of one sequence depend on each other, and so do the
samples of one prompt: prompts are the units of the intervals (common/mismatch/tail_interval.py).

Length bin of token t: the bin of the query that produced it, (t - 1) // bin_tokens
(token_bins of common/schedule/schedule.py). Quantile q of n values: sorted[ceil(q n) - 1], the
smallest value that at least a share q of the values does not exceed; it is always one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from common.mismatch.tail_interval import quantile_interval
from common.schedule.schedule import token_bins

CLIP_TOLERANCE = 1e-6
_QUANTILES = {0.01: "p1", 0.05: "p5", 0.5: "p50"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinStats:
    """alpha of the tokens produced by the queries at start <= t < end.

    *_low, *_high: ends of 95 % intervals. num_units: independent units among the tokens, i.e.
    prompts (or blocks of a text). With fewer than three units nothing is known about the spread
    between them, and the interval is [0, 1]. enough: False if the bin has fewer than min_tokens
    tokens; it is then reported but not judged.
    """

    bin: int
    start: int
    end: int
    count: int
    num_units: int
    mean: float
    p1: float
    p5: float
    p50: float
    share_above_0_999: float
    p5_low: float
    p5_high: float
    p1_low: float
    p1_high: float
    enough: bool


def statistics(
    alpha_BT: np.ndarray,
    mask_BT: np.ndarray,
    group_B: np.ndarray,
    *,
    bin_tokens: int,
    min_tokens: int,
    block_tokens: int | None = None,
) -> list[BinStats]:
    """One BinStats per length bin that has tokens, in rising order.

    group_B: the prompt of each row; rows of one prompt are one unit. block_tokens: if given, the
    units are blocks of this number of consecutive positions of a row instead; for few, long texts,
    in which distant parts are nearly independent.

    The result does not depend on the order of rows. Raises ValueError for alpha outside [0, 1] by
    more than 1e-6 (or NaN) in the mask.
    """
    mask, group_B = np.asarray(mask_BT, bool), np.asarray(group_B)
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"{block_tokens=}: expected at least 1")
    if group_B.shape != mask.shape[:1]:
        raise ValueError(f"{group_B.shape=}: expected the prompt of each of {len(mask)} rows")
    alpha = _checked_alpha(alpha_BT, mask)
    bin_T = token_bins(np.arange(mask.shape[1]), bin_tokens)
    result = []
    for b in np.unique(bin_T[mask.any(axis=0)]):
        in_bin = mask & (bin_T == b)
        if block_tokens is None:
            units = _by_group(alpha, in_bin, group_B)
        else:
            units = _by_block(alpha, in_bin, block_tokens)
        units = [np.sort(values) for values in units]
        units.sort(key=lambda values: values.tobytes())  # sums must not depend on the row order
        result.append(_bin_stats(int(b), bin_tokens, units, min_tokens))
    return result


def _by_group(alpha: np.ndarray, in_bin: np.ndarray, group_B: np.ndarray) -> list[np.ndarray]:
    """Values of a bin, one array per prompt."""
    parts = [(group_B == g)[:, None] & in_bin for g in np.unique(group_B)]
    return [alpha[part] for part in parts if part.any()]


def _by_block(alpha: np.ndarray, in_bin: np.ndarray, block: int) -> list[np.ndarray]:
    """Values of a bin, one array per row and block; blocks, like bins, are those of the queries."""
    parts: list[np.ndarray] = []
    for i in np.flatnonzero(in_bin.any(axis=1)):
        at = np.flatnonzero(in_bin[i])
        parts += np.split(alpha[i, at], np.flatnonzero(np.diff(token_bins(at, block))) + 1)
    return parts


def _checked_alpha(alpha_BT: np.ndarray, mask: np.ndarray) -> np.ndarray:
    alpha = np.where(mask, np.float64(alpha_BT), 1.0)
    good = (alpha >= -CLIP_TOLERANCE) & (alpha <= 1 + CLIP_TOLERANCE)
    if not good.all():
        row, t = np.argwhere(~good)[0]
        raise ValueError(
            f"alpha_BT[{row}, {t}]={alpha[row, t]}: expected [0, 1] within {CLIP_TOLERANCE}; "
            "check that both distributions are normalised"
        )
    return np.clip(alpha, 0.0, 1.0)


def _bin_stats(b: int, width: int, units: list[np.ndarray], min_tokens: int) -> BinStats:
    values = np.sort(np.concatenate(units))
    p1, p5, p50 = (quantile(values, np.arange(1, len(values) + 1), q) for q in (0.01, 0.05, 0.5))
    p1_low, p1_high = quantile_interval(units, 0.01)
    p5_low, p5_high = quantile_interval(units, 0.05)
    return BinStats(
        bin=b,
        start=b * width,
        end=(b + 1) * width,
        count=len(values),
        num_units=len(units),
        mean=float(values.mean()),
        p1=p1,
        p5=p5,
        p50=p50,
        share_above_0_999=float((values > 0.999).mean()),
        p5_low=p5_low,
        p5_high=p5_high,
        p1_low=p1_low,
        p1_high=p1_high,
        enough=len(values) >= min_tokens,
    )


def quantile(rising: np.ndarray, cumulative: np.ndarray, q: float) -> float:
    """rising[i] where the cumulative count first reaches q of the total."""
    return float(rising[np.searchsorted(cumulative, q * cumulative[-1])])


def tail(stats: Sequence[BinStats], quantile: float) -> dict[int, float]:
    """{bin: statistic} of the bins with enough tokens; quantile 0.01, 0.05 or 0.5."""
    if quantile not in _QUANTILES:
        raise ValueError(f"{quantile=}: expected one of {tuple(_QUANTILES)}")
    return {s.bin: getattr(s, _QUANTILES[quantile]) for s in stats if s.enough}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether every length bin has its statistic at or above tau.

    meets: the answer; None if no bin has enough tokens to be judged. worst_bin, worst: number and
    statistic of the lowest judged bin, None without one. failing: judged bins with a statistic
    below tau. certain: those of them with the whole 95 % interval below tau. unjudged: bins with
    too few tokens.
    """

    meets: bool | None
    worst_bin: int | None
    worst: float | None
    failing: tuple[int, ...]
    certain: tuple[int, ...]
    unjudged: tuple[int, ...]


def verdict(stats: Sequence[BinStats], tau: float, quantile: float) -> Verdict:
    """The paper's criterion: the lower percentile stays at or above tau in *every* length bin."""
    judged, high = tail(stats, quantile), f"{_QUANTILES[quantile]}_high"
    worst_bin = min(judged, key=judged.__getitem__) if judged else None
    failing = tuple(b for b, value in judged.items() if value < tau)
    return Verdict(
        meets=not failing if judged else None,
        worst_bin=worst_bin,
        worst=None if worst_bin is None else judged[worst_bin],
        failing=failing,
        certain=tuple(s.bin for s in stats if s.bin in failing and getattr(s, high) < tau),
        unjudged=tuple(s.bin for s in stats if not s.enough),
    )
