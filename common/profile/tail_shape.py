"""The shape of alpha's distribution, as arXiv 2606.08446 describes it (section on the statistic).

Most tokens have alpha > 0.999 whatever the budget; what is below is called the tail here.

    pearson_alpha   Pearson r of alpha against the position of its token
    pearson_p5      Pearson r of the bins' p5 against their middle; bins with enough tokens only
    beta_a, beta_b  Beta distribution fitted to alpha / 0.999 of the tail by maximum likelihood
    ks              its Kolmogorov-Smirnov statistic: the largest gap of the two distributions
    variance        variance of alpha in the tail
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.mismatch.acceptance import BinStats

SAME = 0.999
EDGES = np.concatenate([np.linspace(0, 0.95, 20), [0.99, SAME, 1.0]])
LEAST = 30
"""Tokens of the tail below which no distribution is fitted."""


def describe(alpha_BT: np.ndarray, mask_BT: np.ndarray, stats: Sequence[BinStats]) -> dict:
    """JSON-ready numbers of one budget: see above, and counts of a histogram over EDGES.

    What cannot be computed (one bin, no variation, a tail of under LEAST tokens) is None.
    """
    alpha = np.asarray(alpha_BT, np.float64)[mask_BT]
    positions = np.broadcast_to(np.arange(mask_BT.shape[1]), mask_BT.shape)[mask_BT]
    judged = [s for s in stats if s.enough]
    tail = alpha[alpha < SAME]
    a, b, ks = fit_beta(tail / SAME) if len(tail) >= LEAST else (None, None, None)
    return {
        "count": len(alpha),
        "share_below": len(tail) / max(len(alpha), 1),
        "pearson_alpha": pearson(positions, alpha),
        "pearson_p5": pearson([(s.start + s.end) / 2 for s in judged], [s.p5 for s in judged]),
        "beta_a": a,
        "beta_b": b,
        "ks": ks,
        "variance": float(tail.var()) if len(tail) >= LEAST else None,
        "edges": EDGES.tolist(),
        "counts": np.histogram(alpha, EDGES)[0].tolist(),
    }


def pearson(x: Any, y: Any) -> float | None:
    """Pearson's r of two equally long lists; None for fewer than 3 pairs or a constant."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def fit_beta(x: np.ndarray) -> tuple[float, float, float] | tuple[None, None, None]:
    """(a, b, Kolmogorov-Smirnov statistic) of the Beta distribution that fits x in [0, 1] best.

    Maximum likelihood: the log-likelihood per value is concave in (a, b),
    (a - 1) mean log x + (b - 1) mean log(1 - x) - log B(a, b), so any sample has an answer;
    a and b stay in [1e-4, 1e6], which only nearly constant samples reach; a constant gives None.
    """
    from scipy import optimize, special

    x = np.sort(np.clip(x, 1e-6, 1 - 1e-6))
    if np.ptp(x) == 0:
        return None, None, None
    means = np.array([np.log(x).mean(), np.log1p(-x).mean()])

    def loss(log_ab):
        ab = np.exp(log_ab)
        slope = special.digamma(ab) - special.digamma(ab.sum()) - means
        return special.betaln(*ab) - (ab - 1) @ means, ab * slope

    limits = np.log([1e-4, 1e6])
    exact = {"ftol": 1e-14, "gtol": 1e-8}
    found = optimize.minimize(loss, np.zeros(2), jac=True, bounds=[limits] * 2, options=exact)
    a, b = np.exp(found.x)
    below, steps = special.betainc(a, b, x), np.arange(len(x) + 1) / len(x)
    ks = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    return float(a), float(b), float(ks)
