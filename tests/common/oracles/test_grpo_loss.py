"""The float64 policy loss: by hand and by finite differences."""

import numpy as np
import pytest

from common import oracles

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_policy_loss_by_hand():
    rho = np.array([[1.0, 1.5, 1.5, 0.5, 0.5, 7.0]])
    A = np.array([[2.0, 1.0, -1.0, 1.0, -1.0, 9.0]])
    weight = np.array([[1.0, 2.0, 1.0, 0.5, 1.0, 1.0]])
    mask = np.array([[True] * 5 + [False]])
    # t 0: 1 * 2 = 2;                      t 1: min(1.5, 1.28) = 1.28, times 2 = 2.56 (clipped)
    # t 2: min(-1.5, -1.28) = -1.5;        t 3: min(.5, .8) = .5, times .5 = .25
    # t 4: min(-.5, -.8) = -.8 (clipped);  sum 2 + 2.56 - 1.5 + .25 - .8 = 2.51
    got = oracles.policy_loss(np.log(rho), np.zeros((1, 6)), A, weight, mask, **CLIP)
    assert got.loss_sum == pytest.approx(-2.51)
    assert (got.num_tokens, got.num_clipped_low, got.num_clipped_high) == (5, 1, 1)
    assert got.clip_fraction == pytest.approx(0.4) and got.kl_sum == 0


def test_policy_loss_k3_by_hand():
    # ref - logp = log 2: k3 = 2 - log 2 - 1 = 0.306853; kl_coef .1, not weighted: -3 + .0306853
    logp, ref = np.array([[-1.0]]), np.array([[-1.0 + np.log(2)]])
    one = np.ones((1, 1))
    got = oracles.policy_loss(logp, logp, one, 3 * one, one, kl_coef=0.1, logp_ref_BT=ref, **CLIP)
    assert got.loss_sum == pytest.approx(-3 + 0.1 * (1 - np.log(2)))
    assert got.kl_sum == pytest.approx(1 - np.log(2))
    with pytest.raises(ValueError, match="logp_ref_BT"):
        oracles.policy_loss(logp, logp, one, one, one, kl_coef=0.1, **CLIP)
    with pytest.raises(ValueError, match="logp_ref_BT"):
        oracles.policy_loss_grad(logp, logp, one, one, one, kl_coef=0.1, **CLIP)


def test_on_policy_ratio_is_one_and_the_gradient_is_minus_weighted_advantage():
    rng = np.random.default_rng(0)
    logp, A, weight = (
        -rng.exponential(size=(2, 5)),
        rng.normal(size=(2, 1)),
        rng.uniform(size=(2, 5)),
    )
    mask = rng.uniform(size=(2, 5)) < 0.7
    grad = oracles.policy_loss_grad(logp, logp, A, weight, mask, **CLIP)
    np.testing.assert_array_equal(grad, np.where(mask, -weight * A, 0))
    assert oracles.policy_loss(logp, logp, A, weight, mask, **CLIP).clip_fraction == 0


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_matches_finite_differences(kl_coef):
    rng = np.random.default_rng(3)
    logp, old, ref = (-rng.exponential(size=(4, 6)) for _ in range(3))
    A, weight = rng.normal(size=(4, 6)), rng.uniform(0, 2, size=(4, 6))
    mask = rng.uniform(size=(4, 6)) < 0.8
    options = {"kl_coef": kl_coef, "logp_ref_BT": ref, **CLIP}
    grad = oracles.policy_loss_grad(logp, old, A, weight, mask, **options)
    clipped = oracles.policy_loss(logp, old, A, weight, mask, **options)
    assert clipped.num_clipped_low > 0 and clipped.num_clipped_high > 0
    for b, t in np.ndindex(4, 6):
        step = np.zeros((4, 6))
        step[b, t] = 1e-6
        up = oracles.policy_loss(logp + step, old, A, weight, mask, **options).loss_sum
        down = oracles.policy_loss(logp - step, old, A, weight, mask, **options).loss_sum
        assert grad[b, t] == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_values_outside_the_mask_do_not_matter():
    rng = np.random.default_rng(4)
    x = -rng.exponential(size=(2, 4))
    mask = np.array([[True, False, True, False]] * 2)
    junk = np.where(mask, x, np.nan)
    clean = oracles.policy_loss(x, x - 0.1, x, -x, mask, kl_coef=0.1, logp_ref_BT=x - 0.2, **CLIP)
    dirty = oracles.policy_loss(
        junk, junk - 0.1, junk, -junk, mask, kl_coef=0.1, logp_ref_BT=junk - 0.2, **CLIP
    )
    assert clean == dirty


def test_dual_clip_by_hand():
    # A = -1, c = 3: rho 5 -> max(min(-5, -1.28), -3) = -3, no gradient; rho 2 -> -2, gradient 2;
    # rho 0.5 -> min(-.5, -.8) = -.8, clipped low; A = 1, rho 5: min(5, 1.28) = 1.28, clipped high
    logp, A = np.log([[5.0, 2.0, 0.5, 5.0]]), np.array([[-1.0, -1.0, -1.0, 1.0]])
    arrays = (logp, 0 * logp, A, 0 * A + 1, A != 0)
    got = oracles.policy_loss(*arrays, dual_clip=3.0, **CLIP)
    assert got.loss_sum == pytest.approx(3 + 2 + 0.8 - 1.28)
    assert (got.num_clipped_dual, got.num_clipped_low, got.num_clipped_high) == (1, 1, 1)
    assert got.clip_fraction == 0.75
    np.testing.assert_allclose(
        oracles.policy_loss_grad(*arrays, dual_clip=3.0, **CLIP), [[0, 2, 0, 0]], rtol=1e-12
    )
    assert oracles.policy_loss(*arrays, **CLIP).loss_sum == pytest.approx(5 + 2 + 0.8 - 1.28)


def test_far_log_ratios_follow_the_tangent_of_exp_at_20():
    # A = -1, log-ratio 90: loss e^20 (1 + 70), gradient e^20; -90: e^-90 is under 0.8, clipped
    one = np.ones((1, 2))
    arrays = (np.array([[90.0, -90.0]]), 0 * one, -one, one, one > 0)
    top = np.exp(20.0)
    got = oracles.policy_loss(*arrays, **CLIP)
    assert got.loss_sum == pytest.approx(top * 71 + 0.8)
    np.testing.assert_allclose(oracles.policy_loss_grad(*arrays, **CLIP), [[top, 0]])
    # k3, reference minus policy: -90 -> e^-90 + 90 - 1 = 89, gradient 1 - e^-90 = 1;
    # 90 -> e^20 (1 + 70) - 90 - 1, gradient 1 - e^20
    options = {"kl_coef": 1.0, "logp_ref_BT": 0 * one, **CLIP}
    still = (arrays[0], arrays[0], 0 * one, one, one > 0)
    assert oracles.policy_loss(*still, **options).loss_sum == pytest.approx(89 + top * 71 - 91)
    np.testing.assert_allclose(oracles.policy_loss_grad(*still, **options), [[1, 1 - top]])


def test_k3_of_a_small_difference_keeps_its_sign():
    # k3(d) = d^2 / 2 + d^3 / 6 + ...; 1e-6 -> 5e-13, where exp(d) - d - 1 is off by up to 1e-16
    for d in (1e-6, -1e-6, 1e-4, -1e-4):
        x = np.array([[d]])
        got = oracles.policy_loss(0 * x, 0 * x, x, x, x != 0, logp_ref_BT=x, **CLIP).kl_sum
        assert got == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)
