"""Importance corrections from the sparse actor to the dense policy, in one registry.

A correction gives each token a constant weight for its term of the policy loss, computed from
r = exp(log_ratio), log_ratio = logp_dense_old - logp_sparse of the sampled token. Weight 0 drops
the token from the loss; it still counts in the token-mean.

    none                  1
    token_tis             min(r, cap)                            (arXiv 2606.08446, RL recipe)
    sequence_tis          min(prod_t r_t, cap), for each token of the row
    icepop                r where low <= r <= cap, else 0        (two-sided mask)
    geometric_rejection   1 where low <= exp(mean_t log r_t) <= cap, else 0, for the whole row
    m2po                  min(r, cap) of the tokens that are kept           (after arXiv 2510.01161)
    jackpot               min(max(r, low), cap) of the accepted tokens      (after arXiv 2602.06107)

Differences from the publications:

* geometric_rejection only selects rows (weight 1): its two bounds judge a geometric mean and would
  make no sense as a cap of single tokens. Published bounds (around 0.99 to 1.001) are much tighter
  than the defaults here.
* m2po drops the tokens with the largest log_ratio**2, over the whole batch, until the mean of the
  remaining ones is at most log(cap)**2, i.e. the rms ratio is within a factor cap. The published
  threshold 0.04 is cap = exp(0.2) = 1.2214. Tokens equal to the smallest dropped one are dropped
  too, so the result does not depend on the order of rows. The weights are also capped, because in a
  long batch one token of any ratio may remain below the mean.
* jackpot is optimal budgeted rejection sampling that knows only the ratio of the sampled token:
  with lambda = low, it accepts a token if uniform_BT < a, where a = min(1, r / lambda). The weight
  of an accepted token is r / a = max(r, lambda), so E[accepted * weight] = r. This is unbiased up
  to the cap, with the rejected tokens in the denominator, and needs no normaliser over the
  vocabulary. Low ratios are thinned out instead of down-weighted; a larger lambda accepts less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from common.schedule.schedule import token_bins

_LOG_LIMIT = 80.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights of the tokens of a rollout.

    weight_BT: float32, 0 outside the mask. clipped_BT: bool, True where the cap reduced the weight.
    stats: `summary` of the weights, its keys under correction/.
    """

    weight_BT: np.ndarray
    clipped_BT: np.ndarray
    stats: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs:
    log_ratio: np.ndarray  # float64 [B, T], 0 outside the mask
    mask: np.ndarray
    cap: float
    low: float
    uniform: np.ndarray | None


_Weights = tuple[np.ndarray, np.ndarray]


def _capped(log_ratio: np.ndarray, cap: float) -> _Weights:
    """(min(exp(log_ratio), cap) without overflow, True where the cap reduced it)."""
    return np.exp(np.minimum(log_ratio, np.log(cap))), log_ratio > np.log(cap)


def _none(x: _Inputs) -> _Weights:
    return np.ones(x.mask.shape), np.zeros(x.mask.shape, bool)


def _token_tis(x: _Inputs) -> _Weights:
    return _capped(x.log_ratio, x.cap)


def _sequence_tis(x: _Inputs) -> _Weights:
    weight_B1, clipped_B1 = _capped(x.log_ratio.sum(axis=1, keepdims=True), x.cap)
    return np.broadcast_to(weight_B1, x.mask.shape), np.broadcast_to(clipped_B1, x.mask.shape)


def _icepop(x: _Inputs) -> _Weights:
    keep = (x.log_ratio >= np.log(x.low)) & (x.log_ratio <= np.log(x.cap))
    return np.where(keep, _capped(x.log_ratio, x.cap)[0], 0.0), np.zeros(x.mask.shape, bool)


def _geometric_rejection(x: _Inputs) -> _Weights:
    count_B1 = np.maximum(x.mask.sum(axis=1, keepdims=True), 1)
    mean_B1 = x.log_ratio.sum(axis=1, keepdims=True) / count_B1
    keep_B1 = (mean_B1 >= np.log(x.low)) & (mean_B1 <= np.log(x.cap))
    return np.broadcast_to(keep_B1, x.mask.shape).astype(np.float64), np.zeros(x.mask.shape, bool)


def _m2po(x: _Inputs) -> _Weights:
    if x.cap <= 1:
        raise ValueError(
            f"cap={x.cap}: m2po expects more than 1 (threshold log(cap)**2); 1.2214 = 0.04"
        )
    square = np.where(x.mask, x.log_ratio**2, 0.0)
    rising = np.sort(square[x.mask])
    running_mean = np.cumsum(rising) / np.arange(1, len(rising) + 1)
    num_kept = int(np.searchsorted(running_mean, np.log(x.cap) ** 2, side="right"))
    first_dropped = rising[num_kept] if num_kept < len(rising) else np.inf
    weight, clipped = _capped(x.log_ratio, x.cap)
    keep = square < first_dropped
    return np.where(keep, weight, 0.0), clipped & keep


def _jackpot(x: _Inputs) -> _Weights:
    if x.uniform is None:
        raise ValueError("uniform_BT=None: jackpot expects one uniform number per token in (0, 1)")
    log_low = np.log(x.low)
    accept = x.uniform < np.exp(np.minimum(x.log_ratio - log_low, 0.0))
    weight, clipped = _capped(np.maximum(x.log_ratio, log_low), x.cap)
    return np.where(accept, weight, 0.0), clipped & accept


CORRECTIONS: dict[str, Callable[[_Inputs], _Weights]] = {
    "none": _none,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "icepop": _icepop,
    "geometric_rejection": _geometric_rejection,
    "m2po": _m2po,
    "jackpot": _jackpot,
}


def correct(
    name: str,
    log_ratio_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    cap: float,
    low: float,
    uniform_BT: np.ndarray | None = None,
    logp_sparse_BT: np.ndarray | None = None,
) -> Correction:
    """Weights of correction `name`; the formulas are in the docstring of this module.

    log_ratio_BT: logp_dense_old - logp_sparse, in nats. mask_BT: response tokens. uniform_BT: for
    jackpot, numbers in (0, 1), e.g. noise.position_uniform. logp_sparse_BT: adds prob_gap to stats.
    Raises ValueError for an unknown name, bounds other than 0 < low <= cap, and a log ratio in the
    mask that is not finite.
    """
    if name not in CORRECTIONS:
        raise ValueError(f"{name=}: expected one of {tuple(CORRECTIONS)}")
    if not 0 < low <= cap:
        raise ValueError(f"{low=}, {cap=}: expected 0 < low <= cap")
    mask = np.asarray(mask_BT, bool)
    log_ratio = masked_log_ratio(log_ratio_BT, mask)
    inputs = _Inputs(log_ratio=log_ratio, mask=mask, cap=cap, low=low, uniform=uniform_BT)
    weight, clipped = CORRECTIONS[name](inputs)
    weight, clipped = np.where(mask, weight, 0.0), clipped & mask
    stats = summary(
        log_ratio, mask, weight_BT=weight, clipped_BT=clipped, logp_sparse_BT=logp_sparse_BT
    )
    return Correction(
        weight_BT=weight.astype(np.float32),
        clipped_BT=clipped,
        stats={f"correction/{key}": value for key, value in stats.items()},
    )


def masked_log_ratio(log_ratio_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """log_ratio_BT in float64, 0 outside the mask; ValueError if it is not finite in the mask."""
    log_ratio = np.where(mask_BT, np.asarray(log_ratio_BT, np.float64), 0.0)
    num_bad = int((~np.isfinite(log_ratio)).sum())
    if num_bad:
        raise ValueError(
            f"log_ratio_BT: {num_bad} response tokens are not finite, expected finite log-probs on "
            "both sides; check the scorer and the filter (top_p) of the engine"
        )
    return log_ratio


def summary(
    log_ratio_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    weight_BT: np.ndarray | None = None,
    clipped_BT: np.ndarray | None = None,
    logp_sparse_BT: np.ndarray | None = None,
) -> dict[str, float]:
    """Statistics of the tokens in the mask (samples of the sparse policy); all 0 without any.

        k1, k3      estimates of KL(sparse || dense): mean(-log r), mean(r - 1 - log r)
        max_ratio   largest r;   alpha_estimate: mean(min(1, r)), unbiased for the mean of alpha
        prob_gap    mean |p_sparse - p_dense| of the sampled tokens (with logp_sparse_BT)
        ess         (sum w)**2 / (n sum w**2), 1 = all tokens weigh the same (with weight_BT)
        mean_weight, masked_fraction (w = 0), clipped_fraction (cut at the cap)

    Log ratios are limited to +-80 here, so no statistic overflows.
    """
    mask = np.asarray(mask_BT, bool)
    n = int(mask.sum())
    log_ratio = np.clip(np.asarray(log_ratio_BT, np.float64)[mask], -_LOG_LIMIT, _LOG_LIMIT)
    ratio = np.exp(log_ratio)
    columns = {
        "k1": -log_ratio,
        "k3": np.expm1(log_ratio) - log_ratio,
        "alpha_estimate": np.minimum(ratio, 1.0),
    }
    if logp_sparse_BT is not None:
        logp_sparse = np.asarray(logp_sparse_BT, np.float64)[mask]
        columns["prob_gap"] = np.abs(np.exp(logp_sparse) - np.exp(logp_sparse + log_ratio))
    stats = {"num_tokens": float(n), "max_ratio": float(ratio.max()) if n else 0.0}
    if weight_BT is not None:
        weight = np.asarray(weight_BT, np.float64)[mask]
        columns |= {"mean_weight": weight, "masked_fraction": weight == 0}
        square = n * float((weight**2).sum())
        stats["ess"] = float(weight.sum()) ** 2 / square if square else 0.0
    if clipped_BT is not None:
        columns["clipped_fraction"] = clipped_BT[mask]
    return stats | {key: float(np.mean(x)) if n else 0.0 for key, x in columns.items()}


def by_bin(
    log_ratio_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    bin_tokens: int,
    correction: Correction | None = None,
    logp_sparse_BT: np.ndarray | None = None,
) -> dict[int, dict[str, float]]:
    """`summary` of each length bin that has tokens, by number of the bin.

    The bin of a token is that of the query that produced it (schedule.token_bins). With
    `correction`, its weights are summarised too.
    """
    mask = np.asarray(mask_BT, bool)
    bin_T = token_bins(np.arange(mask.shape[1]), bin_tokens)
    return {
        int(b): summary(
            log_ratio_BT,
            mask & (bin_T == b),
            weight_BT=None if correction is None else correction.weight_BT,
            clipped_BT=None if correction is None else correction.clipped_BT,
            logp_sparse_BT=logp_sparse_BT,
        )
        for b in np.unique(bin_T[mask.any(axis=0)])
    }
