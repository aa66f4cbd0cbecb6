"""Mismatch statistics: hand-worked bins, intervals that respect sequences, verdicts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.mismatch import acceptance

OPTIONS = {"bin_tokens": 4, "min_tokens": 1}


def one_bin(values, **more):
    values = (
        np.array(values, np.float64).reshape(1, -1) if np.ndim(values) < 2 else np.array(values)
    )
    options = {"bin_tokens": values.shape[1], "min_tokens": 1} | more
    return only(values, np.ones(values.shape, bool), **options)


def statistics(alpha, mask, **options):
    """Each row a prompt of its own."""
    return acceptance.statistics(alpha, mask, np.arange(len(alpha)), **options)


def only(alpha, mask, **options):
    """The only bin; a token 0, which no query made, stands before the others."""
    alpha, mask = (np.pad(x, ((0, 0), (1, 0))) for x in (alpha, mask))
    (stats,) = statistics(alpha, mask, **options)
    return stats


def test_quantiles_of_1_to_100_by_hand():
    # .01, ..., 1.00: p1 = sorted[ceil(1) - 1] = .01; p5 = sorted[4] = .05; p50 = sorted[49] = .50
    got = one_bin(np.random.default_rng(0).permutation(np.arange(1, 101) / 100))
    assert (got.p1, got.p5, got.p50) == (0.01, 0.05, 0.5)
    assert got.mean == pytest.approx(0.505) and got.count == 100 and got.num_units == 1
    assert got.share_above_0_999 == 0.01
    # ten values: p1, p5 -> ceil(.1) - 1 = 0, ceil(.5) - 1 = 0; p50 -> sorted[4]
    got = one_bin(np.arange(10) / 10)
    assert (got.p1, got.p5, got.p50) == (0.0, 0.0, 0.4)
    # 60 values, .05 * 60 = 3: sorted[2]
    assert one_bin(np.arange(60) / 60).p5 == 2 / 60


def test_a_token_is_of_the_bin_of_the_query_that_made_it():
    """Budgets change at 64 = bin_tokens; the query at 63 made token 64, under the first budget."""
    alpha = np.ones((1, 129))
    alpha[0, 64] = 0.1
    mask = np.arange(129)[None] > 0
    first, second = statistics(alpha, mask, bin_tokens=64, min_tokens=1)
    # 64 tokens each, 1 ... 64 and 65 ... 128: p1 = sorted[ceil(.64) - 1] = the lowest
    assert (first.count, first.p1, first.p5) == (64, 0.1, 1.0)
    assert (second.count, second.p1) == (64, 1.0)


def test_bins_by_hand():
    alpha = np.array([[9, 9, 9, 0.9, 0.8, 0.7, 9], [9, 9, 0.5, 0.6, 0.4, 1.0, 0.3]])  # 9 = no token
    mask = alpha < 9
    first, second = statistics(alpha, mask, **OPTIONS | {"min_tokens": 4})
    # bin 0 (t <= 4): .9 .8 .5 .6 .4, sorted .4 .5 .6 .8 .9; bin 1: .7 1 .3
    assert (first.bin, first.start, first.end, first.count) == (0, 0, 4, 5)
    assert first.mean == pytest.approx(0.64) and first.p50 == 0.6 and first.p5 == 0.4
    assert (second.bin, second.start, second.count, second.p50) == (1, 4, 3, 0.7)
    assert first.enough and not second.enough
    assert first.num_units == second.num_units == 2


def test_bins_without_tokens_are_left_out():
    mask = np.zeros((1, 20), bool)
    mask[0, 17] = True  # of the query at 16 = 4 * 4
    assert [s.bin for s in statistics(np.ones((1, 20)), mask, **OPTIONS)] == [4]
    assert statistics(np.ones((1, 20)), np.zeros((1, 20), bool), **OPTIONS) == []


@pytest.mark.parametrize("bad", [-1e-5, 1 + 1e-5, np.nan])
def test_alpha_outside_0_1_is_refused_in_the_mask_only(bad):
    alpha, mask = np.ones((2, 3)), np.ones((2, 3), bool)
    alpha[1, 2] = bad
    with pytest.raises(ValueError, match=r"alpha_BT\[1, 2\]"):
        statistics(alpha, mask, **OPTIONS)
    mask[1, 2] = False
    assert statistics(alpha, mask, **OPTIONS)[0].mean == 1


def test_rounding_beyond_0_1_is_clipped():
    got = one_bin([1 + 5e-7, -5e-7])
    assert got.mean == 0.5 and got.p5 == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 30))
def test_order_of_rows_is_irrelevant_and_quantiles_rise(seed, num_rows, width):
    rng = np.random.default_rng(seed)
    alpha = np.round(rng.beta(5, 0.5, (num_rows, width)), 2)
    mask = rng.uniform(size=alpha.shape) < 0.8
    group, how = rng.integers(0, 4, num_rows), {"bin_tokens": 7, "min_tokens": 3}
    got = acceptance.statistics(alpha, mask, group, **how)
    order = rng.permutation(num_rows)
    moved = acceptance.statistics(alpha[order], mask[order], group[order], **how)
    assert got == moved
    assert sum(s.count for s in got) == mask.sum()
    for s in got:
        assert 0 <= s.p1 <= s.p5 <= s.p50 <= 1 and 0 <= s.mean <= 1
        assert 0 <= s.p1_low <= s.p1_high <= 1 and 0 <= s.p5_low <= s.p5_high <= 1
        assert s.enough == (s.count >= 3)


def test_interval_comes_from_prompts_not_from_samples_or_tokens():
    # two kinds of sequences, constant inside: 8 tokens of one are one observation, not 8
    rng = np.random.default_rng(0)
    per_sequence = np.repeat(rng.uniform(0.3, 1, (20, 1)), 50, axis=1)
    shuffled = rng.permutation(per_sequence.ravel()).reshape(20, 50)
    dependent, independent = one_bin(per_sequence), one_bin(shuffled)
    assert dependent.p5 == independent.p5
    assert dependent.p5_low <= dependent.p5 <= dependent.p5_high
    assert dependent.p5_high - dependent.p5_low > 2 * (independent.p5_high - independent.p5_low)
    # every row four times over, as four samples of one prompt: nothing new is known
    four, mask = np.repeat(shuffled, 4, axis=0), np.ones((80, 50), bool)
    (got,) = acceptance.statistics(four, mask, np.arange(80) // 4, bin_tokens=50, min_tokens=1)
    assert got.num_units == 20
    (same,) = statistics(shuffled, mask[:20], bin_tokens=50, min_tokens=1)
    assert got.p5_high - got.p5_low > 0.9 * (same.p5_high - same.p5_low)
    with pytest.raises(ValueError, match="the prompt of each of 80 rows"):
        acceptance.statistics(four, mask, np.arange(20), **OPTIONS)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_one_prompt_or_two_have_no_interval(num_rows):
    got = one_bin(np.tile(np.linspace(0.5, 1, 30), (num_rows, 1)))
    assert (got.p5_low, got.p5_high, got.p1_low, got.p1_high) == (0, 1, 0, 1)


def stats_of(**by_bin):
    base = one_bin(np.full((2, 50), 0.9))
    return [
        dataclasses.replace(
            base, bin=int(name[1:]), p1=p1, p5=p5, enough=enough, p5_high=p5 + 0.05, p1_high=1.0
        )
        for name, (p1, p5, enough) in by_bin.items()
    ]


def test_verdict_needs_every_judged_bin():
    stats = stats_of(b0=(0.5, 0.95, True), b1=(0.4, 0.86, True), b3=(0.0, 0.1, False))
    assert acceptance.tail(stats, 0.05) == {0: 0.95, 1: 0.86}
    assert acceptance.tail(stats, 0.01) == {0: 0.5, 1: 0.4}
    good = acceptance.verdict(stats, 0.86, 0.05)
    assert good.meets is True and good.failing == () and good.unjudged == (3,)
    assert (good.worst_bin, good.worst) == (1, 0.86)
    bad = acceptance.verdict(stats, 0.861, 0.05)
    assert bad.meets is False and bad.failing == (1,)
    assert acceptance.verdict(stats, 0.86, 0.01).failing == (0, 1)
    # beyond doubt: the upper end of the interval is under tau as well, in a judged bin
    assert good.certain == bad.certain == acceptance.verdict(stats, 0.91, 0.05).certain == ()
    assert acceptance.verdict(stats, 0.92, 0.05).certain == (1,)
    assert acceptance.verdict(stats, 0.92, 0.01).certain == ()
    none = acceptance.verdict(stats[2:], 0.86, 0.05)
    assert none.meets is None and none.worst is None and none.unjudged == (3,)
    with pytest.raises(ValueError, match="quantile"):
        acceptance.tail(stats, 0.1)


def in_blocks(values, block, **more):
    values = np.atleast_2d(values)
    options = {"bin_tokens": values.shape[1], "min_tokens": 1} | more
    mask = np.ones(values.shape, bool)
    return only(values, mask, block_tokens=block, **options)


def points(stats):
    interval = dict.fromkeys(("num_units", "p5_low", "p5_high", "p1_low", "p1_high"), 0)
    return dataclasses.replace(stats, **interval)


def test_blocks_change_intervals_only():
    alpha = np.random.default_rng(0).beta(8, 1, (3, 200))
    mask = np.random.default_rng(1).random(alpha.shape) < 0.9
    mask[:, 0] = False
    how = {"bin_tokens": 64, "min_tokens": 10}
    whole = statistics(alpha, mask, **how)
    blocks = statistics(alpha, mask, block_tokens=16, **how)
    assert [points(s) for s in whole] == [points(s) for s in blocks]
    assert [s.num_units for s in whole] == [3] * 4
    assert [s.num_units for s in blocks] == [12, 12, 12, 3]  # 64 / 16 of each row; 7 tokens
    assert whole == statistics(alpha, mask, block_tokens=200, **how)


def test_block_without_tokens_is_not_drawn():
    mask = np.ones((1, 64), bool)
    mask[0, 16:32] = False
    got = only(np.ones((1, 64)), mask, bin_tokens=64, min_tokens=1, block_tokens=16)
    assert got.num_units == 3


def test_interval_over_blocks_covers_the_true_percentile():
    rng = np.random.default_rng(1)
    truth = np.quantile(rng.beta(8, 1, 200_000), 0.05)
    hits = 0
    for _ in range(40):
        s = in_blocks(rng.beta(8, 1, 1200), 40)
        assert s.num_units == 30
        hits += s.p5_low <= truth <= s.p5_high
    assert 34 <= hits  # 95 % of 40 = 38


def test_blocks_see_that_neighbours_depend_on_each_other():
    # stretches of 16 equal tokens: 100 observations, not 1600
    rng = np.random.default_rng(0)
    alpha = np.repeat(rng.uniform(0.3, 1, 100), 16)
    blocks, tokens = in_blocks(alpha, 32), in_blocks(alpha, 1)
    assert points(blocks) == points(tokens)
    assert blocks.p5_high - blocks.p5_low > 1.5 * (tokens.p5_high - tokens.p5_low)


def test_one_block_has_no_interval():
    got = in_blocks(np.linspace(0.5, 1, 30), 30)
    assert (got.p5_low, got.p5_high, got.p1_low, got.p1_high) == (0, 1, 0, 1)
    got = in_blocks(np.linspace(0.5, 1, 300), 5)  # 60 of them
    assert 0.5 <= got.p5_low <= got.p5 < got.p5_high < 1


def test_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block_tokens=0"):
        in_blocks(np.ones(4), 0)
