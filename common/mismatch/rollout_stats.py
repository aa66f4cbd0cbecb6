"""Numbers about one training step for the record: lengths, rewards, mismatch by length bin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.config import Config
from common.mismatch import acceptance
from common.mismatch.controller import Controller
from common.objective import corrections
from common.objective.corrections import Correction
from common.objective.grpo import Advantages
from common.protocols import Scorer
from common.schedule.schedule import DENSE, Schedule, token_bins
from common.types import Rollout, Scored

REPLAY_TOLERANCE = 1e-2
"""|replayed - decoded| log-prob above this is an alarm: replay and decode are not the same rule."""
BFLOAT16_REPLAY_TOLERANCE = 0.25
"""The same where the compute type is, or may be, bfloat16 (0.05 seen in a smoke run)."""
PROB_GAP_ALARM = 0.01
"""Mean |p_sparse - p_dense| of a dense rollout above this is a precision fault (field practice)."""


def replayed_rows(sample_B: np.ndarray, count: int, turn: int) -> np.ndarray:
    """Rising row numbers for the turn-th exact replay (from 0): `count`, or all if there are fewer.

    All first samples of the prompts come first, then all second ones, and so on; each turn takes
    the next `count` of this order, around and around. So every row is looked at within
    ceil(rows / count) turns, and a turn sees as many prompts as it can: they are the independent
    units. sample_B: number of each row's sample within its prompt. Example: samples 0 1 0 1 and
    count 2 give rows 0 and 2, then 1 and 3.
    """
    order = np.argsort(sample_B, kind="stable")
    count = min(count, len(order))
    return np.sort(order[(turn * count + np.arange(count)) % len(order)])


def describe_rollout(
    rollout: Rollout, rewards: np.ndarray, schedule: Schedule | None, advantages: Advantages
) -> dict:
    """reward/*, response/* and rollout/* of the record.

    A group has signal if one of its advantages is not 0, so after `overlong` was applied.
    """
    lengths = rollout.total_len_B - rollout.prompt_len_B
    have = ~np.isnan(rewards)
    signal_B = advantages.use_B & (advantages.advantage_B != 0)
    by_group = [signal_B[rollout.group_B == g].any() for g in set(rollout.group_B)]
    valid = rewards[have]
    share = 1.0
    if schedule is not None:
        positions = np.broadcast_to(np.arange(rollout.tokens_BT.shape[1]), rollout.tokens_BT.shape)
        decoded = rollout.response_mask_BT & (positions > rollout.prompt_len_B[:, None])
        if decoded.any():
            share = schedule.share_of_pages(positions[decoded])
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
    rollout: Rollout, scored: Scored, correction: Correction, update: Mapping[str, Any]
) -> dict[str, Any]:
    """grpo/* of the record."""
    return {
        **update,
        "grpo/masked_fraction": correction.stats["correction/masked_fraction"],
        "grpo/truncated_fraction": correction.stats["correction/clipped_fraction"],
        "grpo/entropy": scored.entropy_BT[rollout.response_mask_BT].mean(),
    }


def describe_mismatch(
    rollout: Rollout,
    scored: Scored,
    correction: Correction,
    scorer: Scorer,
    schedule: Schedule | None,
    config: Config,
    step: int,
    controller: Controller | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """(mismatch/* values, one dict per length bin, alarms): alpha on some rows, ratios on all.

    A controller is shown alpha and may change its budgets for the next step (controller/*).

    A dense rollout is not replayed: dense against dense in one program is 1. Its noise floor is
    what engine and scorer differ by, in the ratio statistics.
    """
    c, mask = config.mismatch, rollout.response_mask_BT
    log_ratio = scored.logp_dense_BT - rollout.logp_sparse_BT
    total = corrections.summary(log_ratio, mask, logp_sparse_BT=rollout.logp_sparse_BT)
    values = {
        "mismatch/k1": total["k1"],
        "mismatch/k3": total["k3"],
        "mismatch/ess": correction.stats["correction/ess"],
        "mismatch/abs_diff": total["prob_gap"],
        "mismatch/ratio_max": total["max_ratio"],
    }
    alarms = []
    if schedule is None and total["prob_gap"] > PROB_GAP_ALARM:
        alarms.append(
            f"dense rollout differs from dense scores by {total['prob_gap']:.3f} on average"
        )
    per_bin = corrections.by_bin(
        log_ratio, mask, bin_tokens=c.bin_tokens, correction=correction,
        logp_sparse_BT=rollout.logp_sparse_BT,
    )  # fmt: skip
    exact: dict[int, Mapping[str, Any]] = {}
    if schedule is not None and c.every and step % c.every == 0:
        rows = replayed_rows(rollout.sample_B, c.num_rows, step // c.every)
        group_B = rollout.group_B[rows]
        replay = scorer.replay(rollout, rows, schedule)
        stats = acceptance.statistics(
            replay.alpha_BT, mask[rows], group_B, bin_tokens=c.bin_tokens, min_tokens=c.min_tokens
        )
        exact = {s.bin: s.__dict__ for s in stats}
        p5, p1 = acceptance.tail(stats, 0.05), acceptance.tail(stats, 0.01)
        error = np.abs(replay.logp_replay_BT - rollout.logp_sparse_BT[rows])[mask[rows]].max()
        values |= {
            "mismatch/p5_min": min(p5.values(), default=None),
            "mismatch/p1_min": min(p1.values(), default=None),
            "mismatch/mean": float(replay.alpha_BT[mask[rows]].mean()),
            "mismatch/replay_error": float(error),
        }
        verdict = acceptance.verdict(stats, c.tau, c.quantile)
        if verdict.certain:  # a point estimate under tau is luck too often: it stays in the record
            ranges = ", ".join(
                f"{b * c.bin_tokens}-{(b + 1) * c.bin_tokens}" for b in verdict.certain
            )
            alarms.append(
                f"p{c.quantile * 100:g} of alpha under tau={c.tau:g} at positions {ranges}"
            )
        strict = config.learner.dtype == "float32"
        if error > (REPLAY_TOLERANCE if strict else BFLOAT16_REPLAY_TOLERANCE):
            alarms.append(f"replay and decode differ by {error:.1e} in a log-prob")
        if controller is not None:
            values |= controller.update(replay.alpha_BT, mask[rows], group_B)
    return values, _merge_bins(per_bin, exact, schedule, c.bin_tokens), alarms


def _merge_bins(per_bin, exact, schedule: Schedule | None, width: int) -> list[dict[str, Any]]:
    """One dict per bin with tokens: ratio statistics, exact statistics where replayed, budget."""
    bins = []
    for b, ratios in per_bin.items():
        k = DENSE if schedule is None else schedule.budget(b * width)
        entry = {"bin": b, "start": b * width, "end": (b + 1) * width, **exact.get(b, {})}
        entry["k"] = "dense" if k == DENSE else k
        for name in ("k1", "k3", "ess", "masked_fraction", "clipped_fraction"):
            entry[name] = ratios[name]
        bins.append(entry)
    return bins


def add_clip_fraction(
    bins: list[dict[str, Any]], clipped_T: np.ndarray, rollout: Rollout, width: int
) -> None:
    """Put the share of response tokens whose ratio the update clipped into each bin's dict."""
    tokens_T = rollout.response_mask_BT.sum(0)
    for entry in bins:
        clipped, tokens = (
            x[token_bins(np.arange(len(x)), width) == entry["bin"]].sum()
            for x in (clipped_T, tokens_T)
        )
        entry["clip_fraction"] = float(clipped / max(tokens, 1))
