"""Which rows are replayed, and when the tail of alpha is an alarm."""

import dataclasses

import numpy as np
import pytest

from common.mismatch import acceptance
from common.mismatch.measure import judge, measure, replay_some, replayed_rows
from common.mismatch.rollout_stats import describe_bins, describe_mismatch
from common.schedule.schedule import Schedule
from common.types import Prompt, Replay
from tests.common.fake_backend import Fake, make_config
from tests.common.mismatch.test_tail_interval import units_of


@pytest.mark.parametrize(
    ("prompts", "samples", "count"), [(16, 4, 8), (4, 16, 8), (3, 5, 4), (2, 4, 3), (2, 2, 9)]
)
def test_every_row_is_replayed_within_a_few_turns(prompts, samples, count):
    group_B = np.repeat(np.arange(prompts), samples)
    sample_B = np.tile(np.arange(samples), prompts)
    turns = -(-len(group_B) // count)
    for first in (0, 1, 7):
        seen = [replayed_rows(sample_B, count, first + i) for i in range(turns)]
        assert sorted(set(np.concatenate(seen))) == list(range(len(group_B)))
        for rows in seen:
            assert len(set(rows)) == min(count, len(group_B)) and (np.diff(rows) > 0).all()
            # as many prompts as there can be, or one fewer where the order begins anew
            assert len(set(group_B[rows])) >= min(count, prompts) - (len(group_B) % count > 0)


def test_replayed_rows_by_hand():
    sample_B = np.array([0, 1, 0, 1])  # first samples: rows 0, 2, then second ones: 1, 3
    assert [replayed_rows(sample_B, 2, turn).tolist() for turn in range(3)] == [
        [0, 2],
        [1, 3],
        [0, 2],
    ]
    assert [replayed_rows(sample_B, 3, turn).tolist() for turn in range(2)] == [
        [0, 1, 2],
        [0, 2, 3],
    ]


def step(alpha_of, seen=None, turn=0, every=1, clipped_T=(), **mismatch_settings):
    """(values, bins, alarms) of one rollout of 8 prompts x 1, alpha by `alpha_of(shape)`."""
    config = make_config(rollout={"prompts_per_step": 8, "schedule": "k=1"})
    watched = {"num_rows": 8, "bin_tokens": 16, "every": every, **mismatch_settings}
    config = dataclasses.replace(config, mismatch=dataclasses.replace(config.mismatch, **watched))
    fake = Fake(config)
    fake.load_weights(0, 0)
    fake.load_scorer(0, 0)
    prompts = [
        Prompt(prompt_id=i, tokens=np.zeros(12, np.int32), task="", answer={}) for i in range(8)
    ]
    schedule = Schedule(page_size=4, bin_tokens=16, budgets=(1,))
    rollout = fake.generate(prompts, num_samples=1, schedule=schedule, seed=0)

    def replay(rollout, rows, schedule, *, temperature=None):
        assert seen is None or not seen.append(rows.tolist())
        logp = rollout.logp_sparse_BT[rows]
        return Replay(rows=rows, alpha_BT=alpha_of(logp.shape), logp_replay_BT=logp)

    fake.replay = replay
    correction = type("Correction", (), {
        "stats": {"correction/ess": 1.0}, "clipped_BT": rollout.response_mask_BT & False,
        "weight_BT": np.ones(rollout.tokens_BT.shape),
    })  # fmt: skip
    scored = fake.logprobs(rollout)
    c = config.mismatch
    replay = replay_some(rollout, fake, schedule, c, turn)
    mismatch = measure(rollout, scored, correction, replay, c=c)
    bins = describe_bins(mismatch, rollout, np.array(clipped_T), schedule, c.bin_tokens)
    return describe_mismatch(mismatch), bins, judge(mismatch, config)


def test_two_low_tokens_are_no_alarm_and_stays_in_the_record():
    """40 tokens, 12 ... 16 of 8 rows, two of them at 0.1: p5 = sorted[.05 * 40 - 1] = 0.1."""

    def two(shape):
        alpha = np.ones(shape)
        alpha[:2, 13] = 0.1
        return alpha

    values, bins, alarms = step(two)
    assert values["mismatch/p5_min"] == 0.1 and bins[0]["p5"] == 0.1 and not alarms


def test_a_true_failure_is_an_alarm_at_once():
    _, _, alarms = step(lambda shape: np.full(shape, 0.5))
    assert alarms == ["p5 of alpha under tau=0.86 at positions 0-16"]


def test_turns_are_counted_in_replays_not_in_steps():
    """Every second step, half of the rows: the second replay sees the other half."""
    seen = []
    for turn in (0, 1, 2):
        step(np.ones, seen, turn, every=2, num_rows=4)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_clipped_token_belongs_to_the_bin_of_its_query():
    clipped_T = np.zeros(17, int)
    clipped_T[16] = 8
    _, bins, _ = step(np.ones, clipped_T=clipped_T)
    # tokens 12 ... 16 of 8 rows; the query at 15 made token 16: one bin of 40 tokens
    assert [entry["bin"] for entry in bins] == [0]
    assert bins[0]["clip_fraction"] == 8 / 40


def test_a_step_without_a_replay_has_ratio_statistics_only():
    """mismatch.every=2: step 1 replays nothing, and its record has no statistics of alpha."""
    seen = []
    values, bins, alarms = step(np.ones, seen, turn=1, every=2)
    assert not seen and not alarms and "mismatch/p5_min" not in values
    assert "p5" not in bins[0] and bins[0]["k1"] == values["mismatch/k1"] == 0


def alarms_in(q, share_under, repetitions, tokens):
    """Share of cases that alarm; the limit is a share q, p_q = tau."""
    rng, hits = np.random.default_rng(0), 0
    group = np.arange(8)
    for _ in range(repetitions):
        values = units_of(rng, 8, 0.5, samples=1, tokens=tokens + 1)
        tau = 0.86
        alpha = np.where(values < share_under, 0.8, 0.9 + values / 20)
        rng.permuted(alpha, axis=1, out=alpha)
        mask = np.arange(tokens + 1) > np.zeros((8, 1))
        stats = acceptance.statistics(alpha, mask, group, bin_tokens=tokens, min_tokens=100)
        hits += bool(acceptance.verdict(stats, tau, q).certain)
    return hits / repetitions


@pytest.mark.parametrize("q", [0.05, 0.01])
@pytest.mark.parametrize("tokens", [13, 64])
def test_false_alarms_at_half_the_limit_are_rare(q, tokens):
    """0.000 to 0.003 in 1500 repetitions; judged by the estimate, 0.05 to 0.11 were false."""
    assert alarms_in(q, q / 2, 300, tokens) < 0.02


@pytest.mark.parametrize(("q", "least"), [(0.05, 0.9), (0.01, 0.55)])
def test_true_failures_alarm_within_two_steps(q, least):
    """Four times the limit: in one step 0.98 (p5) and 0.69 (p1) of 8 prompts x 64 tokens."""
    assert alarms_in(q, 4 * q, 200, 64) > least
