"""Search in profiles by hand: rules, bins without evidence, page sizes; files that are refused."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import decode_cost as cost
from common.errors import UserError
from common.model.geometry import QWEN3
from common.schedule import schedule_search
from common.schedule.schedule import DENSE, Schedule, load
from common.schedule.schedule_search import search, search_page_sizes, tokens_read
from tests.common.profile_tables import TABLE, profile

HOW = {"tau": 0.9, "quantile": 0.05}


def test_search_by_hand():
    """tau = 0.9 on p5. Bin 0: too few tokens, that of bin 1. Bin 1: 4 (0.95). Bin 2: 4 has 0.80,
    8 has 0.91: 8. Bin 3: 4 has 0.92: 4, raised to 8 when monotone. Bin 4: too few, the larger one
    of bins 3 and 5. Bin 5: 0.30 at best: dense."""
    s = search(profile(TABLE), **HOW, extrapolate=True)
    assert s.budgets == (4, 4, 8, 8, DENSE, DENSE)
    assert s.provenance["extrapolated_bins"] == [0, 4]
    assert s.provenance["measured_budgets"] == [4, 8, 16]
    assert s.provenance["bins"][2] == {
        **{"start": 128, "end": 192, "k": 8, "measured_k": 8, "count": 500},
        **{"p5": 0.91, "low": 0.91, "high": 0.91},
    }
    assert s.provenance["bins"][5]["p5"] == 0.30  # what the largest budget reached
    assert "p5" not in s.provenance["bins"][4]
    assert (s.provenance["rule"], s.provenance["monotone"]) == ("point", True)
    assert s.name == "tiny-0.9"
    free = search(profile(TABLE), **HOW, monotone=False, extrapolate=True)
    assert free.budgets == (4, 4, 8, 4, DENSE, DENSE)
    assert free.provenance["monotone"] is False
    # p1 = p5 - 0.1: bin 1 needs 0.99 - 0.1 = 0.89, below 0.9 at every budget: dense from there on
    p1 = search(profile(TABLE), tau=0.9, quantile=0.01, extrapolate=True)
    assert p1.budgets == (DENSE,) * 6
    # exactly tau is enough: 0.91 in bin 2
    assert search(profile(TABLE), tau=0.91, quantile=0.05, extrapolate=True).budgets[2] == 8


def test_bins_without_enough_tokens_are_refused_by_name():
    with pytest.raises(UserError) as error:
        search(profile(TABLE), **HOW)
    assert "bins 0, 4 (positions 0..63, 256..319)" in str(error.value)
    assert "--extrapolate" in str(error.value) and "\n" not in str(error.value)
    judged = {k: values[1:4] for k, values in TABLE.items()}
    s = search(profile(judged), **HOW)
    assert s.budgets == (4, 8, 8) and s.provenance["extrapolated_bins"] == []
    assert search(profile(judged), **HOW, extrapolate=True) == s  # nothing to extrapolate
    # a bin that the rows do not even name is as bad as one with few tokens
    gap = profile(judged)
    gap["rows"] = [row for row in gap["rows"] if row["bin"] != 1]
    with pytest.raises(UserError, match=r"judge bin 1 \(positions 64..127\)"):
        search(gap, **HOW)


@pytest.mark.parametrize(
    ("values", "budgets"),
    [
        ([None, 0.95, 0.5], (4, 4, 8)),  # before the first: the first
        ([0.95, None, 0.5], (4, 8, 8)),  # between: the larger one, here after
        ([0.5, None, None, 0.95], (8, 8, 8, 4)),  # between: the larger one, here before
        ([0.95, 0.5, None, None], (4, 8, 8, 8)),  # after the last: the last
    ],
)
def test_extrapolated_budgets(values, budgets):
    table = {4: values, 8: [v and 0.99 for v in values]}
    s = search(profile(table), **HOW, monotone=False, extrapolate=True)
    assert s.budgets == budgets


def test_lower_rule_asks_the_interval():
    """k = 4: estimate 0.92, lower bound 0.85 < 0.9; k = 8: lower bound exactly 0.9; bin 1: k = 8
    has 0.89: dense."""
    table = {4: [(0.92, 0.85), 0.99], 8: [(0.95, 0.90), (0.97, 0.89)]}
    point, lower = (search(profile(table), **HOW, rule=rule) for rule in ("point", "lower"))
    assert point.budgets == (4, 4) and lower.budgets == (8, DENSE)
    assert search(profile(table), **HOW) == point
    assert (point.provenance["rule"], lower.provenance["rule"]) == ("point", "lower")
    assert "lower bounds" in lower.provenance["method"]
    assert lower.provenance["bins"][0] == {
        **{"start": 0, "end": 64, "k": 8, "measured_k": 8, "count": 500},
        **{"p5": 0.95, "low": 0.90, "high": 0.95},
    }


def test_a_small_budget_that_passes_by_luck_is_no_evidence():
    assert search(profile({4: [0.95], 8: [0.5], 16: [0.95]}), **HOW).budgets == (16,)
    assert search(profile({4: [0.95], 8: [0.95], 16: [0.5]}), **HOW).budgets == (DENSE,)


def test_result_survives_its_file_and_says_what_was_measured(tmp_path):
    more = {"source": "own samples", "interval": "bootstrap over sequences", "policy": "mean"}
    s = search(profile(TABLE, **more), **HOW, extrapolate=True)
    assert {key: s.provenance[key] for key in more} == more
    s.save(tmp_path / "s.json")
    assert load(tmp_path / "s.json", page_size=16) == s
    assert not set(more) & set(search(profile(TABLE), **HOW, extrapolate=True).provenance)


def test_search_refuses():
    with pytest.raises(UserError, match="no bin has enough tokens"):
        search(profile({4: [None, None]}), **HOW, extrapolate=True)
    with pytest.raises(UserError, match="no bin has enough tokens"):
        search(profile({"dense": [0.99]}), **HOW, extrapolate=True)
    with pytest.raises(UserError, match=r"quantile=0.1: the profile has \[0.01, 0.05\]"):
        search(profile(TABLE), tau=0.9, quantile=0.1)
    with pytest.raises(UserError, match="tau=1.5"):
        search(profile(TABLE), tau=1.5, quantile=0.05)
    with pytest.raises(UserError, match="rule='low': expected 'point'.*'lower'"):
        search(profile(TABLE), **HOW, rule="low")


@given(
    st.lists(st.lists(st.floats(0.1, 1), min_size=3, max_size=3), min_size=1, max_size=6),
    st.floats(0.2, 0.95),
    st.floats(0, 0.05),
    st.floats(0, 0.2),
)
def test_search_meets_tau_and_rises_with_it(rows, tau, more, wide):
    """Every bin's own choice meets tau, or is dense; budgets rise with length, with tau and with
    the caution of the rule."""
    bins = [sorted(values) for values in rows]  # alpha rises with the budget, as it should
    table = {k: [values[i] for values in bins] for i, k in enumerate((4, 8, 16))}
    low, high = (search(profile(table), tau=t, quantile=0.05).budgets for t in (tau, tau + more))
    assert list(low) == sorted(low) and all(a <= b for a, b in zip(low, high, strict=True))
    for b, k in enumerate(low):
        assert k == DENSE or table[k][b] >= tau
    wider = {k: [(v, max(v - wide, 0.0)) for v in values] for k, values in table.items()}
    wider = profile(wider)
    for row in wider["rows"]:
        row.update(p1=0.0, p1_low=0.0, p1_high=0.0)  # p5 - 0.1 may be negative
    safe = search(wider, tau=tau, quantile=0.05, rule="lower").budgets
    assert all(a <= b for a, b in zip(low, safe, strict=True))


def test_tokens_read_by_hand():
    """Pages of 16, k = 4. 320 tokens: n = 20 pages, (4 + 3) * 16 + 20 / 2 = 122. 33 tokens: n = 3,
    all 3 read: 48 + 1.5. Weights 1 and 3: (122 + 3 * 49.5) / 4 = 67.625."""
    k4 = Schedule(page_size=16, bin_tokens=64, budgets=(4,))
    assert tokens_read(k4, np.array([320]), np.ones(1)) == 122
    assert tokens_read(k4, np.array([320, 33]), np.array([1, 3])) == 67.625
    # the query that sees 64 tokens stands in bin 0, at 65 in bin 1: n = 5, 3 * 16 + 5 / 2
    steps = Schedule(page_size=16, bin_tokens=64, budgets=(DENSE, 0))
    assert tokens_read(steps, np.array([64]), np.ones(1)) == 4 * 16 + 2
    assert tokens_read(steps, np.array([65]), np.ones(1)) == 50.5


def test_profile_lengths_pool_the_tokens_of_all_profiles():
    """Bins of 64: middles 32, 96. 4 and 8 have 500 + 500 tokens in bin 0, 3 + 3 in bin 1; the other
    profile has bins of 128: middle 64, 500 tokens."""
    a, b = profile({4: [0.9, None], 8: [0.9, None]}), profile({4: [0.9]}, 64, width=128)
    lengths, weights = schedule_search.profile_lengths([a, b])
    assert dict(zip(lengths.tolist(), weights.tolist(), strict=True)) == {
        32: 1000,
        96: 6,
        64: 500,
    }


def joint(*profiles, **how):
    lengths, weights = schedule_search.profile_lengths(profiles)
    cost = functools.partial(tokens_read, lengths=lengths, weights=weights)
    return search_page_sizes(profiles, cost, **{**HOW, **how})


def test_cheapest_page_size_wins():
    """One bin of 1,024 tokens, middle 512. Pages of 16 with k = 8: 11 * 16 + 32 / 2 = 192; of 64
    with k = 2: 5 * 64 + 8 / 2 = 324. If the small pages fail they are dense: 32 * 16 + 16 = 528."""
    small, large = profile({8: [0.95]}, 16, width=1024), profile({2: [0.95]}, 64, width=1024)
    best, found = joint(small, large)
    assert (best, found.page_size, found.budgets) == (0, 16, (8,))
    assert found.provenance["page_size_costs"] == {"16": 192, "64": 324}
    assert joint(large, small)[0] == 1
    failing = profile({8: [0.85]}, 16, width=1024)
    best, found = joint(failing, large)
    assert (best, found.page_size, found.budgets) == (1, 64, (2,))
    assert found.provenance["page_size_costs"] == {"16": 528, "64": 324}
    assert joint(failing, large, tau=0.8)[1].page_size == 16  # which a lower tau turns round
    best, _ = search_page_sizes([small, large], lambda s: -s.page_size, **HOW)
    assert best == 1  # the cost is the caller's


def test_page_sizes_of_one_model_once_each():
    a = profile({4: [0.95]})
    with pytest.raises(UserError, match="page sizes .16, 16.: give one for each"):
        joint(a, a)
    with pytest.raises(UserError, match=r"profiles of models/tiny, other: .* one model only"):
        joint(a, profile({4: [0.95]}, 32, model="other"))
    with pytest.raises(UserError, match="pages of 32: too few tokens to judge bin 1"):
        joint(a, profile({4: [0.95, None]}, 32))


def test_profile_of_another_policy_gives_no_schedule():
    """Decode would not read the pages that were measured, nor as many."""
    with pytest.raises(UserError, match="policy 'oracle'; decode chooses by 'mean'"):
        search(profile(TABLE, policy="oracle"), tau=0.9, quantile=0.05, extrapolate=True)
    same = [
        search(profile(TABLE, **more), tau=0.9, quantile=0.05, extrapolate=True).budgets
        for more in ({}, {"policy": "mean"})
    ]
    assert same[0] == same[1]


def test_tokens_read_is_the_cost_models_sparse_layers():
    """Bytes of one KV head and layer: 2 H numbers of 2 bytes a token."""
    geometry = dataclasses.replace(
        QWEN3["qwen3-4b"], num_layers=3, num_kv_heads=1, num_heads=2, head_dim=8
    )
    schedule = Schedule(page_size=16, bin_tokens=64, budgets=(1, 3))
    cached = np.array([0, 15, 16, 100, 300])
    terms = cost.row_terms(geometry, schedule, cached, num_dense_layers=0)
    for i, length in enumerate(cached + 1):
        tokens = tokens_read(schedule, np.array([length]), np.ones(1))
        assert sum(t[i] for t in terms.values()) == 3 * 2 * 8 * 2 * tokens
