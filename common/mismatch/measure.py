"""How far sparse actor and dense policy are apart in one rollout, and whether that is an alarm.

Ratio statistics cover every sampled token. The exact acceptance rate alpha covers some rows: those
that `replay_some` runs through a sparse forward pass. `measure` computes numbers and changes
nothing, `judge` turns them into alarms; acting on alpha is the controller's part
(common/mismatch/controller.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from common.config import Config, MismatchConfig
from common.mismatch import acceptance
from common.mismatch.acceptance import BinStats
from common.objective import corrections
from common.objective.corrections import Correction
from common.protocols import Scorer
from common.schedule.schedule import Schedule
from common.types import Replay, Rollout, Scored

REPLAY_TOLERANCE = 1e-2
"""|replayed - decoded| log-prob above this is an alarm: replay and decode are not the same rule."""
BFLOAT16_REPLAY_TOLERANCE = 0.25
"""The same limit where the compute type is, or may be, bfloat16 (a smoke run had 0.05)."""
PROB_GAP_ALARM = 0.01
"""Mean |p_sparse - p_dense| of a dense rollout above this is a precision fault (field practice)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    """Statistics of the replayed rows.

    bins: alpha by length bin. mean: mean of alpha over all their response tokens. replay_error:
    largest |replayed - decoded| log-prob, in nats.
    """

    bins: list[BinStats]
    mean: float
    replay_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Mismatch of one rollout.

    dense: True if the rollout was decoded densely. total, by_bin: ratio statistics of all response
    tokens, and by number of the length bin (corrections.summary). exact: None without a replay.
    """

    dense: bool
    total: Mapping[str, float]
    by_bin: Mapping[int, Mapping[str, float]]
    exact: Exact | None


def replayed_rows(sample_B: np.ndarray, count: int, index: int) -> np.ndarray:
    """Row numbers, rising, for exact replay number `index` (from 0): `count`, or all if fewer.

    In order, all first samples of the prompts come first, then all second ones, and so on; each
    replay takes the next `count` rows of this order and starts over at its end. So every row is
    replayed within ceil(rows / count) replays, and one replay covers as many prompts as it can:
    they are the independent units. sample_B: number of each row's sample within its prompt.
    Example: samples 0 1 0 1 and count 2 give rows 0 and 2, then 1 and 3.
    """
    order = np.argsort(sample_B, kind="stable")
    count = min(count, len(order))
    return np.sort(order[(index * count + np.arange(count)) % len(order)])


def replay_some(
    rollout: Rollout, scorer: Scorer, schedule: Schedule | None, c: MismatchConfig, step: int
) -> Replay | None:
    """Replay some rows of the rollout of training step `step`; None where no replay is due.

    A dense rollout is not replayed: dense against dense in one program is 1. Its noise floor, the
    difference between engine and scorer, is in the ratio statistics.
    """
    if schedule is None or not c.every or step % c.every:
        return None
    rows = replayed_rows(rollout.sample_B, c.num_rows, step // c.every)
    return scorer.replay(rollout, rows, schedule)


def measure(
    rollout: Rollout,
    scored: Scored,
    correction: Correction,
    replay: Replay | None,
    *,
    c: MismatchConfig,
) -> Mismatch:
    """Ratio statistics of all response tokens, and exact statistics of the replayed rows."""
    mask, logp_sparse = rollout.response_mask_BT, rollout.logp_sparse_BT
    log_ratio = scored.logp_dense_BT - logp_sparse
    total = corrections.summary(log_ratio, mask, logp_sparse_BT=logp_sparse)
    return Mismatch(
        dense=not rollout.sparse_BT.any(),
        total={**total, "ess": correction.stats["correction/ess"]},
        by_bin=corrections.by_bin(
            log_ratio,
            mask,
            bin_tokens=c.bin_tokens,
            correction=correction,
            logp_sparse_BT=logp_sparse,
        ),
        exact=None if replay is None else _exact(rollout, replay, c),
    )


def _exact(rollout: Rollout, replay: Replay, c: MismatchConfig) -> Exact:
    mask = rollout.response_mask_BT[replay.rows]
    error = np.abs(replay.logp_replay_BT - rollout.logp_sparse_BT[replay.rows])
    return Exact(
        bins=acceptance.statistics(
            replay.alpha_BT,
            mask,
            rollout.group_B[replay.rows],
            bin_tokens=c.bin_tokens,
            min_tokens=c.min_tokens,
        ),
        mean=float(replay.alpha_BT[mask].mean()),
        replay_error=float(error[mask].max()),
    )


def judge(mismatch: Mismatch, config: Config) -> list[str]:
    """Alarms, one line each: a precision fault, a tail under tau, a replay unlike the decode."""
    c, exact, alarms = config.mismatch, mismatch.exact, []
    gap = mismatch.total["prob_gap"]
    if mismatch.dense and gap > PROB_GAP_ALARM:
        alarms.append(f"dense rollout differs from dense scores by {gap:.3f} on average")
    if exact is None:
        return alarms
    verdict = acceptance.verdict(exact.bins, c.tau, c.quantile)
    # An estimate under tau is chance too often: it is in the record, and only certainty alarms.
    if verdict.certain:
        ranges = ", ".join(f"{b * c.bin_tokens}-{(b + 1) * c.bin_tokens}" for b in verdict.certain)
        alarms.append(f"p{c.quantile * 100:g} of alpha under tau={c.tau:g} at positions {ranges}")
    strict = config.learner.dtype == "float32"
    if exact.replay_error > (REPLAY_TOLERANCE if strict else BFLOAT16_REPLAY_TOLERANCE):
        alarms.append(f"replay and decode differ by {exact.replay_error:.1e} in a log-prob")
    return alarms
