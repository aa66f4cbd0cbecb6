"""kernels_pallas.select_pages, interpreted: page ids and counts exactly, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.schedule import DENSE
from kernels_pallas import page_list
from kernels_pallas import select_pages as module
from kernels_pallas.tuning import SelectTuning, tune_select
from tests.kernels import ladder
from tests.kernels.ladder import EAGER, ON_WAIT
from tests.kernels.test_reference import LENGTHS

SMALL = SelectTuning(unit=4, ring=2, group=1, digit=2)
"""So that 11 pages go through every loop and reuse every buffer."""


def kernel(mode=ON_WAIT, tuning=SMALL):
    static = "max_selected"
    return ladder.interpreted(module.select_pages, mode, static=static, tuning=tuning)


def queries(case, ratio, seed=1):
    return ladder.random_queries(case, 1, ratio, seed)[:, 0]


@pytest.mark.parametrize(("ratio", "head_dim", "kv_heads", "mode"), [
    (1, 128, 8, ON_WAIT), (3, 64, 2, ON_WAIT), (2, 64, 1, ON_WAIT),
    (5, 32, 8, EAGER), (8, 128, 4, EAGER),
])  # fmt: skip
def test_every_length_ratio_and_shape(ratio, head_dim, kv_heads, mode):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim, kv_heads=kv_heads)
    q, k = queries(case, ratio), np.full(len(LENGTHS), 2)
    ladder.check_select(kernel(mode), case, q, k, 5)


def test_rows_have_budgets_of_their_own_and_padding_of_the_table_is_not_read():
    case = ladder.make_paged([41] * 10 + [2, 40, 41, 0], head_dim=128)
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30
    k = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, DENSE, 5, 0, 2**31 - 1, 4])  # 11 pages: 8 candidates
    ladder.check_select(kernel(), case, queries(case, 2), k, 140)


@pytest.mark.parametrize(("mode", "head_dim"), [(ON_WAIT, 128), (EAGER, 64)])
def test_pages_that_follow_one_another(mode, head_dim):
    """Whole rows, two with pages swapped, and a last one whose last unit would leave the pool."""
    case = ladder.make_paged([43, 44, 37, 44, 41], kv_heads=4, head_dim=head_dim, seed=None)
    for row, i in ((1, 2), (3, 7)):
        swap_pages(case, row, i)
    ladder.check_select(kernel(mode), case, queries(case, 2), [3, 4, 0, 2, 5], 8)


def swap_pages(case, row, i):
    """Pages i and i + 1 of a row lie the other way round in the pool."""
    pages = case.table_BP[row, i : i + 2]
    case.landmarks[:, pages] = case.landmarks[:, pages[::-1]]
    case.kv_pages[:, :, pages] = case.kv_pages[:, :, pages[::-1]]
    case.table_BP[row, i : i + 2] = pages[::-1]


def test_runs():
    table = np.array([[5, 6, 7, 8, 9, 9, 1, 1], [8, 9, 3, 4, 10, 11, 0, 0]])
    got = module._runs(jnp.array(table), jnp.array([5, 6]), 2, 12)
    # 9 and the unused page after it; 10 and 11 end the pool of 12; unused units may be anything
    np.testing.assert_array_equal(got[:, :3], [[5, 7, 9], [8, 3, 10]])
    got = module._runs(jnp.array(table), jnp.array([8, 6]), 4, 12)
    np.testing.assert_array_equal(got, [[5, -1], [-1, -1]])  # 10, 11 and two pages past the pool


def test_ties_go_to_the_lower_page():
    case = ladder.make_paged([37, 40, 41, 16], equal=True, head_dim=64)
    q, select = np.round(4 * queries(case, 2)) / 4, kernel()
    for k in (1, 3, 6):
        ladder.check_select(select, case, q, [k] * 4, 9)
    ladder.check_select(select, case, 0 * q, [3] * 4, 9)  # zeros of both signs inside


def test_zeros_of_both_signs_are_equal_and_negative_numbers_in_order():
    keys = page_list.ordered_key(
        jnp.array([-jnp.inf, -2, -1, -1e-30, -0.0, 0.0, 1e-30, 1, jnp.inf])
    )
    assert keys[4] == keys[5] and (np.diff(np.delete(keys, 4).astype(np.int64)) > 0).all()


def test_several_blocks_of_pages_and_of_the_list():
    """300 pages = 3 blocks of 128 in 2 groups, of which up to 153 are listed, in 2 blocks."""
    select = kernel(tuning=SelectTuning(unit=8, ring=4, group=2, digit=1))
    for equal in (False, True):
        case = ladder.make_paged([1201, 600], head_dim=128, kv_heads=1, equal=equal)
        ladder.check_select(select, case, np.round(4 * queries(case, 2)) / 4, [150, 20], 153)


def check_bfloat16():
    """Stored form; a page is one token, whose landmark picks one number of the mean query. Those
    numbers are 1, 1 + 1/384, 1 + 2/384 and 1 + 1/128: bfloat16 holds the first and the last."""
    case = ladder.make_paged([150, 140], head_dim=64, kv_heads=4, page_size=1)
    rng = np.random.default_rng(7)
    case.keys = [np.eye(64, dtype=np.float32)[rng.integers(0, 64, (len(k), 4))] for k in case.keys]
    for pages, keys in zip(case.table_BP, case.keys, strict=True):
        case.landmarks[ladder.LAYER, pages[: len(keys)]] = keys
    L, M, K, H = case.landmarks.shape
    case.landmarks = jnp.bfloat16(case.landmarks).reshape(L, M, K * H // 128, 128)
    q = np.where(rng.random((2, 12, 64)) < 0.5, 1, 1 + 2.0**-7).astype(np.float32)
    select = kernel()

    def in_bfloat16(q, *args, **kwargs):
        return select(jnp.bfloat16(q), *args, **kwargs)

    ladder.check_select(in_bfloat16, case, q, [30, 50], 53)


def test_bfloat16_in_the_stored_form():
    check_bfloat16()


def test_a_query_rounded_to_bfloat16_is_rejected(monkeypatch):
    """Its mean over heads needs more bits: all three parts."""
    monkeypatch.setattr(module.lax, "reduce_precision", lambda x, *bits: x)
    with pytest.raises(AssertionError):
        check_bfloat16()


FAULTY = SelectTuning(unit=2, ring=4, group=1, digit=1)
"""Several units in flight, and the quickest to compile."""


def no_wait(patch):
    patch.setattr(module, "_wait", lambda *args: None)


def one_buffer(patch):
    """All units are fetched into the first one."""
    patch.setattr(module, "_slot", lambda unit, ring: 0 * unit)


def other_buffer(patch):
    """Scored from the buffer that is being filled."""
    wait, slot = module._wait, module._slot
    patch.setattr(module, "_wait", lambda unit, *args: wait(unit, *args) or shift.append(1))
    shift = []

    def wrong(unit, ring):
        return slot(unit + (1 if shift and shift.pop() else 0), ring)

    patch.setattr(module, "_slot", wrong)


def next_page(patch):
    fetch = module._fetch

    class Next:
        def __init__(self, ref):
            self.ref = ref

        def __getitem__(self, at):
            return self.ref[at[0], at[1], at[2] + 1]

    def wrong(landmarks, table_ref, *args):
        fetch(landmarks, Next(table_ref), *args)

    patch.setattr(module, "_fetch", wrong)


def run_off_by_one(patch):
    runs = module._runs
    patch.setattr(module, "_runs", lambda *args: jnp.maximum(runs(*args), 0) - 1)


def last_candidate_missing(patch):
    patch.setattr(page_list, "is_candidate", lambda page, n: (page >= 1) & (page < n - 3))


def negative_scores_reversed(patch):
    patch.setattr(
        page_list, "ordered_key", lambda score: jax.lax.bitcast_convert_type(score, jnp.int32)
    )


def rank_off_by_one(patch):
    search = page_list._search
    patch.setattr(page_list, "_search", lambda rank, entry: search(rank, entry - 1))


@pytest.mark.parametrize("fault", [
    no_wait, other_buffer, next_page, last_candidate_missing, negative_scores_reversed,
    rank_off_by_one,
])  # fmt: skip
def test_planted_faults_are_rejected(fault, monkeypatch):
    case = ladder.make_paged([43, 44], head_dim=128)
    reject(fault, case, monkeypatch)


def reject(fault, case, patch):
    fault(patch)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(tuning=FAULTY), case, queries(case, 2), [3, 4], 7)


def test_a_wrong_run_is_rejected(monkeypatch):
    reject(run_off_by_one, ladder.make_paged([43, 44], head_dim=128, seed=None), monkeypatch)


@pytest.mark.parametrize(("fault", "match"), [(no_wait, "race"), (one_buffer, "not equal")])
def test_faults_of_timing_are_rejected_where_dmas_are_eager(fault, match, monkeypatch):
    case = ladder.make_paged([43], head_dim=128)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=match):
        ladder.check_select(kernel(EAGER, FAULTY), case, queries(case, 2), [3], 7)


def test_ties_to_the_higher_page_are_rejected(monkeypatch):
    ranks = page_list._ranks

    def from_the_end(chosen, upper, before):
        rank, total = ranks(chosen, upper, before)
        return (total - rank + 1 if calls.append(1) or len(calls) == 1 else rank), total

    calls = []
    case = ladder.make_paged([43], head_dim=128, equal=True)
    monkeypatch.setattr(page_list, "_ranks", from_the_end)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(tuning=FAULTY), case, np.round(queries(case, 2)), [3], 7)


@pytest.mark.parametrize(("change", "match"), [
    ({"q_BNH": np.zeros((2, 4, 96), np.float32)}, "landmarks"),
    ({"k_B": np.zeros(3, np.int32)}, "rows each"),
    ({"max_selected": 0}, "max_selected"),
    ({"tuning": tune_select(5, 8)._replace(unit=48)}, "tuning"),
])  # fmt: skip
def test_wrong_arguments(change, match):
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
        module.select_pages(**args | change)
