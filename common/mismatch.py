"""Mismatch between the sparse actor and the dense policy, per length bin.

alpha_t = sum_v min(p_dense(v), p_sparse(v)), the acceptance rate of speculative decoding, is exact
here (from a replay). The statistic of a bin is a lower percentile of its tokens: most tokens have
alpha > 0.999 whatever the budget, so the mean hides what the tail shows (arXiv 2606.08446, sections
on the mismatch statistic and on the schedule). Tokens of one sequence depend on each other, so
intervals come from a bootstrap over sequences.

Length bin of a token: its position in the sequence (prompt included) // bin_tokens.
Quantile q of n values: the smallest value that at least a share q of them does not exceed,
i.e. sorted[ceil(q n) - 1]: always a value that occurred, also under bootstrap weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

CLIP_TOLERANCE = 1e-6
_QUANTILES = {0.01: "p1", 0.05: "p5", 0.5: "p50"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinStats:
    """alpha of the tokens at positions start <= t < end; *_low, *_high: 95 % intervals.

    With one sequence there is nothing to resample, and the interval is [0, 1]. enough: False if
    the bin has fewer than min_tokens tokens; it is then reported but not judged.
    """

    bin: int
    start: int
    end: int
    count: int
    num_sequences: int
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
    *,
    bin_tokens: int,
    min_tokens: int,
    block_tokens: int | None = None,
    num_bootstrap: int = 200,
    seed: int = 0,
) -> list[BinStats]:
    """One BinStats per length bin that has tokens, in rising order.

    block_tokens: the bootstrap draws blocks of so many consecutive positions instead of whole rows,
    and num_sequences counts them: for few, long texts, whose far parts are nearly independent.

    Exactly invariant to the order of rows, intervals included. Raises ValueError for alpha
    outside [0, 1] by more than 1e-6 (or NaN) in the mask.
    """
    block = mask_BT.shape[1] if block_tokens is None else block_tokens
    if min(bin_tokens, num_bootstrap, block) < 1:
        raise ValueError(f"{bin_tokens=}, {num_bootstrap=}, {block=}: expected at least 1")
    mask = np.asarray(mask_BT, bool)
    alpha = _checked_alpha(alpha_BT, mask)
    bin_T = np.arange(mask.shape[1]) // bin_tokens
    result = []
    for b in np.unique(bin_T[mask.any(axis=0)]):
        in_bin = mask & (bin_T == b)
        rows = [np.sort(part) for part in _pieces(alpha, in_bin, block)]
        rows.sort(key=lambda values: values.tobytes())  # the bootstrap must not see the row order
        rng = np.random.default_rng([seed, int(b)])
        result.append(_bin_stats(int(b), bin_tokens, rows, min_tokens, num_bootstrap, rng))
    return result


def _pieces(alpha: np.ndarray, in_bin: np.ndarray, block: int) -> Iterator[np.ndarray]:
    """The bin's values, row by row and block by block."""
    for i in np.flatnonzero(in_bin.any(axis=1)):
        at = np.flatnonzero(in_bin[i])
        yield from np.split(alpha[i, at], np.flatnonzero(np.diff(at // block)) + 1)


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


def _bin_stats(b, bin_tokens, rows, min_tokens, num_bootstrap, rng) -> BinStats:
    values = np.concatenate(rows)
    order = np.argsort(values, kind="stable")
    values, owner = values[order], np.repeat(np.arange(len(rows)), [len(r) for r in rows])[order]
    p1, p5, p50 = (quantile(values, np.arange(1, len(values) + 1), q) for q in (0.01, 0.05, 0.5))
    intervals = np.tile([0.0, 1.0], (2, 1))
    if len(rows) > 1:
        draws = np.empty((2, num_bootstrap))
        for i in range(num_bootstrap):
            times = np.bincount(rng.integers(len(rows), size=len(rows)), minlength=len(rows))
            cumulative = np.cumsum(times[owner])
            draws[:, i] = [quantile(values, cumulative, q) for q in (0.05, 0.01)]
        intervals = np.quantile(draws, [0.025, 0.975], axis=1).T
    return BinStats(
        bin=b,
        start=b * bin_tokens,
        end=(b + 1) * bin_tokens,
        count=len(values),
        num_sequences=len(rows),
        mean=float(values.mean()),
        p1=p1,
        p5=p5,
        p50=p50,
        share_above_0_999=float((values > 0.999).mean()),
        p5_low=float(intervals[0, 0]),
        p5_high=float(intervals[0, 1]),
        p1_low=float(intervals[1, 0]),
        p1_high=float(intervals[1, 1]),
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
    """meets: statistic >= tau in every judged bin; None if no bin has enough tokens.

    worst_bin and worst: the judged bin with the lowest statistic (None, None without any).
    failing: bins below tau. unjudged: bins with too few tokens.
    """

    meets: bool | None
    worst_bin: int | None
    worst: float | None
    failing: tuple[int, ...]
    unjudged: tuple[int, ...]


def verdict(stats: Sequence[BinStats], tau: float, quantile: float) -> Verdict:
    """The paper's criterion: the lower percentile stays at or above tau in *every* length bin."""
    judged = tail(stats, quantile)
    worst_bin = min(judged, key=judged.__getitem__) if judged else None
    failing = tuple(b for b, value in judged.items() if value < tau)
    return Verdict(
        meets=not failing if judged else None,
        worst_bin=worst_bin,
        worst=None if worst_bin is None else judged[worst_bin],
        failing=failing,
        unjudged=tuple(s.bin for s in stats if not s.enough),
    )


def topk_estimate(
    logp_dense_NJ: np.ndarray,
    ids_dense_NJ: np.ndarray,
    logp_sparse_NJ: np.ndarray,
    ids_sparse_NJ: np.ndarray,
) -> np.ndarray:
    """Lower bound of alpha [N] from the top log-probs of both sides (20 in the paper).

        sum over v in both lists of min(p_dense(v), p_sparse(v)) <= alpha

    For engines that return no more than top-k log-probs. Ids of one row must be distinct.
    """
    same_NJJ = np.asarray(ids_dense_NJ)[:, :, None] == np.asarray(ids_sparse_NJ)[:, None, :]
    smaller_NJJ = np.exp(
        np.minimum(np.float64(logp_dense_NJ)[:, :, None], np.float64(logp_sparse_NJ)[:, None, :])
    )
    return np.where(same_NJJ, smaller_NJJ, 0.0).sum(axis=(1, 2))
