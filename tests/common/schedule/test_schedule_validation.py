"""Leave-prompts-out validation: halves that agree hold; luck of one half fails on the other."""

import json

import numpy as np
import pytest

from common.config import Config
from common.mismatch import acceptance
from common.profile.profile_rows import Measured, Profile
from common.schedule.profile_file import check_profile
from common.schedule.schedule_validation import describe, validate
from tests.common.profile_tables import TABLE, profile

HOW = {"tau": 0.9, "quantile": 0.05}
SOBER = {4: [0.95, 0.70], 8: [0.97, 0.95]}
LUCKY = {4: [0.95, 0.92], 8: [0.98, 0.96]}  # k = 4 passes in bin 1, where it does not for others


def test_halves_that_agree_hold_everywhere():
    v = validate(profile(SOBER, halves=(SOBER, SOBER)), **HOW)
    assert (v["share_held"], v["worst_shortfall"]) == (1.0, 0.0)
    assert [d["found_on"] + d["judged_on"] for d in v["directions"]] == ["AB", "BA"]
    assert [[b["k"] for b in d["bins"]] for d in v["directions"]] == [[4, 8], [4, 8]]
    lines = describe(v, profile(SOBER))
    assert lines[0] == (
        "found on half A of the sequences, judged on the other: 2 of 2 bins hold p5 >= 0.9"
    )
    assert json.loads(json.dumps(v, allow_nan=False)) == v


def test_luck_of_one_half_fails_on_the_other():
    """A takes k = 4 in bin 1, where B has 0.70: 0.2 short. B takes 8, where A has 0.96."""
    p = profile(LUCKY, halves=(LUCKY, SOBER))
    v = validate(p, **HOW)
    a, b = v["directions"]
    assert a["bins"][1] == {
        **{"bin": 1, "start": 64, "end": 128, "k": 4, "holds": False},
        **{"p5": 0.70, "low": 0.70, "high": 0.70},
    }
    assert a["share_held"] == 0.5 and a["worst_shortfall"] == pytest.approx(0.2)
    assert b["share_held"] == 1 and b["worst_shortfall"] == 0
    assert v["share_held"] == 0.75 and v["worst_shortfall"] == pytest.approx(0.2)
    first, second = describe(v, p)
    assert "1 of 2 bins hold p5 >= 0.9; worst p5 0.700 [0.700, 0.700] at k = 4 in bin 1" in first
    assert "2 of 2 bins hold" in second
    # the fault that this guards against: the half that chose k = 4 finds nothing wrong with it
    assert validate(profile(LUCKY, halves=(LUCKY, LUCKY)), **HOW)["share_held"] == 1


def test_the_criterion_is_that_of_the_search():
    """A's k = 4 has a lower bound of 0.8: rule lower takes 8 there, and all hold. p1 = p5 - 0.1
    fails everywhere but where 0.9 is enough."""
    unsure = {4: [0.95, (0.92, 0.80)], 8: LUCKY[8]}
    p = profile(unsure, halves=(unsure, SOBER))
    assert validate(p, **HOW)["share_held"] == 0.75
    assert validate(p, **HOW, rule="lower")["share_held"] == 1
    assert validate(p, tau=0.69, quantile=0.05)["share_held"] == 1
    assert validate(p, tau=0.69, quantile=0.01)["worst_shortfall"] == pytest.approx(0.09)
    falling = {4: [0.5, 0.95], 8: [0.95, 0.99]}
    free = validate(profile(falling, halves=(falling,) * 2), **HOW, monotone=False)
    assert [b["k"] for b in free["directions"][0]["bins"]] == [8, 4]
    assert validate(profile(falling, halves=(falling,) * 2), **HOW)["directions"][0]["bins"][1][
        "k"
    ] == 8  # fmt: skip


def test_bins_that_cannot_be_judged_are_named_and_dense_ones_hold():
    """Bins 0 and 4 of TABLE have too few tokens on both halves; bin 5 is dense; in B bin 2 has too
    few tokens at k = 8, which A takes there."""
    sparse_b = {**TABLE, 8: [None, 0.99, None, 0.95, None, 0.20]}
    p = profile(TABLE, halves=(TABLE, sparse_b))
    a, b = validate(p, **HOW)["directions"]
    assert a["unjudged_bins"] == [0, 2, 4] and b["unjudged_bins"] == [0, 4]
    assert a["bins"][-1] | {"bin": 5, "k": "dense", "p5": 1.0, "holds": True} == a["bins"][-1]
    line = describe(validate(p, **HOW), p)[0]
    assert "3 of 3 bins hold p5 >= 0.9 (1 of them dense)" in line
    assert line.endswith("too few tokens in bins 0, 2, 4 (positions 0..63, 128..191, 256..319)")


def test_halves_without_evidence_judge_nothing():
    nothing = {4: [None, None], 8: [None, None]}
    p = profile(SOBER, halves=(SOBER, nothing))
    v = validate(p, **HOW)
    assert v["share_held"] is None and v["worst_shortfall"] is None
    assert [d["unjudged_bins"] for d in v["directions"]] == [[0, 1], [0, 1]]
    assert "0 of 0 bins hold" in describe(v, p)[0]
    with pytest.raises(ValueError, match='has no "halves"'):
        validate(profile(SOBER), **HOW)


def measured(half, bad_B, hard):
    """Rows of `mismatch.statistics` for k = 4 and 8: in rows `bad_B`, one token in ten is at `hard`
    under k = 4."""
    rng = np.random.default_rng(half)
    rows = []
    for k in (4, 8):
        alpha_BT = rng.uniform(0.97, 1.0, (20, 129))
        if k == 4:
            alpha_BT[bad_B, ::10] = hard
        stats = acceptance.statistics(
            alpha_BT, np.ones_like(alpha_BT, bool), np.arange(20), bin_tokens=64, min_tokens=100
        )
        rows += [{"k": k, **s.__dict__} for s in stats]
    return {"rows": rows}


@pytest.mark.parametrize(("bad", "held"), [([], 1.0), (list(range(20)), 0.5)])
def test_halves_of_measured_rows(bad, held):
    """Prompts of half B may be hard for k = 4, 1 token in 10 at 0.4: p5 = 0.4. A sees none of it
    and takes 4 in both bins: both fail on B; B takes 8, which holds on A."""
    p = profile(SOBER)
    p["halves"] = [measured(0, [], 0.4), measured(1, bad, 0.4)]
    v = validate(p, **HOW)
    assert v["share_held"] == held
    assert v["worst_shortfall"] == pytest.approx(0.5 if bad else 0.0)


def test_a_profile_leaves_prompts_out():
    """Rows 1 and 3, of prompt 1, all of half 1, are worse: half 0 shows none of it."""
    alpha_BT = np.repeat([[0.99], [0.5], [0.99], [0.6]], 200, axis=1)
    mask_BT, group_B = np.ones((4, 200), bool), np.array([0, 1, 0, 1])
    content = Profile(Config(), model="m", source="s", policy="mean")
    content.add(Measured(k=4, alpha_BT=alpha_BT, mask_BT=mask_BT, group_B=group_B))
    record = content.record()
    check_profile(record)
    found = [part["rows"][0] for part in (record, *record["halves"])]
    assert [row["p5"] for row in found] == [0.5, 0.99, 0.5]
    assert [row["count"] for row in found] == [800, 400, 400]
    assert [row["num_units"] for row in found] == [2, 1, 1]
    single = Profile(Config(), model="m", source="s", policy="mean")
    single.add(Measured(k=4, alpha_BT=alpha_BT[:1], mask_BT=mask_BT[:1], group_B=group_B[:1]))
    assert "halves" not in single.record()
