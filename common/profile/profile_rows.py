"""What a profile holds of one budget: rows by length bin, the two halves, the tail's shape."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import numpy as np

from common.config import Config
from common.mismatch import acceptance
from common.profile import tail_shape
from common.schedule.profile_file import PROFILE_FORMAT

QUANTILES = (0.01, 0.05)


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
        """Statistics of one budget; returned for whoever wants to print them."""
        stats = acceptance.statistics(m.alpha_BT, m.mask_BT, m.group_B, **self._how)
        self._rows += [{"k": m.k, **s.__dict__} for s in stats]
        if len(np.unique(m.group_B)) > 1:
            for half, rows in enumerate(self._halves):
                mask = m.mask_BT & (m.group_B % 2 == half)[:, None]
                part = acceptance.statistics(m.alpha_BT, mask, m.group_B, **self._how)
                rows += [{"k": m.k, **s.__dict__} for s in part]
        self._shape.append({"k": m.k, **tail_shape.describe(m.alpha_BT, m.mask_BT, stats)})
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
        """The file's content. summary: a line for people per budget."""
        versions = {name: metadata.version(name) for name in ("numpy", self._engine)}
        record = {**self._top, "rows": self._rows, "shape": self._shape, "versions": versions}
        if all(self._halves):
            record["halves"] = [{"rows": rows} for rows in self._halves]
        if self._topk:
            record["topk"] = self._topk
        if summary is not None:
            record["summary"] = summary
        return record
