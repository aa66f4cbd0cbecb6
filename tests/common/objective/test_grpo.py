"""Advantages and the policy-loss oracle, by hand-worked numbers and finite differences."""

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


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_policy_loss_by_hand():
    rho = np.array([[1.0, 1.5, 1.5, 0.5, 0.5, 7.0]])
    A = np.array([[2.0, 1.0, -1.0, 1.0, -1.0, 9.0]])
    weight = np.array([[1.0, 2.0, 1.0, 0.5, 1.0, 1.0]])
    mask = np.array([[True] * 5 + [False]])
    # t 0: 1 * 2 = 2;                      t 1: min(1.5, 1.28) = 1.28, times 2 = 2.56 (clipped)
    # t 2: min(-1.5, -1.28) = -1.5;        t 3: min(.5, .8) = .5, times .5 = .25
    # t 4: min(-.5, -.8) = -.8 (clipped);  sum 2 + 2.56 - 1.5 + .25 - .8 = 2.51
    got = grpo.policy_loss(np.log(rho), np.zeros((1, 6)), A, weight, mask, **CLIP)
    assert got.loss_sum == pytest.approx(-2.51)
    assert (got.num_tokens, got.num_clipped_low, got.num_clipped_high) == (5, 1, 1)
    assert got.clip_fraction == pytest.approx(0.4) and got.kl_sum == 0


def test_policy_loss_k3_by_hand():
    # ref - logp = log 2: k3 = 2 - log 2 - 1 = 0.306853; kl_coef .1, not weighted: -3 + .0306853
    logp, ref = np.array([[-1.0]]), np.array([[-1.0 + np.log(2)]])
    one = np.ones((1, 1))
    got = grpo.policy_loss(logp, logp, one, 3 * one, one, kl_coef=0.1, logp_ref_BT=ref, **CLIP)
    assert got.loss_sum == pytest.approx(-3 + 0.1 * (1 - np.log(2)))
    assert got.kl_sum == pytest.approx(1 - np.log(2))
    with pytest.raises(ValueError, match="logp_ref_BT"):
        grpo.policy_loss(logp, logp, one, one, one, kl_coef=0.1, **CLIP)
    with pytest.raises(ValueError, match="logp_ref_BT"):
        grpo.policy_loss_grad(logp, logp, one, one, one, kl_coef=0.1, **CLIP)


def test_on_policy_ratio_is_one_and_the_gradient_is_minus_weighted_advantage():
    rng = np.random.default_rng(0)
    logp, A, weight = (
        -rng.exponential(size=(2, 5)),
        rng.normal(size=(2, 1)),
        rng.uniform(size=(2, 5)),
    )
    mask = rng.uniform(size=(2, 5)) < 0.7
    grad = grpo.policy_loss_grad(logp, logp, A, weight, mask, **CLIP)
    np.testing.assert_array_equal(grad, np.where(mask, -weight * A, 0))
    assert grpo.policy_loss(logp, logp, A, weight, mask, **CLIP).clip_fraction == 0


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_matches_finite_differences(kl_coef):
    rng = np.random.default_rng(3)
    logp, old, ref = (-rng.exponential(size=(4, 6)) for _ in range(3))
    A, weight = rng.normal(size=(4, 6)), rng.uniform(0, 2, size=(4, 6))
    mask = rng.uniform(size=(4, 6)) < 0.8
    options = {"kl_coef": kl_coef, "logp_ref_BT": ref, **CLIP}
    grad = grpo.policy_loss_grad(logp, old, A, weight, mask, **options)
    clipped = grpo.policy_loss(logp, old, A, weight, mask, **options)
    assert clipped.num_clipped_low > 0 and clipped.num_clipped_high > 0
    for b, t in np.ndindex(4, 6):
        step = np.zeros((4, 6))
        step[b, t] = 1e-6
        up = grpo.policy_loss(logp + step, old, A, weight, mask, **options).loss_sum
        down = grpo.policy_loss(logp - step, old, A, weight, mask, **options).loss_sum
        assert grad[b, t] == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_values_outside_the_mask_do_not_matter():
    rng = np.random.default_rng(4)
    x = -rng.exponential(size=(2, 4))
    mask = np.array([[True, False, True, False]] * 2)
    junk = np.where(mask, x, NAN)
    clean = grpo.policy_loss(x, x - 0.1, x, -x, mask, kl_coef=0.1, logp_ref_BT=x - 0.2, **CLIP)
    dirty = grpo.policy_loss(
        junk, junk - 0.1, junk, -junk, mask, kl_coef=0.1, logp_ref_BT=junk - 0.2, **CLIP
    )
    assert clean == dirty


def test_dual_clip_by_hand():
    # A = -1, c = 3: rho 5 -> max(min(-5, -1.28), -3) = -3, no gradient; rho 2 -> -2, gradient 2;
    # rho 0.5 -> min(-.5, -.8) = -.8, clipped low; A = 1, rho 5: min(5, 1.28) = 1.28, clipped high
    logp, A = np.log([[5.0, 2.0, 0.5, 5.0]]), np.array([[-1.0, -1.0, -1.0, 1.0]])
    arrays = (logp, 0 * logp, A, 0 * A + 1, A != 0)
    got = grpo.policy_loss(*arrays, dual_clip=3.0, **CLIP)
    assert got.loss_sum == pytest.approx(3 + 2 + 0.8 - 1.28)
    assert (got.num_clipped_dual, got.num_clipped_low, got.num_clipped_high) == (1, 1, 1)
    assert got.clip_fraction == 0.75
    np.testing.assert_allclose(
        grpo.policy_loss_grad(*arrays, dual_clip=3.0, **CLIP), [[0, 2, 0, 0]], rtol=1e-12
    )
    assert grpo.policy_loss(*arrays, **CLIP).loss_sum == pytest.approx(5 + 2 + 0.8 - 1.28)


def test_far_log_ratios_follow_the_tangent_of_exp_at_20():
    # A = -1, log-ratio 90: loss e^20 (1 + 70), gradient e^20; -90: e^-90 is under 0.8, clipped
    one = np.ones((1, 2))
    arrays = (np.array([[90.0, -90.0]]), 0 * one, -one, one, one > 0)
    top = np.exp(20.0)
    got = grpo.policy_loss(*arrays, **CLIP)
    assert got.loss_sum == pytest.approx(top * 71 + 0.8)
    np.testing.assert_allclose(grpo.policy_loss_grad(*arrays, **CLIP), [[top, 0]])
    # k3, reference minus policy: -90 -> e^-90 + 90 - 1 = 89, gradient 1 - e^-90 = 1;
    # 90 -> e^20 (1 + 70) - 90 - 1, gradient 1 - e^20
    options = {"kl_coef": 1.0, "logp_ref_BT": 0 * one, **CLIP}
    still = (arrays[0], arrays[0], 0 * one, one, one > 0)
    assert grpo.policy_loss(*still, **options).loss_sum == pytest.approx(89 + top * 71 - 91)
    np.testing.assert_allclose(grpo.policy_loss_grad(*still, **options), [[1, 1 - top]])


def test_k3_of_a_small_difference_keeps_its_sign():
    # k3(d) = d^2 / 2 + d^3 / 6 + ...; 1e-6 -> 5e-13, where exp(d) - d - 1 is off by up to 1e-16
    for d in (1e-6, -1e-6, 1e-4, -1e-4):
        x = np.array([[d]])
        got = grpo.policy_loss(0 * x, 0 * x, x, x, x != 0, logp_ref_BT=x, **CLIP).kl_sum
        assert got == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)
