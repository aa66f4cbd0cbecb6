"""What the stages of the loop hand to each other: frozen numpy dataclasses, no framework.

One convention holds everywhere. Arrays that end in `_BT` are padded to the right, one row per
sequence, prompt first, and **index t speaks about the token at position t**: `logp[b, t]` is
log p(tokens[b, t] | tokens[b, :t]). Nothing outside the models shifts by one.

Worked example: prompt of two tokens `7 8`, response `5 6 EOS`, padded to six columns.

    t               0   1   2    3    4    5
    tokens          7   8   5    6    EOS  0     (padding holds token 0)
    response_mask   F   F   T    T    T    F     (True = sampled, use in statistics and loss)
    logp_sparse     0   0  -.2  -.1  -.3   0     (0 where the mask is False)
    prompt_len = 2, total_len = 5

The distribution of the first response token (t = 2) comes from the dense prefill; the query of
t = 3 stands at position 2 and is the first one that is decoded with sparse attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One verifiable problem.

    prompt_id: non-negative int32, stable over epochs; part of the key of the sampling noise.
    tokens: int32 [prompt_len], at least one token.
    task: name of the scorer that judges a response (common/tasks/registry.py).
    answer: what that scorer needs (ground truth and task metadata), JSON-serialisable.
    """

    prompt_id: int
    tokens: np.ndarray
    task: str
    answer: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sampled responses, rows in the order prompt 0 sample 0, prompt 0 sample 1, ...

    prompts: one per *row* (repeated within a group); group_B: int32 [B], equal within a group.
    sample_B: int32 [B], number of the sample within its group.
    tokens_BT int32, response_mask_BT bool, logp_sparse_BT float32 (log-prob of each sampled token
    under the very distribution it was sampled from: temperature and filter applied).
    prompt_len_B, total_len_B: int32 [B]. finished_B: bool [B], False = cut at the length limit.
    sparse_BT: bool, True for tokens from a sparse decode step. False: given, or from a dense pass,
    which the first token of a response always is.
    version_BT: int32, weight version that sampled the token, -1 outside the response.
    stats: engine counters (prefill_tokens, decode_tokens, decode_steps, decode_seconds).
    """

    prompts: list[Prompt]
    group_B: np.ndarray
    sample_B: np.ndarray
    tokens_BT: np.ndarray
    response_mask_BT: np.ndarray
    logp_sparse_BT: np.ndarray
    prompt_len_B: np.ndarray
    total_len_B: np.ndarray
    finished_B: np.ndarray
    sparse_BT: np.ndarray
    version_BT: np.ndarray
    stats: Mapping[str, float]

    def response(self, row: int) -> np.ndarray:
        """Sampled token ids of one row, int32 [response_len]."""
        return self.tokens_BT[row, self.prompt_len_B[row] : self.total_len_B[row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Dense log-probs of a rollout under the weights that sampled it (p_ref of the paper).

    logp_dense_BT, entropy_BT: float32 [B, T], 0 outside the response mask; entropy in nats.
    """

    logp_dense_BT: np.ndarray
    entropy_BT: np.ndarray


class Overlap(NamedTuple):
    """Dense against sparse distributions of one teacher-forced pass over given tokens.

    alpha_BT: float32 [B, T], acceptance rate of the distribution of token t, 1 at t = 0.
    logp_BT: float32 [B, T], log-prob of token t under the sparse one, 0 at t = 0.
    estimate_BT: lower bound of alpha by top-k log-probs of both sides; None unless asked for.
    """

    alpha_BT: np.ndarray
    logp_BT: np.ndarray
    estimate_BT: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Exact mismatch of some rows of a rollout, from a teacher-forced sparse forward pass.

    rows: int32 [n], row numbers of the rollout. alpha_BT: float32 [n, T], acceptance rate
    sum_v min(p_dense, p_sparse) of the distribution that sampled position t (1 where not in the
    response). logp_replay_BT: float32 [n, T], sparse log-prob of the token at t (0 elsewhere).
    """

    rows: np.ndarray
    alpha_BT: np.ndarray
    logp_replay_BT: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A fixed-shape slice of a training batch; padding rows have an all-False mask.

    tokens_BT int32, loss_mask_BT bool, advantage_BT float32, weight_BT float32 (importance
    correction, detached, already masked to 0 where a correction drops the token), scale_BT float32
    (multiplies the whole loss of a token: 1, or 1 / response length for the sequence mean),
    logp_old_BT float32 (dense log-probs before the update), logp_ref_BT float32 (reference policy
    of an optional KL term, else equal to logp_old_BT).
    """

    tokens_BT: np.ndarray
    loss_mask_BT: np.ndarray
    advantage_BT: np.ndarray
    weight_BT: np.ndarray
    scale_BT: np.ndarray
    logp_old_BT: np.ndarray
    logp_ref_BT: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What the learner gets from one rollout: a minibatch for each optimizer step.

    minibatches[i]: the micro-batches of optimizer step i, which is skipped if there are none.
    denominators[i] divides the summed loss of minibatch i: for the token mean the number of its
    loss tokens (of the whole minibatch, so that the split into micro-batches cannot change the
    gradient). num_tokens: loss tokens of all minibatches. stats: scalars worth logging.
    fresh: True if the learner's weights before the update are those that scored the batch. The
    first optimizer step then takes its own log-probs for logp_old, so that its ratio is exactly 1.
    """

    minibatches: list[list[MicroBatch]]
    denominators: list[float]
    num_tokens: float
    stats: Mapping[str, float]
    fresh: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What a learner reports of one training batch.

    values: numbers for the record, by name (grpo/*). clipped_T: int [T], the number of tokens with
    a clipped ratio at each position; T is the width of the widest micro-batch.
    """

    values: Mapping[str, float]
    clipped_T: np.ndarray
