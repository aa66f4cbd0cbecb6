"""From a scored rollout to the training batch: what each argument decides, on four tokens."""

import dataclasses
import inspect

import numpy as np
import pytest

from common import loop
from common.config import Config, GrpoConfig
from common.crosscheck import trace
from common.objective import prepare
from common.objective.prepare import prepare_batch
from common.types import Prompt, Rollout, Scored

# Two prompts x two samples; each row is one prompt token and one response token.
PROMPTS = [Prompt(prompt_id=i, tokens=np.array([7]), task="x", answer={}) for i in (3, 4)]
ROLLOUT = Rollout(
    prompts=[p for p in PROMPTS for _ in range(2)],
    group_B=np.array([0, 0, 1, 1], np.int32),
    sample_B=np.array([0, 1, 0, 1], np.int32),
    tokens_BT=np.array([[7, 1], [7, 2], [7, 3], [7, 4]], np.int32),
    response_mask_BT=np.array([[False, True]] * 4),
    logp_sparse_BT=np.array([[0, -2.0]] * 4, np.float32),
    sparse_BT=np.zeros((4, 2), bool),
    prompt_len_B=np.ones(4, np.int32),
    total_len_B=np.full(4, 2, np.int32),
    finished_B=np.array([True, True, True, False]),
    version_BT=np.array([[-1, 0]] * 4, np.int32),
    stats={},
)
# Ratios dense / sparse of 1, 8, 1, 1/2.
DENSE = np.array([[0, -2.0], [0, -2.0 + np.log(8)], [0, -2.0], [0, -2.0 - np.log(2)]], np.float32)
SCORED = Scored(logp_dense_BT=DENSE, entropy_BT=-DENSE)
REWARDS = np.array([1.0, 0, 0, 1])


def prepared(rewards=REWARDS, reject_seed=0, shuffle_seed=0, greedy=None, reference=None, **grpo):
    config = Config(
        grpo=GrpoConfig(
            **{"num_minibatches": 1, "correction": "token_tis", "correction_cap": 2.0} | grpo
        ),
    )
    return prepare_batch(
        ROLLOUT, SCORED, rewards, config, reject_seed=reject_seed, shuffle_seed=shuffle_seed,
        greedy_reward_B=greedy, logp_ref_BT=reference,
    )  # fmt: skip


def by_token(batch, field):
    """Values of the response tokens, by token: 1, 2, 3, 4 for rows 0 to 3."""
    return {
        int(m.tokens_BT[b, 1]): float(getattr(m, field)[b, 1])
        for minibatch in batch.minibatches
        for m in minibatch
        for b in np.flatnonzero(m.loss_mask_BT[:, 1])
    }


def test_weights_advantages_and_log_probs_by_hand():
    """Weights min(r, 2). Rewards 1 0 | 0 1 have mean 1/2: advantages +1/2 -1/2 | -1/2 +1/2."""
    batch = prepared(normalize_std=False).batch
    assert by_token(batch, "weight_BT") == pytest.approx({1: 1, 2: 2, 3: 1, 4: 0.5})
    assert by_token(batch, "advantage_BT") == {1: 0.5, 2: -0.5, 3: -0.5, 4: 0.5}
    assert by_token(batch, "logp_old_BT") == {i + 1: float(DENSE[i, 1]) for i in range(4)}
    assert batch.denominators == [4.0] and batch.fresh


def test_a_cut_response_is_masked_where_overlong_says_so():
    """Row 3 was cut, so row 2 is alone in its group and has no signal: two rows are computed."""
    out = prepared(overlong="mask", normalize_std=False)
    assert out.advantages.use_B.tolist() == [True, True, True, False]
    assert by_token(out.batch, "advantage_BT") == {1: 0.5, 2: -0.5}
    assert out.batch.denominators == [3.0]


def test_greedy_rewards_and_reference_reach_the_batch():
    greedy = np.array([0.25, 0.25, 0.5, 0.5])
    reference = np.where(ROLLOUT.response_mask_BT, -1.5, 0)
    batch = prepared(
        baseline="greedy", normalize_std=False, kl_coef=0.1, greedy=greedy, reference=reference
    ).batch
    assert by_token(batch, "advantage_BT") == {1: 0.75, 2: -0.25, 3: -0.5, 4: 0.5}
    assert by_token(batch, "logp_ref_BT") == {i: -1.5 for i in (1, 2, 3, 4)}


def test_each_seed_decides_its_part_only():
    """reject_seed: which tokens jackpot accepts. shuffle_seed: which groups share a minibatch."""

    def accepted(seed):
        how = {"correction": "jackpot", "correction_low": 2.0}
        return tuple((prepared(reject_seed=seed, **how).correction.weight_BT[:, 1] > 0).tolist())

    assert accepted(0) == accepted(0) and len({accepted(seed) for seed in range(8)}) > 1
    assert all(accepted(seed)[1] for seed in range(8))  # ratio 8 > lambda: always accepted
    firsts = {
        tuple(m.tokens_BT[m.loss_mask_BT].tolist())
        for seed in range(8)
        for m in prepared(shuffle_seed=seed, num_minibatches=2).batch.minibatches[0]
    }
    assert firsts == {(1, 2), (3, 4)}


def test_loop_and_cross_check_train_on_the_same_code():
    assert loop.prepare_batch is trace.prepare_batch is prepare.prepare_batch
    for module in (loop, trace):
        source = inspect.getsource(module)
        assert not any(f"{name}(" in source for name in ("batching.pack", "corrections.correct"))


def test_an_unfinished_row_of_a_trace_counts_as_finished():
    """A trace samples up to its limit: `finished_B` would mask every row with overlong=mask."""
    rollout = trace._uneven(dataclasses.replace(ROLLOUT, finished_B=np.zeros(4, bool)))
    assert rollout.finished_B.all()
