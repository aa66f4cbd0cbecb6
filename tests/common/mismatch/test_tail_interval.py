"""Intervals of a lower percentile: a case by hand, and what they cover in simulation."""

import math

import numpy as np
import pytest
from scipy import special, stats

from common.mismatch.tail_interval import Z, quantile_interval, share_interval
from common.mismatch.tail_share import student

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
    """Share of intervals that hold the true quantile, which is q itself; of those wholly under it.

    Whether it does is told by the interval of the share under q: the one is the other turned
    around (test_the_quantile_is_the_share_turned_around).
    """
    rng = np.random.default_rng([num_prompts, int(10 * correlation)])
    inside = under = 0
    for _ in range(repetitions):
        units = units_of(rng, num_prompts, correlation, **how)
        size = np.full(num_prompts, float(units.shape[1]))
        low, high = share_interval(size, np.float64((units <= q).sum(1)))
        inside += low <= q <= high
        under += low > q
    return inside / repetitions, under / repetitions


CASES = [(m, r) for m in (8, 16, 64) for r in (0.0, 0.5, 0.9)]


@pytest.mark.parametrize(("num_prompts", "correlation"), CASES)
def test_p5_covers_what_it_says(num_prompts, correlation):
    """0.938 to 0.953 in 4000 repetitions (the slow test); 300 have a standard error of 0.013."""
    assert 0.90 <= coverage(0.05, num_prompts, correlation, 300)[0] <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("num_prompts", "correlation"), CASES)
@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("q", [0.05, 0.01])
def test_coverage_in_full(q, share, num_prompts, correlation):
    """An interval wholly under the truth, which alarms, is as rare as it says (0.025) throughout.

    One wholly over it is more frequent where few prompts hold the tail: p1 at a share of 0.5.
    """
    found, under = coverage(q, num_prompts, correlation, 4000, share=share)
    print(f"q {q:g}, {share=:g}, {num_prompts} prompts, {correlation=:g}: {found:.4f} {under:.4f}")
    least = {(0.05, 0.2): 0.93, (0.05, 0.5): 0.93, (0.01, 0.2): 0.925, (0.01, 0.5): 0.885}
    assert least[q, share] <= found <= (0.97 if q == 0.05 else 0.98)
    assert under <= 0.03


@pytest.mark.slow
def test_the_quantile_itself_where_it_is_hardest():
    """0.941 for p5. p1 has 0.87: a tenth of the prompts holds 0.77 of its tail."""
    rng = np.random.default_rng(2)
    inside = {0.05: 0, 0.01: 0}
    for _ in range(1500):
        units = list(units_of(rng, 8, 0.9, share=0.5))
        for q in inside:
            low, high = quantile_interval(units, q)
            inside[q] += low <= q <= high
    print({q: count / 1500 for q, count in inside.items()})
    assert 0.925 <= inside[0.05] / 1500 <= 0.97 and 0.84 <= inside[0.01] / 1500


@pytest.mark.parametrize("num_prompts", [8, 16])
def test_tokens_that_depend_on_each_other_more(num_prompts):
    """Half of the variance is the response's, and nearly all of that the prompt's: hardly more
    than one observation a prompt. The slow test finds 0.940 and 0.945; 600 have an error of 0.01,
    and with the degrees of freedom that the kurtosis shows 8 prompts had 0.907."""
    assert 0.92 <= coverage(0.05, num_prompts, 0.9, 600, share=0.5)[0] <= 0.98


def test_share_by_hand():
    # 4 units of 100, under: 2 4 6 8. Without one: logit((20 - x + .5) / (280 + x + .5)), m = 4
    size, under = np.full(4, 100.0), np.array([2.0, 4, 6, 8])
    d = np.log((20 - under + 0.5) / (280 + under + 0.5))
    np.testing.assert_allclose(d, [-2.725908, -2.847373, -2.983590, -3.138966], atol=1e-6)
    square = (d - d.mean()) ** 2  # .03922 .00587 .00356 .04623: sum .0949
    v = 0.75 * square.sum()  # .0712
    v_0 = 1 / (400 * (20.5 / 401) * (380.5 / 401))  # .0515
    df = 1 / (1 / 3 + v - v_0)  # 1 / .3530 = 2.83
    middle, error = math.log(20.5 / 380.5), math.sqrt(v)
    low, high = share_interval(size, under)
    assert low == pytest.approx(special.expit(middle - stats.t.ppf(0.975, 3) * error), rel=0.02)
    assert high == pytest.approx(special.expit(middle + stats.t.ppf(0.975, df) * error), rel=0.02)


@pytest.mark.parametrize(
    ("under", "df"),
    # 8 units of 100, 24 under: v_0 = 1 / (800 * (24.5 / 801) * (776.5 / 801)) = .0422
    [
        ([3] * 8, 7.0),  # all d = 0: v = v_0, 1 / (1 / 7)
        # without a 0: logit(24.5 / 701) = -3.3183; without a 6: logit(18.5 / 701) = -3.6080;
        # d = -+ .1448, v = 7 / 8 * 8 * .1448^2 = .1469, 1 / (1 / 7 + .1469 - .0422)
        ([0, 0, 0, 0, 6, 6, 6, 6], 4.04),
        # without the 24: logit(.5 / 701) = -7.245; d = 3.436 and 7 times -.491: v = 11.8
        ([0] * 7 + [24], 2.0),
    ],
)
def test_degrees_of_freedom_fall_as_units_differ(under, df):
    """At the upper end of the share; the lower one has m - 1 = 7 always."""
    low, high = share_interval(np.full(8, 100.0), np.float64(under))
    middle = math.log(24.5 / 776.5)
    ratio = (special.logit(high) - middle) / (middle - special.logit(low))
    assert ratio == pytest.approx(student(Z, df) / student(Z, 7), rel=2e-3)


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
