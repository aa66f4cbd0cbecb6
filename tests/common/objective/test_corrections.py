"""Importance corrections: one hand-worked example each, extremes, statistics, bins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import CORRECTIONS
from common.objective import corrections
from common.rollout import noise


def correct(name, ratios, mask=None, *, cap=2.0, low=0.5, **more):
    log_ratio = np.log(np.array(ratios, np.float64))
    mask = np.ones(log_ratio.shape, bool) if mask is None else np.array(mask, bool)
    return corrections.correct(name, log_ratio, mask, cap=cap, low=low, **more)


def weights(*args, **more):
    got = correct(*args, **more)
    assert got.weight_BT.dtype == np.float32
    return got.weight_BT.tolist()


def test_registry_and_configuration_name_the_same_corrections():
    assert tuple(corrections.CORRECTIONS) == CORRECTIONS


def test_none_and_token_tis():
    assert weights("none", [[0.5, 9.0]]) == [[1, 1]]
    got = correct("token_tis", [[0.25, 1.0, 2.0, 8.0]])
    np.testing.assert_allclose(got.weight_BT, [[0.25, 1, 2, 2]], rtol=1e-6)
    assert got.stats["correction/clipped_fraction"] == 0.25
    assert correct("none", [[0.5, 9.0]]).stats["correction/clipped_fraction"] == 0


def test_sequence_tis():
    # row 0: .5 * 3 * 1 = 1.5;  row 1: 2 * 2 = 4 -> cap 2, the third token is not in the response
    got = correct("sequence_tis", [[0.5, 3, 1], [2, 2, 9]], [[1, 1, 1], [1, 1, 0]])
    np.testing.assert_allclose(got.weight_BT, [[1.5] * 3, [2, 2, 0]], rtol=1e-6)
    assert got.stats["correction/clipped_fraction"] == pytest.approx(2 / 5)


def test_icepop_keeps_the_ratio_inside_both_bounds_and_drops_the_rest():
    got = correct("icepop", [[0.49, 0.5, 1.9, 2.1]])
    np.testing.assert_allclose(got.weight_BT, [[0, 0.5, 1.9, 0]], rtol=1e-6)
    assert got.stats["correction/masked_fraction"] == 0.5


def test_geometric_rejection_judges_whole_rows():
    # row 0: sqrt(4 * 1) = 2, kept;  row 1: sqrt(4 * 1.1) = 2.098, dropped
    # row 2: sqrt(.25 * .5) = .354, dropped;  row 3: its second token is no response: 1, kept
    # row 4: the mean is over one token: 3, dropped (over two it would be sqrt(3) = 1.73)
    ratios = [[4, 1], [4, 1.1], [0.25, 0.5], [1, 100], [3, 1]]
    got = weights("geometric_rejection", ratios, [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]])
    assert got == [[1, 1], [0, 0], [0, 0], [1, 0], [0, 0]]


def test_m2po_drops_the_largest_squares_until_the_mean_fits():
    # log ratios .1 -.2 .3 -.6; squares .01 .04 .09 .36; running means of the sorted ones:
    # .01, .025, .046667, .125. Threshold .04 (cap e^.2): two kept. Threshold .05: three.
    ratios = np.exp([[0.1, -0.2, 0.3, -0.6]])
    got = weights("m2po", ratios, cap=np.exp(0.2), low=0.1)
    np.testing.assert_allclose(got, [[np.exp(0.1), np.exp(-0.2), 0, 0]], rtol=1e-6)
    got = weights("m2po", ratios, cap=np.exp(np.sqrt(0.05)), low=0.1)
    np.testing.assert_allclose(
        got, [[np.exp(0.1), np.exp(-0.2), np.exp(np.sqrt(0.05)), 0]], rtol=1e-6
    )
    assert weights("m2po", [[1.0, 1.0]], cap=1.1) == [[1, 1]]


def test_m2po_treats_equals_alike_and_refuses_a_meaningless_cap():
    # squares 0 0 1 1 (log ratios 1 and -1): threshold .4 holds 0, 0, 1 (mean 1/3) but not both ones
    got = weights("m2po", np.exp([[1.0, 0, -1.0, 0]]), cap=np.exp(np.sqrt(0.4)), low=0.1)
    assert got == [[0, 1, 0, 1]]
    with pytest.raises(ValueError, match="m2po"):
        correct("m2po", [[1.0]], cap=1.0)


def test_jackpot_by_hand():
    # lambda = low = .5. Acceptance min(1, r / .5): .5, .5, 1, 1. Weights max(r, .5), cut at 2.
    uniform = np.array([[0.49, 0.51, 0.99, 0.01]])
    got = correct("jackpot", [[0.25, 0.25, 1.5, 9]], uniform_BT=uniform)
    np.testing.assert_allclose(got.weight_BT, [[0.5, 0, 1.5, 2]], rtol=1e-6)
    assert got.stats["correction/clipped_fraction"] == 0.25
    with pytest.raises(ValueError, match="uniform_BT"):
        correct("jackpot", [[1.0]])


def test_jackpot_is_unbiased_where_the_cap_does_not_bind():
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.3, 0.1, 0.3])
    rng = np.random.default_rng(0)
    ids = rng.choice(4, size=(1, 200_000), p=q)
    uniform = noise.position_uniform(1, np.array([0]), np.array([0]), 200_000)
    got = correct("jackpot", (p / q)[ids], uniform_BT=uniform, cap=10, low=0.8)
    assert 0.1 < got.stats["correction/masked_fraction"] < 0.4
    for v in range(4):  # E_q[weight 1{v}] = p(v)
        assert (got.weight_BT * (ids == v)).mean() == pytest.approx(p[v], abs=0.006)


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_extreme_ratios_and_empty_rows_give_finite_numbers(name):
    log_ratio = np.array(
        [[80.0, 80, 80, 80], [-80, -80, -80, -80], [80, -80, 0, 1000], [9, 9, 9, 9]]
    )
    mask = np.ones((4, 4), bool)
    mask[3] = False
    for lr in (log_ratio, -log_ratio):
        got = corrections.correct(
            name,
            lr,
            mask,
            cap=2.0,
            low=0.5,
            uniform_BT=np.full((4, 4), 0.5),
            logp_sparse_BT=lr * 0 - 90,
        )
        assert np.isfinite(got.weight_BT).all() and (got.weight_BT >= 0).all()
        assert got.weight_BT.max() <= 2 and not got.weight_BT[3].any()
        assert all(np.isfinite(v) for v in got.stats.values())
    nothing = corrections.correct(
        name, log_ratio, np.zeros((4, 4), bool), cap=2.0, low=0.5, uniform_BT=np.full((4, 4), 0.5)
    )
    assert not nothing.weight_BT.any() and not any(nothing.stats.values())


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_equal_policies_need_no_correction(name):
    got = correct(name, np.ones((2, 5)), uniform_BT=np.full((2, 5), 0.999))
    assert (got.weight_BT == 1).all()
    assert got.stats["correction/ess"] == 1 and got.stats["correction/k3"] == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(corrections.CORRECTIONS)), st.integers(0, 2**32 - 1))
def test_row_order_and_values_outside_the_mask_do_not_matter(name, seed):
    rng = np.random.default_rng(seed)
    log_ratio = np.round(rng.normal(0, 0.7, (5, 6)), 1)  # rounded: ties occur
    mask = rng.uniform(size=(5, 6)) < 0.7
    uniform = rng.uniform(size=(5, 6))
    order = rng.permutation(5)
    got = corrections.correct(name, log_ratio, mask, cap=2.0, low=0.5, uniform_BT=uniform)
    junk = np.where(mask, log_ratio, np.nan)
    moved = corrections.correct(
        name, junk[order], mask[order], cap=2.0, low=0.5, uniform_BT=uniform[order]
    )
    np.testing.assert_array_equal(moved.weight_BT, got.weight_BT[order])
    assert not got.weight_BT[~mask].any()
    assert moved.stats == pytest.approx(got.stats, rel=1e-9, abs=1e-12)
    assert 0 <= got.stats["correction/ess"] <= 1 + 1e-12


def test_statistics_by_hand():
    # r = 2, .5; log 2 = .693147. k1 = mean(-.693, .693) = 0
    # k3 = mean(2 - 1 - .693147, .5 - 1 + .693147) = mean(.306853, .193147) = .25
    # min(1, r): mean(1, .5) = .75;  token TIS cap 1.5: weights 1.5, .5
    # ess = (2)^2 / (2 * (2.25 + .25)) = 4 / 5 = .8
    # p_sparse .1, .4; p_dense .2, .2: gap mean(.1, .2) = .15
    got = correct("token_tis", [[2, 0.5]], cap=1.5, logp_sparse_BT=np.log([[0.1, 0.4]])).stats
    want = {
        "num_tokens": 2, "k1": 0, "k3": 0.25, "max_ratio": 2, "alpha_estimate": 0.75, "ess": 0.8,
        "mean_weight": 1, "masked_fraction": 0, "clipped_fraction": 0.5, "prob_gap": 0.15,
    }  # fmt: skip
    assert got == pytest.approx({f"correction/{k}": v for k, v in want.items()}, abs=1e-12)


def test_k1_has_the_sign_of_kl_from_sparse_to_dense():
    rng = np.random.default_rng(0)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.4, 0.2])
    kl = (q * np.log(q / p)).sum()
    ids = rng.choice(3, size=(1, 100_000), p=q)
    stats = corrections.summary(np.log(p / q)[ids], np.ones(ids.shape, bool))
    assert stats["k1"] == pytest.approx(kl, abs=0.01) and stats["k3"] == pytest.approx(kl, abs=0.01)
    assert stats["alpha_estimate"] == pytest.approx(np.minimum(p, q).sum(), abs=0.01)


def test_by_bin():
    ratios = [[9, 9, 1, 2, 0.5, 4, 9], [9, 9, 9, 1, 1, 9, 9]]
    mask = [[0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0]]
    got = correct("token_tis", ratios, mask)
    bins = corrections.by_bin(
        np.log(ratios),
        np.array(mask, bool),
        bin_tokens=2,
        correction=got,
        logp_sparse_BT=np.zeros((2, 7)),
    )
    assert list(bins) == [0, 1, 2]
    # bin 1 (tokens 3, 4): ratios 2 .5 1 1; weights the same: ess = 4.5^2 / (4 * 6.25) = .81
    assert bins[1]["num_tokens"] == 4 and bins[1]["ess"] == pytest.approx(0.81)
    assert bins[0]["max_ratio"] == pytest.approx(1) and bins[2]["clipped_fraction"] == 1
    assert sum(b["num_tokens"] for b in bins.values()) == got.stats["correction/num_tokens"]
    plain = corrections.by_bin(np.log(ratios), np.array(mask, bool), bin_tokens=5)
    assert list(plain) == [0] and "ess" not in plain[0]
    assert corrections.by_bin(np.log(ratios), np.zeros((2, 7), bool), bin_tokens=2) == {}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        correct("token_ris", [[1.0]])
    for cap, low in ((2.0, 0.0), (0.5, 1.0)):
        with pytest.raises(ValueError, match="low"):
            correct("icepop", [[1.0]], cap=cap, low=low)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="not finite"):
            corrections.correct("none", np.array([[bad]]), np.ones((1, 1), bool), cap=2.0, low=0.5)
    with pytest.raises(ValueError, match="bin_tokens"):
        corrections.by_bin(np.zeros((1, 1)), np.ones((1, 1), bool), bin_tokens=0)
