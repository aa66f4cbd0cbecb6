"""Intervals of a lower percentile: a case by hand, and what they cover in simulation."""

import math

import numpy as np
import pytest
from scipy import special, stats

from common.tail_interval import quantile_interval, share_interval

SAMPLES, TOKENS = 4, 64


def units_of(rng, num_prompts, correlation, share=0.2, samples=SAMPLES, tokens=TOKENS):
    """Uniform values, a row of `samples * tokens` for each prompt, by a Gaussian copula.

    share: of the variance that tokens of a response have in common; of that, samples of a prompt
    have `correlation` in common. Intervals of ranks do not see how values are distributed.
    """
    prompt = rng.normal(size=(num_prompts, 1, 1))
    sample = rng.normal(size=(num_prompts, samples, 1))
    token = rng.normal(size=(num_prompts, samples, tokens))
    common = math.sqrt(correlation) * prompt + math.sqrt(1 - correlation) * sample
    values = special.ndtr(math.sqrt(share) * common + math.sqrt(1 - share) * token)
    return np.sort(values.reshape(num_prompts, -1), axis=1)


def coverage(q, num_prompts, correlation, repetitions, **how):
    """Share of intervals that hold the true quantile, which is q itself.

    Whether it does is told by the interval of the share under q: the one is the other turned
    around (test_the_quantile_is_the_share_turned_around).
    """
    rng = np.random.default_rng([num_prompts, int(10 * correlation)])
    inside = 0
    for _ in range(repetitions):
        units = units_of(rng, num_prompts, correlation, **how)
        size = np.full(num_prompts, float(units.shape[1]))
        low, high = share_interval(size, np.float64((units <= q).sum(1)))
        inside += low <= q <= high
    return inside / repetitions


CASES = [(m, r) for m in (8, 16, 64) for r in (0.0, 0.5, 0.9)]


@pytest.mark.parametrize(("num_prompts", "correlation"), CASES)
def test_p5_covers_what_it_says(num_prompts, correlation):
    """0.93 to 0.951 in 4000 repetitions (the slow test); 300 have a standard error of 0.013."""
    assert 0.90 <= coverage(0.05, num_prompts, correlation, 300) <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("num_prompts", "correlation"), CASES)
@pytest.mark.parametrize("q", [0.05, 0.01])
def test_coverage_in_full(q, num_prompts, correlation):
    found = coverage(q, num_prompts, correlation, 4000)
    print(f"q {q:g}, {num_prompts} prompts, correlation {correlation:g}: {found:.4f}")
    assert 0.925 <= found <= 0.97 if q == 0.05 else 0.92 <= found <= 0.985


@pytest.mark.parametrize("num_prompts", [8, 16])
def test_tokens_that_depend_on_each_other_more(num_prompts):
    """Half of the variance is the response's, and nearly all of that the prompt's: hardly more
    than one observation a prompt, so that a tail of 5 % is seldom seen in 8 of them."""
    assert 0.86 <= coverage(0.05, num_prompts, 0.9, 300, share=0.5) <= 0.98


def test_share_by_hand():
    # 4 units of 100, under: 2 4 6 8. Without one: logit((20 - x + .5) / (280 + x + .5)), m = 4
    size, under = np.full(4, 100.0), np.array([2.0, 4, 6, 8])
    d = np.log((20 - under + 0.5) / (280 + under + 0.5))
    np.testing.assert_allclose(d, [-2.725908, -2.847373, -2.983590, -3.138966], atol=1e-6)
    square = (d - d.mean()) ** 2  # .03922 .00587 .00356 .04623: sum .0949
    v = 0.75 * square.sum()  # .0712, over 1 / (400 p (1 - p)) = .0516
    df = 2 * square.sum() ** 2 / ((square**2).sum() - square.sum() ** 2 / 4)  # 12.2, over m - 1 = 3
    assert v > 1 / (400 * 0.0511 * 0.9489) and df > 3
    middle, half = math.log(20.5 / 380.5), stats.t.ppf(0.975, 3) * math.sqrt(v)
    low, high = share_interval(size, under)
    assert low == pytest.approx(special.expit(middle - half), rel=0.02)
    assert high == pytest.approx(special.expit(middle + half), rel=0.02)


def test_the_quantile_is_the_share_turned_around():
    """theta is inside if the share under it may be q."""
    rng = np.random.default_rng(0)
    for q in (0.05, 0.01, 0.5):
        units = units_of(rng, 8, 0.5, tokens=16)
        low, high = quantile_interval(units, q)
        size = np.full(8, float(units.shape[1]))

        def shares(theta, units=units, size=size):
            return share_interval(size, np.float64((units <= theta).sum(1)))

        tiny = 1e-9
        assert low == 0 or (shares(low)[1] >= q > shares(low - tiny)[1])
        assert high == 1 or (shares(high - tiny)[0] <= q < shares(high)[0])
        estimate = np.sort(units, axis=None)[math.ceil(q * units.size) - 1]
        assert low <= estimate <= high


@pytest.mark.parametrize("num_units", [3, 8])
def test_ends(num_units):
    """All values alike: none of 3200 is lower. From three units (df = 2) not even that is sure."""
    units = [np.full(400, 0.9)] * num_units
    assert quantile_interval(units, 0.05) == (0.0 if num_units == 3 else 0.9, 0.9)
    assert quantile_interval(units[:2], 0.05) == (0.0, 1.0)
    few = [np.array([0.9])] * num_units  # 0 of 3 or 8 values are under 0.9: p5 may be lower
    assert quantile_interval(few, 0.05)[0] == 0.0


def test_units_of_very_different_sizes():
    big = np.linspace(0, 1, 5000)
    low, high = quantile_interval([big, big[:1], big[:1]], 0.05)
    assert 0 <= low <= 0.05 <= high <= 1 and math.isfinite(high)
