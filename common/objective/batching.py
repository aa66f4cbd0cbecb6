"""Micro-batches of static shapes: rows of unequal length share few compiled [B, T] programs.

Lengths are rounded up to buckets `bucket * {1, 1.5, 2, 3, 4, 6, 8, ...}` (two per octave), so a run
in which sequences grow from 128 to 32K tokens has at most 17 values of T. B depends on T alone
(tokens_per_microbatch // T), so each T is one shape and one compilation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.config import AGGREGATIONS
from common.objective.grpo import Advantages
from common.types import MicroBatch, Rollout, Scored, TrainBatch


def bucket_length(n: int, bucket: int = 128, buckets: Sequence[int] = ()) -> int:
    """Smallest of bucket * {1, 1.5, 2, 3, 4, 6, ...} that is at least n; padding stays below 50 %.

    Explicit `buckets` (rising) replace that series. Raises ValueError for n < 1, for n above the
    last of `buckets`, and for an odd or non-positive `bucket`.
    """
    if n < 1:
        raise ValueError(f"{n=}: expected a length of at least 1")
    if bucket < 2 or bucket % 2:
        raise ValueError(f"{bucket=}: expected an even number of at least 2")
    if buckets:
        if n > buckets[-1]:
            raise ValueError(f"{n=}: longer than the last of {buckets=}; add one to length_buckets")
        return next(b for b in buckets if b >= n)
    power = bucket
    while power < n:
        if power // 2 * 3 >= n:
            return power // 2 * 3
        power *= 2
    return power


def length_batches(
    total_len_B: np.ndarray,
    tokens_per_microbatch: int,
    bucket: int = 128,
    buckets: Sequence[int] = (),
) -> list[tuple[np.ndarray, int, int]]:
    """Group rows of like length: a list of (rows, T, B), longest first, with len(rows) <= B.

    T = bucket_length(longest of the rows), B = max(1, tokens_per_microbatch // T): a row longer
    than tokens_per_microbatch gets a batch of its own. Every row occurs exactly once; ties keep
    their order. Raises ValueError if tokens_per_microbatch < 1.
    """
    if tokens_per_microbatch < 1:
        raise ValueError(f"{tokens_per_microbatch=}: expected at least 1")
    lengths = np.asarray(total_len_B, np.int64)
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        T = bucket_length(int(lengths[order[start]]), bucket, buckets)
        B = max(1, tokens_per_microbatch // T)
        batches.append((order[start : start + B], T, B))
        start += B
    return batches


def take_rows(array_BT: np.ndarray, rows: np.ndarray, T: int, B: int) -> np.ndarray:
    """The given rows, cut or zero-padded on the right to T, then rows of zeros up to B; [B, T]."""
    width = min(T, array_BT.shape[1])
    out = np.zeros((B, T), array_BT.dtype)
    out[: len(rows), :width] = array_BT[rows, :width]
    return out


def pack(
    rollout: Rollout,
    scored: Scored,
    advantages: Advantages,
    correction_weight_BT: np.ndarray,
    *,
    num_minibatches: int,
    tokens_per_microbatch: int,
    seed: int,
    logp_ref_BT: np.ndarray | None = None,
    aggregation: str = "token_mean",
    max_response_tokens: int = 0,
    bucket: int = 128,
    buckets: Sequence[int] = (),
) -> TrainBatch:
    """Split a scored rollout into minibatches (optimizer steps) of micro-batches (static shapes).

    Groups are shuffled by `seed`, their rows stay neighbours, and the sequence is cut into
    num_minibatches parts that differ in size by at most one row. A minibatch has a denominator, and
    each of its tokens a scale, made from its usable rows (advantages.use_B):

        token_mean      scale 1                             denominator: their response tokens
        sequence_mean   scale 1 / response tokens of the row    denominator: number of rows
        constant        scale 1     denominator: number of rows x max_response_tokens (Dr. GRPO)

        gradient of a minibatch = sum over its micro-batches of grad(loss_sum) / denominator

    does not depend on the split or on padding. Without a KL term (logp_ref_BT None), rows that
    cannot move the policy (advantage 0, or all weights 0) are left out of the micro-batches and
    still count in the denominator. So a minibatch may be an empty list, and denominator 0 means
    that it had no usable row; the learner skips its optimizer step. The order of rows does not
    decide which rows share a minibatch.
    """
    mask_BT = rollout.response_mask_BT & advantages.use_B[:, None]
    parts = _shuffled_parts(rollout.group_B, rollout.sample_B, num_minibatches, seed)
    active_B = np.asarray(mask_BT.any(axis=1))
    if logp_ref_BT is None:
        has_weight_B = (mask_BT & (correction_weight_BT != 0)).any(axis=1)
        active_B = active_B & has_weight_B & (advantages.advantage_B != 0)
    fields = {
        "tokens_BT": rollout.tokens_BT.astype(np.int32),
        "loss_mask_BT": mask_BT,
        "advantage_BT": np.where(mask_BT, advantages.advantage_B[:, None], 0).astype(np.float32),
        "weight_BT": np.where(mask_BT, correction_weight_BT, 0).astype(np.float32),
        "scale_BT": _token_scale(mask_BT, aggregation),
        "logp_old_BT": scored.logp_dense_BT.astype(np.float32),
        "logp_ref_BT": (scored.logp_dense_BT if logp_ref_BT is None else logp_ref_BT).astype(
            np.float32
        ),
    }
    minibatches = [
        [
            MicroBatch(**{k: take_rows(v, part[rows], T, B) for k, v in fields.items()})
            for part in [part[active_B[part]]]
            for rows, T, B in length_batches(
                rollout.total_len_B[part], tokens_per_microbatch, bucket, buckets
            )
        ]
        for part in parts
    ]
    num_tokens = float(mask_BT.sum())
    return TrainBatch(
        minibatches=minibatches,
        denominators=[_denominator(mask_BT[p], aggregation, max_response_tokens) for p in parts],
        num_tokens=num_tokens,
        stats=_stats(minibatches, num_tokens, active_B, advantages.use_B, rollout.total_len_B),
    )


def _token_scale(mask_BT: np.ndarray, aggregation: str) -> np.ndarray:
    """Factor of each token's loss, float32 [B, T], 0 outside the mask."""
    if aggregation != "sequence_mean":
        return mask_BT.astype(np.float32)
    return (mask_BT / np.maximum(mask_BT.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def _denominator(mask_BT: np.ndarray, aggregation: str, max_response_tokens: int) -> float:
    """Divisor of the summed loss of a minibatch with this mask; 0 = it has no usable row."""
    if aggregation == "token_mean":
        return float(mask_BT.sum())
    num_rows = float(mask_BT.any(axis=1).sum())
    if aggregation == "sequence_mean":
        return num_rows
    longest = int(mask_BT.sum(axis=1).max(initial=0))
    if aggregation != "constant" or max_response_tokens < max(longest, 1):
        raise ValueError(
            f"{aggregation=}, {max_response_tokens=}: expected one of {AGGREGATIONS} and, for "
            f"constant, a limit of at least the longest response, {longest}"
        )
    return num_rows * max_response_tokens


def _shuffled_parts(
    group_B: np.ndarray, sample_B: np.ndarray, num_minibatches: int, seed: int
) -> list[np.ndarray]:
    """Row numbers of each minibatch, a pure function of (groups, samples, seed)."""
    if num_minibatches < 1:
        raise ValueError(f"{num_minibatches=}: expected at least 1")
    groups = np.unique(group_B)
    rank = np.random.default_rng(seed).permutation(len(groups))
    order = np.lexsort((sample_B, rank[np.searchsorted(groups, group_B)]))
    return np.array_split(order, num_minibatches)


def _stats(
    minibatches: list[list[MicroBatch]],
    num_tokens: float,
    active_B: np.ndarray,
    use_B: np.ndarray,
    total_len_B: np.ndarray,
) -> dict[str, float]:
    """batch/* of the record."""
    batches = [b for minibatch in minibatches for b in minibatch]
    padded = sum(b.tokens_BT.size for b in batches)
    return {
        "batch/num_microbatches": float(len(batches)),
        "batch/num_shapes": float(len({b.tokens_BT.shape for b in batches})),
        "batch/loss_tokens": num_tokens,
        "batch/padding_fraction": 1.0 - float(total_len_B[active_B].sum()) / padded
        if padded
        else 0.0,
        "batch/rows_used": float(use_B.sum()),
        "batch/rows_computed": float(active_B.sum()),
    }
