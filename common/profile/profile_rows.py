"""Content of a profile file: for each budget the rows by length bin, the two halves, the shape of
the tail.

The shape of alpha's distribution is described as in arXiv 2606.08446, section on the statistic.
Most tokens have alpha > 0.999 whatever the budget; the tokens below are called the tail here.

    pearson_alpha   Pearson r of alpha against the position of its token
    pearson_p5      Pearson r of the bins' p5 against their middle; bins with enough tokens only
    beta_a, beta_b  Beta distribution fitted to alpha / 0.999 of the tail by maximum likelihood
    ks              its Kolmogorov-Smirnov statistic: the largest gap of the two distributions
    variance        variance of alpha in the tail
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from common.config import Config
from common.mismatch import acceptance
from common.schedule.profile_file import PROFILE_FORMAT

QUANTILES = (0.01, 0.05)
SAME = 0.999
EDGES = np.concatenate([np.linspace(0, 0.95, 20), [0.99, SAME, 1.0]])
LEAST = 30
"""Tokens of the tail below which no distribution is fitted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """alpha of one budget.

    k: budget, or "dense". group_B: the prompt of each row (0, 1, ...): rows of one prompt are one
    independent unit, and even and odd prompts are the two halves of the profile. estimate_BT: alpha
    from the top log-probs, if it was asked for.
    """

    k: int | str
    alpha_BT: np.ndarray
    mask_BT: np.ndarray
    group_B: np.ndarray
    estimate_BT: np.ndarray | None = None


class Profile:
    """Collects budgets; `record` is a profile file's content (common/schedule/profile_file.py)."""

    def __init__(
        self, config: Config, *, model: str, source: str, policy: str, block: int | None = None
    ):
        """block: tokens of a block of text, the unit of intervals; None = prompts are the units."""
        c, units = config.mismatch, "prompts" if block is None else f"blocks of {block} tokens"
        self._how = {"bin_tokens": c.bin_tokens, "min_tokens": c.min_tokens, "block_tokens": block}
        self._engine = config.rollout.engine
        self._top: dict[str, Any] = {
            "format": PROFILE_FORMAT,
            "model": model,
            "source": source,
            "interval": f"95 %, leaving out one of the {units} at a time",
            "policy": policy,
            "page_size": config.rollout.page_size,
            "bin_tokens": c.bin_tokens,
            "quantiles": list(QUANTILES),
        }
        self._rows: list[dict[str, Any]] = []
        self._halves: tuple[list, list] = ([], [])
        self._shape: list[dict[str, Any]] = []
        self._topk: list[dict[str, Any]] = []

    def add(self, m: Measured) -> list[acceptance.BinStats]:
        """Add one budget to the profile; returns its statistics by bin, for printing."""
        stats = acceptance.statistics(m.alpha_BT, m.mask_BT, m.group_B, **self._how)
        self._rows += [{"k": m.k, **s.__dict__} for s in stats]
        if len(np.unique(m.group_B)) > 1:
            for half, rows in enumerate(self._halves):
                mask = m.mask_BT & (m.group_B % 2 == half)[:, None]
                part = acceptance.statistics(m.alpha_BT, mask, m.group_B, **self._how)
                rows += [{"k": m.k, **s.__dict__} for s in part]
        self._shape.append({"k": m.k, **shape_of_tail(m.alpha_BT, m.mask_BT, stats)})
        if m.estimate_BT is not None:
            self._topk += self._compare(m, m.estimate_BT, stats)
        return stats

    def _compare(
        self, m: Measured, estimate_BT: np.ndarray, exact: list[acceptance.BinStats]
    ) -> list[dict[str, Any]]:
        """The estimate beside the exact value, by bin; it is too low by what the lists miss."""
        estimate = np.minimum(estimate_BT, 1.0)
        stats = acceptance.statistics(estimate, m.mask_BT, m.group_B, **self._how)
        return [
            {"k": m.k, "bin": e.bin, "p5": e.p5, "p5_topk": t.p5, "mean_bias": t.mean - e.mean}
            for e, t in zip(exact, stats, strict=True)
        ]

    def record(self, summary: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The file's content. summary: one line of text for each budget."""
        versions = {name: metadata.version(name) for name in ("numpy", self._engine)}
        record = {**self._top, "rows": self._rows, "shape": self._shape, "versions": versions}
        if all(self._halves):
            record["halves"] = [{"rows": rows} for rows in self._halves]
        if self._topk:
            record["topk"] = self._topk
        if summary is not None:
            record["summary"] = summary
        return record


def shape_of_tail(
    alpha_BT: np.ndarray, mask_BT: np.ndarray, stats: Sequence[acceptance.BinStats]
) -> dict[str, Any]:
    """Returns the module's numbers for one budget, and the counts of a histogram over EDGES.

    A number that cannot be computed (one bin, no variation, a tail of under LEAST tokens) is None.
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
