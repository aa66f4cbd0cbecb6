"""From a scored rollout to the batch that the learner trains on: weights, advantages, packing.

The training loop and the cross-check (common/crosscheck/trace.py) both call `prepare_batch`, so
that a comparison of two backends covers the code that trains.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.config import Config
from common.objective import batching, corrections, grpo
from common.objective.corrections import Correction
from common.objective.grpo import Advantages
from common.rollout import noise
from common.types import Rollout, Scored, TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A training batch, with the importance weights and advantages that went into it."""

    batch: TrainBatch
    correction: Correction
    advantages: Advantages


def prepare_batch(
    rollout: Rollout,
    scored: Scored,
    rewards_B: np.ndarray,
    config: Config,
    *,
    reject_seed: int,
    shuffle_seed: int,
    greedy_reward_B: np.ndarray | None = None,
    logp_ref_BT: np.ndarray | None = None,
) -> Prepared:
    """Correct for the sparse actor, compute advantages, and pack micro-batches of static shape.

    rewards_B: one per row, NaN = missing. reject_seed: noise of a correction that samples.
    shuffle_seed: order of the groups in the minibatches. greedy_reward_B: reward of the greedy
    response of each row's prompt, for that baseline. logp_ref_BT: log-probs of the reference
    policy, for a KL term.
    """
    correction = _correct(config, rollout, scored, reject_seed)
    advantages = grpo.advantages(
        rewards_B,
        rollout.group_B,
        config=config.grpo,
        greedy_reward_B=greedy_reward_B,
        finished_B=rollout.finished_B,
    )
    batch = batching.pack(
        rollout,
        scored,
        advantages,
        correction.weight_BT,
        num_minibatches=config.grpo.num_minibatches,
        tokens_per_microbatch=config.learner.tokens_per_microbatch,
        buckets=config.learner.length_buckets,
        seed=shuffle_seed,
        logp_ref_BT=logp_ref_BT,
        aggregation=config.grpo.loss_aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return Prepared(batch=batch, correction=correction, advantages=advantages)


def _correct(config: Config, rollout: Rollout, scored: Scored, seed: int) -> Correction:
    """Importance weights from the sparse actor to the dense policy."""
    uniform_BT = None
    if config.grpo.correction == "jackpot":
        uniform_BT = noise.position_uniform(
            seed,
            np.array([p.prompt_id for p in rollout.prompts], np.uint32),
            rollout.sample_B.astype(np.uint32),
            rollout.tokens_BT.shape[1],
        )
    return corrections.correct(
        config.grpo.correction,
        scored.logp_dense_BT - rollout.logp_sparse_BT,
        rollout.response_mask_BT,
        cap=config.grpo.correction_cap,
        low=config.grpo.correction_low,
        uniform_BT=uniform_BT,
    )
