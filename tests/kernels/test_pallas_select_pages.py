"""What only kernels_pallas.select_pages has: runs of pages, the stored form, copies in flight."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import page_list
from kernels_pallas import select_pages as module
from kernels_pallas.tuning import tune_select
from tests.kernels import ladder
from tests.kernels.packages import EAGER, PALLAS
from tests.kernels.test_select_pages import kernel, queries, refuse, reject


@pytest.mark.parametrize(("package", "head_dim"), [(PALLAS, 128), (EAGER, 64)])
def test_pages_that_follow_one_another(package, head_dim):
    """Whole rows, two with pages swapped, and a last one whose last unit would leave the pool."""
    case = ladder.make_paged([43, 44, 37, 44, 41], kv_heads=4, head_dim=head_dim, seed=None)
    for row, i in ((1, 2), (3, 7)):
        swap_pages(case, row, i)
    ladder.check_select(kernel(package), case, queries(case, 2), [3, 4, 0, 2, 5], 8)


def swap_pages(case, row, i):
    """Pages i and i + 1 of a row are swapped in the pool."""
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


def test_zeros_of_both_signs_are_equal_and_negative_numbers_in_order():
    keys = page_list.ordered_key(
        jnp.array([-jnp.inf, -2, -1, -1e-30, -0.0, 0.0, 1e-30, 1, jnp.inf])
    )
    assert keys[4] == keys[5] and (np.diff(np.delete(keys, 4).astype(np.int64)) > 0).all()


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
    select = kernel(PALLAS)

    def in_bfloat16(q, *args, **kwargs):
        return select(jnp.bfloat16(q), *args, **kwargs)

    ladder.check_select(in_bfloat16, case, q, [30, 50], 53)


def test_bfloat16_in_the_stored_form():
    check_bfloat16()


def test_a_query_rounded_to_bfloat16_is_rejected(monkeypatch):
    """The mean over heads needs more bits than bfloat16 has: all three parts of the query."""
    monkeypatch.setattr(module.lax, "reduce_precision", lambda x, *bits: x)
    with pytest.raises(AssertionError):
        check_bfloat16()


def no_wait(*args):
    pass


def one_buffer(unit, ring):
    """All units are fetched into the same buffer."""
    return 0 * unit


class NextPage:
    """Every page of the table is replaced by the next one."""

    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, at):
        return self.ref[at[0], at[1], at[2] + 1]


def next_page(landmarks, table_ref, *args, right):
    right(landmarks, NextPage(table_ref), *args)


def run_off_by_one(*args, right):
    return jnp.maximum(right(*args), 0) - 1


def rank_off_by_one(rank, entry, right):
    return right(rank, entry - 1)


@pytest.mark.parametrize(("place", "fault"), [
    ("select_pages._wait", no_wait), ("select_pages._fetch", next_page),
    ("page_list._search", rank_off_by_one),
])  # fmt: skip
def test_planted_faults_are_rejected(place, fault, monkeypatch):
    reject(PALLAS, place, fault, monkeypatch)


def test_a_buffer_that_is_being_filled_is_rejected(monkeypatch):
    wait, slot, shift = module._wait, module._slot, []

    def wrong(unit, ring):
        return slot(unit + (1 if shift and shift.pop() else 0), ring)

    monkeypatch.setattr(module, "_wait", lambda *args: wait(*args) or shift.append(1))
    reject(PALLAS, "select_pages._slot", wrong, monkeypatch)


def test_a_wrong_run_is_rejected(monkeypatch):
    reject(PALLAS, "select_pages._runs", run_off_by_one, monkeypatch, seed=None)


@pytest.mark.parametrize(("place", "fault", "match"), [
    ("select_pages._wait", no_wait, "race"), ("select_pages._slot", one_buffer, "not equal"),
])  # fmt: skip
def test_faults_of_timing_are_rejected_where_dmas_are_eager(place, fault, match, monkeypatch):
    reject(EAGER, place, fault, monkeypatch, match)


def test_ties_to_the_higher_page_are_rejected(monkeypatch):
    calls = []

    def from_the_end(*args, right):
        rank, total = right(*args)
        calls.append(1)
        return (total - rank + 1 if len(calls) == 1 else rank), total

    reject(PALLAS, "page_list._ranks", from_the_end, monkeypatch, equal=True)


def test_tunings_that_do_not_fit_are_refused():
    refuse(PALLAS, {}, "tuning", tuning=tune_select(5, 8)._replace(unit=48))
