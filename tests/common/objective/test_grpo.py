"""Advantages of a group, by hand-worked numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import GrpoConfig
from common.objective import grpo

NAN = float("nan")
GROUP = np.array([0, 0, 0, 1, 1, 1])


def config(**changes):
    return dataclasses.replace(GrpoConfig(), **changes)


def advantage(rewards, group=GROUP, *, greedy=None, finished=None, **changes):
    got = grpo.advantages(
        rewards, group, config=config(**changes), greedy_reward_B=greedy, finished_B=finished
    )
    assert got.advantage_B.dtype == np.float32 and np.isfinite(got.advantage_B).all()
    return got


def test_group_mean_with_and_without_std():
    # group 0: mean 1, deviations -1 0 1, std (n - 1) = sqrt(2 / 2) = 1
    # group 1: mean 0.5, deviations -.5 0 .5, std = sqrt(0.5 / 2) = 0.5
    rewards = [0, 1, 2, 0, 0.5, 1]
    want = np.array([-1, 0, 1, -1, 0, 1])
    got = advantage(rewards)
    np.testing.assert_allclose(got.advantage_B, want, atol=4e-6)  # eps 1e-6 over a std of 0.5
    got = advantage(rewards, normalize_std=False)
    np.testing.assert_array_equal(got.advantage_B, np.float32([-1, 0, 1, -0.5, 0, 0.5]))
    assert got.use_B.all()


def test_std_epsilon_is_added_to_the_standard_deviation():
    # rewards 0, 2e-6: deviation +-1e-6, std sqrt(2e-12) = 1.41421e-6; 1 / (1.41421 + 1) = 0.414214
    got = advantage([0, 2e-6], np.array([0, 0]))
    np.testing.assert_allclose(got.advantage_B, [-0.414214, 0.414214], rtol=1e-5)


def test_leave_one_out():
    # group 0: 0 - (1 + 2) / 2 = -1.5;  1 - (0 + 2) / 2 = 0;  2 - (0 + 1) / 2 = 1.5
    # group 1, row 4 missing: 0 - 1 = -1;  1 - 0 = 1
    got = advantage([0, 1, 2, 0, NAN, 1], baseline="leave_one_out", normalize_std=False)
    np.testing.assert_allclose(got.advantage_B, [-1.5, 0, 1.5, -1, 0, 1], rtol=1e-6)


def test_greedy_baseline_needs_no_group_and_refuses_to_do_without_its_reward():
    rewards, greedy = [0, 1, 2, 1, 1, 1], [1, 1, 1, 0.25, 0.25, NAN]
    got = advantage(rewards, greedy=greedy, baseline="greedy", normalize_std=False)
    np.testing.assert_allclose(got.advantage_B, [-1, 0, 1, 0.75, 0.75, 0])
    np.testing.assert_array_equal(got.use_B, [True] * 5 + [False])  # no baseline: missing
    got = advantage(rewards, greedy=greedy, baseline="greedy", normalize_std=True)
    # group 0: std 1; group 1: rewards equal, no std: 0
    np.testing.assert_allclose(got.advantage_B, [-1, 0, 1, 0, 0, 0], atol=2e-6)
    with pytest.raises(ValueError, match="greedy_reward_B"):
        advantage(rewards, baseline="greedy")


def test_names_mean_what_the_papers_mean():
    # rewards 0, 1, 2 and 0, 0.5, 1: the std is 1 and 0.5. Only GRPO divides by it.
    rewards, zero = [0, 1, 2, 0, 0.5, 1], np.zeros(6)
    for baseline, divided, want in (
        ("group_mean", True, [-1, 0, 1, -1, 0, 1]),
        ("leave_one_out", False, [-1.5, 0, 1.5, -0.75, 0, 0.75]),
        ("greedy", False, [0, 1, 2, 0, 0.5, 1]),
    ):
        got = advantage(rewards, greedy=zero, baseline=baseline).advantage_B
        np.testing.assert_allclose(got, want, atol=4e-6)
        assert config(baseline=baseline).divides_by_std is divided
        for explicit in (True, False):
            c = config(baseline=baseline, normalize_std=explicit)
            assert c.divides_by_std is explicit
    # ReMax at its usual group of 1: reward minus greedy reward
    got = advantage([1, 0, 1, 0], np.arange(4), greedy=np.zeros(4), baseline="greedy").advantage_B
    np.testing.assert_array_equal(got, [1, 0, 1, 0])


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[NAN] * 3, [NAN, 1, NAN], [1, 1, 1], [0, 0, NAN], [0.1] * 3])
def test_group_without_signal_is_exactly_zero(baseline, normalize_std, rewards):
    got = advantage(rewards + [0, 1, 0], baseline=baseline, normalize_std=normalize_std)
    assert (got.advantage_B[:3] == 0).all() and (got.advantage_B[3:] != 0).all()
    np.testing.assert_array_equal(got.use_B, [r == r for r in rewards] + [True] * 3)


def test_missing_reward_is_left_out_of_mean_and_std():
    with_missing = advantage([0, NAN, 2, 0, 1, 0]).advantage_B
    without = advantage([0, 2, 0, 1, 0], np.array([0, 0, 1, 1, 1])).advantage_B
    np.testing.assert_array_equal(with_missing[[0, 2, 3, 4, 5]], without)


def test_everything_missing_or_nothing_there():
    got = advantage([NAN] * 6)
    assert not got.use_B.any() and not got.advantage_B.any()
    assert advantage([], np.array([], int)).advantage_B.shape == (0,)


def test_overlong_keep_mask_zero():
    rewards, finished = [1, 1, 0, 1, 0, 0], np.array([False, True, True, True, True, True])
    keep = advantage(rewards, finished=finished, normalize_std=False)
    # keep: group 0 mean 2/3
    np.testing.assert_allclose(keep.advantage_B[:3], [1 / 3, 1 / 3, -2 / 3], rtol=1e-6)
    mask = advantage(rewards, finished=finished, normalize_std=False, overlong="mask")
    # mask: rewards 1, 0 remain, mean 1/2
    np.testing.assert_allclose(mask.advantage_B[:3], [0, 0.5, -0.5])
    np.testing.assert_array_equal(mask.use_B, finished)
    zero = advantage(rewards, finished=finished, normalize_std=False, overlong="zero")
    # zero: 0, 1, 0, mean 1/3
    np.testing.assert_allclose(zero.advantage_B[:3], [-1 / 3, 2 / 3, -1 / 3], rtol=1e-6)
    assert zero.use_B.all()
    missing = advantage([NAN] + rewards[1:], finished=finished, overlong="zero")
    assert not missing.use_B[0]
    for overlong in ("mask", "zero"):
        with pytest.raises(ValueError, match="finished_B"):
            advantage(rewards, overlong=overlong)


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match="infinite"):
        advantage([0, float("inf"), 1, 0, 0, 0])
    with pytest.raises(ValueError, match="group_B"):
        advantage([0, 1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_may_come_in_any_order(data):
    n = data.draw(st.integers(1, 12))
    reward = st.one_of(st.just(NAN), st.sampled_from([0.0, 0.5, 1.0]))
    rewards = np.array(data.draw(st.lists(reward, min_size=n, max_size=n)))
    group = np.array(data.draw(st.lists(st.integers(5, 8), min_size=n, max_size=n)))
    order = np.array(data.draw(st.permutations(range(n))))
    baseline = data.draw(st.sampled_from(["group_mean", "leave_one_out"]))
    got = advantage(rewards, group, baseline=baseline)
    moved = advantage(rewards[order], group[order], baseline=baseline)
    np.testing.assert_allclose(moved.advantage_B, got.advantage_B[order], rtol=1e-6, atol=1e-9)
    for g in np.unique(group):
        assert abs(got.advantage_B[group == g].sum()) < 1e-5
