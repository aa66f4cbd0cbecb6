"""select_pages of both packages, interpreted: page ids and counts exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.schedule.schedule import DENSE
from kernels_pallas import tuning as pallas
from kernels_triton import tuning as triton
from tests.kernels import ladder
from tests.kernels.packages import BOTH, EAGER, PALLAS, TRITON

# Pages of 4, of which 5 are chosen: none, one token, around one page, up to 4, 5, 6 and 11 pages,
# full and part filled.
LENGTHS = [0, 1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 43]
WHOLE = {"tuning": triton.SelectTuning(score=4, count=16, list=8, num_warps=4)}
"""Sizes with which all scores of a row stay in registers."""
QUICK = {"tuning": pallas.SelectTuning(unit=2, ring=4, group=1, digit=1)}
"""Sizes with several units in flight that compile fastest."""
FAULTY, HEAD_DIM = {PALLAS: QUICK, EAGER: QUICK, TRITON: {}}, {PALLAS: 128, EAGER: 128, TRITON: 32}


def kernel(package, **options):
    return package.kernel("select_pages", **options)


def queries(case, ratio, seed=1):
    return ladder.random_queries(case, 1, ratio, seed)[:, 0]


@pytest.mark.parametrize(("package", "ratio", "head_dim", "kv_heads", "options"), [
    (PALLAS, 1, 128, 8, {}), (PALLAS, 3, 64, 2, {}), (PALLAS, 2, 64, 1, {}),
    (EAGER, 5, 32, 8, {}), (EAGER, 8, 128, 4, {}),
    (TRITON, 1, 32, 3, WHOLE), (TRITON, 3, 64, 2, {}), (TRITON, 5, 128, 1, WHOLE),
    (TRITON, 8, 128, 1, {}),
])  # fmt: skip
def test_every_length_ratio_and_shape(package, ratio, head_dim, kv_heads, options):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim, kv_heads=kv_heads)
    k = np.full(len(LENGTHS), 2)
    ladder.check_select(kernel(package, **options), case, queries(case, ratio), k, 5)


@pytest.mark.parametrize(("package", "head_dim", "kv_heads", "width"), [
    (PALLAS, 128, 2, 140), (TRITON, 64, 1, 14),
])  # fmt: skip
def test_rows_have_budgets_of_their_own_and_padding_of_the_table_is_not_read(
    package, head_dim, kv_heads, width
):
    case = ladder.make_paged([41] * 10 + [2, 40, 41, 0], head_dim=head_dim, kv_heads=kv_heads)
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30
    k = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, DENSE, 5, 0, 2**31 - 1, 4])  # 11 pages: 8 candidates
    ladder.check_select(kernel(package), case, queries(case, 2), k, width)


@pytest.mark.parametrize(("package", "kv_heads", "options"), [
    (PALLAS, 2, {}), (TRITON, 1, {}), (TRITON, 1, WHOLE),
])  # fmt: skip
def test_ties_go_to_the_lower_page(package, kv_heads, options):
    """All pages of a row are equal, or take one of two scores: a part of the equal ones is chosen,
    in any block of the list."""
    case = ladder.make_paged(
        [37, 40, 41, 16, 41, 61, 64], equal=True, head_dim=64, kv_heads=kv_heads
    )
    for row in (5, 6):
        for page in (3, 6, 7, 11):
            case.keys[row][4 * page : 4 * page + 4] *= -1
            case.landmarks[ladder.LAYER, case.table_BP[row, page]] *= -1
    q, select = np.round(4 * queries(case, 2)) / 4, kernel(package, **options)
    q[4] = 0  # zeros of both signs inside
    ladder.check_select(select, case, q, [1, 3, 6, 3, 3, 5, 9], 12)
    if package is PALLAS:  # compiled once
        ladder.check_select(select, case, q, [6, 1, 3, 1, 6, 3, 5], 12)


@pytest.mark.parametrize(("package", "head_dim", "tuning"), [
    (PALLAS, 128, pallas.SelectTuning(unit=8, ring=4, group=2, digit=1)),
    (TRITON, 32, triton.SelectTuning(score=64, count=128, list=64, num_warps=4)),
    (TRITON, 32, triton.tune_select(302)),
])  # fmt: skip
def test_several_blocks_of_pages_and_of_the_list(package, head_dim, tuning):
    """300 pages, of which up to 153 are listed. Pallas: blocks of 128 in 2 groups, 2 blocks of the
    list; Triton: blocks of 64 and 128, then as tuned in one block."""
    select = kernel(package, tuning=tuning)
    for equal in (False, True):
        case = ladder.make_paged([1201, 600], head_dim=head_dim, kv_heads=1, equal=equal)
        ladder.check_select(select, case, np.round(4 * queries(case, 2)) / 4, [150, 20], 153)


def last_candidate_missing(page, n):
    return (page >= 1) & (page < n - 3)


def bits_of_the_score(score):
    """The keys of negative scores are in reversed order."""
    return jax.lax.bitcast_convert_type(score, jnp.int32)


def bits_of_the_score_in_triton(score):
    import triton.language as tl

    return score.to(tl.int32, bitcast=True)


@pytest.mark.parametrize(("package", "place", "fault"), [
    (PALLAS, "page_list.is_candidate", last_candidate_missing),
    (TRITON, "select_pages._is_candidate", last_candidate_missing),
    (PALLAS, "page_list.ordered_key", bits_of_the_score),
    (TRITON, "select_pages._ordered", bits_of_the_score_in_triton),
])  # fmt: skip
def test_planted_faults_are_rejected(package, place, fault, monkeypatch):
    reject(package, place, fault, monkeypatch)


@pytest.mark.parametrize(("package", "inputs"), [
    (PALLAS, {}), (PALLAS, {"seed": None}), (PALLAS, {"equal": True}), (EAGER, {}), (TRITON, {}),
    (TRITON, {"equal": True}),
])  # fmt: skip
def test_without_a_fault_the_same_inputs_pass(package, inputs):
    check(package, **inputs)


def reject(package, place, fault, patch, match=None, **inputs):
    """Check that a fault in that function changes the list, or causes a race."""
    package.plant(patch, place, fault)
    with pytest.raises(AssertionError, match=match):
        check(package, **inputs)


def check(package, *, equal=False, seed=0):
    case = ladder.make_paged([43, 44], head_dim=HEAD_DIM[package], equal=equal, seed=seed)
    q = queries(case, 2)
    select = kernel(package, **FAULTY[package])
    ladder.check_select(select, case, np.round(q) if equal else q, [3, 4], 7)


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(("change", "match"), [
    ({"q_BNH": np.zeros((2, 4, 96), np.float32)}, "landmarks"),
    ({"q_BNH": np.zeros((2, 3, 64), np.float32)}, "landmarks"),
    ({"k_B": np.zeros(3, np.int32)}, "rows each"), ({"max_selected": 0}, "max_selected"),
])  # fmt: skip
def test_wrong_arguments(package, change, match):
    refuse(package, change, match)


def refuse(package, change, match, **options):
    args = {
        "q_BNH": np.zeros((2, 4, 64), np.float32),
        "landmarks_LMKH": np.zeros((1, 9, 2, 64), np.float32),
        "layer": 0,
        "page_table_BP": np.zeros((2, 5), np.int32),
        "num_pages_B": np.zeros(2, np.int32),
        "k_B": np.zeros(2, np.int32),
        "max_selected": 4,
    }
    with pytest.raises(ValueError, match=match):
        kernel(package, **options)(**args | change)
