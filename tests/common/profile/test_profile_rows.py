"""Shape of the tail: Pearson, the Beta fit and its KS statistic, on samples of known shape."""

import json

import numpy as np
import pytest
from scipy import stats

from common.mismatch import acceptance
from common.profile.profile_rows import EDGES, SAME, fit_beta, pearson, shape_of_tail


def described(alpha, mask=None, bin_tokens=50):
    alpha = np.atleast_2d(np.asarray(alpha, np.float64))
    mask = np.ones(alpha.shape, bool) if mask is None else mask
    rows = acceptance.statistics(
        alpha, mask, np.arange(len(alpha)), bin_tokens=bin_tokens, min_tokens=20
    )  # fmt: skip
    return shape_of_tail(alpha, mask, rows)


def test_pearson_by_hand():
    # deviations (-1, 0, 1) and (-1, 2, -1): products 1 + 0 - 1 = 0; with (-2, 1, 1): 3 / sqrt(12)
    assert pearson([1, 2, 3], [0, 3, 0]) == pytest.approx(0)
    assert pearson([1, 2, 3], [0, 3, 3]) == pytest.approx(3 / 12**0.5)
    assert pearson([1, 2, 3], [-1, -2, -3]) == pytest.approx(-1)


@pytest.mark.parametrize("pair", [([], []), ([1, 2], [3, 4]), ([1, 1, 1], [1, 2, 3]),
                                  ([1, 2, 3], [5, 5, 5])])  # fmt: skip
def test_pearson_of_too_little_is_none(pair):
    assert pearson(*pair) is None


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2.0, 5.0), (6.0, 0.7), (0.8, 3.0)])
def test_beta_fit_finds_the_parameters_of_its_sample(a, b):
    x = np.random.default_rng(0).beta(a, b, 20_000)
    got_a, got_b, ks = fit_beta(x)
    assert got_a == pytest.approx(a, rel=0.05) and got_b == pytest.approx(b, rel=0.05)
    assert ks < 0.02  # of 20,000 draws: 1.36 / sqrt(20000) = 0.0096 at 5 %


def test_beta_fit_is_that_of_scipy():
    x = np.random.default_rng(1).beta(3, 1.5, 500)
    want_a, want_b, _, _ = stats.beta.fit(x, floc=0, fscale=1)
    a, b, ks = fit_beta(x)
    np.testing.assert_allclose((a, b), (want_a, want_b), rtol=1e-4)
    assert ks == pytest.approx(stats.kstest(x, stats.beta(want_a, want_b).cdf).statistic, abs=1e-5)


def test_two_humps_are_no_beta_distribution():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(0.2, 0.02, 500), rng.normal(0.8, 0.02, 500)])
    assert fit_beta(x)[2] > 0.2


@pytest.mark.parametrize(
    "x",
    [
        np.r_[np.full(4000, 0.9999), 0.0],  # scipy's own fit answers a < 0 and KS = NaN
        np.r_[np.full(30, 0.5), 0.5000001],
        np.r_[np.zeros(30), np.ones(30)],
        1 - 10.0 ** -np.linspace(0.1, 9, 40),
    ],
)
def test_beta_fit_answers_for_odd_samples(x):
    a, b, ks = fit_beta(x)
    assert a > 0 and b > 0 and 0 < ks <= 1


def test_beta_fit_never_fails_on_mixtures():
    rng = np.random.default_rng(3)
    for _ in range(60):
        low, high = 10.0 ** -rng.uniform(0, 8), 1 - 10.0 ** -rng.uniform(0, 8)
        x = rng.choice([low, high, rng.random()], 200)
        assert np.isfinite(fit_beta(x)).all()


def test_constant_sample_has_no_fit():
    assert fit_beta(np.full(40, 0.3)) == (None, None, None)


def test_description_of_known_tokens():
    rng = np.random.default_rng(4)
    alpha = np.ones((4, 500))
    tail = rng.random(alpha.shape) < 0.3
    alpha[tail] = SAME * rng.beta(4, 1, tail.sum())
    got = described(alpha)
    assert got["count"] == 2000 and got["share_below"] == tail.mean()
    assert got["edges"] == EDGES.tolist() and sum(got["counts"]) == 2000
    assert got["counts"][-1] == (~tail).sum()
    assert (got["beta_a"], got["beta_b"], got["ks"]) == fit_beta(alpha[tail] / SAME)
    assert got["beta_a"] == pytest.approx(4, rel=0.2) and got["ks"] < 0.06
    assert got["variance"] == pytest.approx(SAME**2 * 4 / (25 * 6), rel=0.15)  # ab/(a+b)^2(a+b+1)
    assert abs(got["pearson_alpha"]) < 0.1
    json.dumps(got, allow_nan=False)


def test_only_the_mask_is_described():
    alpha = np.full((2, 201), 0.2)
    alpha[0] = np.linspace(1, 0.5, 201)
    mask = np.zeros(alpha.shape, bool)
    mask[0, 1:] = True
    got = described(alpha, mask)
    assert got["count"] == 200 and got["pearson_alpha"] == pytest.approx(-1)
    assert got["pearson_p5"] == pytest.approx(-1)


def test_a_tail_that_falls_with_length_is_seen_in_the_bins():
    rng = np.random.default_rng(5)
    t = np.arange(1000)
    rare = rng.random((20, 1000)) < 0.1
    alpha = np.where(rare, 0.9 - 0.0005 * t, 1.0)
    got = described(alpha, bin_tokens=100)
    assert got["pearson_p5"] < -0.95 < got["pearson_alpha"] < 0  # tokens hide what bins show


@pytest.mark.parametrize("alpha", [np.ones((1, 60)), np.full((2, 40), 0.5)])
def test_without_variation_there_is_none(alpha):
    got = described(alpha)
    for name in ("pearson_alpha", "pearson_p5", "beta_a", "beta_b", "ks"):
        assert got[name] is None
    assert sum(got["counts"]) == alpha.size


def test_no_tokens_at_all():
    got = described(np.ones((1, 5)), np.zeros((1, 5), bool))
    assert got["count"] == got["share_below"] == sum(got["counts"]) == 0
    json.dumps(got, allow_nan=False)
