"""The record of one training step: lengths, rewards, update, and mismatch by length bin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.mismatch import acceptance
from common.mismatch.measure import Mismatch
from common.objective.corrections import Correction
from common.objective.grpo import Advantages
from common.schedule.schedule import DENSE, Schedule, token_bins
from common.types import Rollout, Scored


def describe_rollout(
    rollout: Rollout, rewards: np.ndarray, schedule: Schedule | None, advantages: Advantages
) -> dict[str, Any]:
    """reward/*, response/* and rollout/* of the record.

    A group has signal if one of its advantages is not 0, after `overlong` was applied.
    """
    lengths = rollout.total_len_B - rollout.prompt_len_B
    have = ~np.isnan(rewards)
    signal_B = advantages.use_B & (advantages.advantage_B != 0)
    by_group = [signal_B[rollout.group_B == g].any() for g in set(rollout.group_B)]
    valid = rewards[have]
    share = 1.0
    if schedule is not None:
        seen = np.nonzero(rollout.sparse_BT)[1]  # the token at position p saw p tokens
        if seen.size:
            share = schedule.share_of_pages(seen)
    return {
        "reward/mean": valid.mean() if valid.size else 0.0,
        "reward/std": valid.std() if valid.size else 0.0,
        "reward/groups_with_signal": np.mean(by_group),
        "reward/missing": int((~have).sum()),
        "response/len_mean": lengths.mean(),
        "response/len_max": int(lengths.max()),
        "response/finished": rollout.finished_B.mean(),
        "rollout/share_of_pages": share,
        "rollout/tokens": int(lengths.sum()),
        "rollout/prefill_tokens": int(rollout.stats["prefill_tokens"]),
    }


def describe_update(
    rollout: Rollout, scored: Scored, correction: Correction, update: Mapping[str, float]
) -> dict[str, Any]:
    """grpo/* of the record."""
    return {
        **update,
        "grpo/masked_fraction": correction.stats["correction/masked_fraction"],
        "grpo/truncated_fraction": correction.stats["correction/clipped_fraction"],
        "grpo/entropy": scored.entropy_BT[rollout.response_mask_BT].mean(),
    }


def describe_mismatch(mismatch: Mismatch) -> dict[str, Any]:
    """mismatch/* of the record; alpha only where rows were replayed."""
    total, exact = mismatch.total, mismatch.exact
    values: dict[str, Any] = {
        "mismatch/k1": total["k1"],
        "mismatch/k3": total["k3"],
        "mismatch/ess": total["ess"],
        "mismatch/abs_diff": total["prob_gap"],
        "mismatch/ratio_max": total["max_ratio"],
    }
    if exact is None:
        return values
    return {
        **values,
        "mismatch/p5_min": min(acceptance.tail(exact.bins, 0.05).values(), default=None),
        "mismatch/p1_min": min(acceptance.tail(exact.bins, 0.01).values(), default=None),
        "mismatch/mean": exact.mean,
        "mismatch/replay_error": exact.replay_error,
    }


def describe_bins(
    mismatch: Mismatch,
    rollout: Rollout,
    clipped_T: np.ndarray,
    schedule: Schedule | None,
    width: int,
) -> list[dict[str, Any]]:
    """One dict per length bin of `width` tokens that has tokens, in rising order.

    Each has its exact statistics where rows were replayed, its budget, its ratio statistics, and
    the share of its response tokens that the update clipped. clipped_T: see UpdateResult.
    """
    exact = {} if mismatch.exact is None else {s.bin: s.__dict__ for s in mismatch.exact.bins}
    tokens_T = rollout.response_mask_BT.sum(0)
    bins = []
    for b, ratios in mismatch.by_bin.items():
        k = DENSE if schedule is None else schedule.budget(b * width)
        entry = {"bin": b, "start": b * width, "end": (b + 1) * width, **exact.get(b, {})}
        entry["k"] = "dense" if k == DENSE else k
        for name in ("k1", "k3", "ess", "masked_fraction", "clipped_fraction"):
            entry[name] = ratios[name]
        clipped, tokens = _count(clipped_T, b, width), _count(tokens_T, b, width)
        entry["clip_fraction"] = float(clipped / max(tokens, 1))
        bins.append(entry)
    return bins


def _count(number_T: np.ndarray, b: int, width: int) -> int:
    """Sum of a number per position over the positions of length bin `b`."""
    return number_T[token_bins(np.arange(len(number_T)), width) == b].sum()
