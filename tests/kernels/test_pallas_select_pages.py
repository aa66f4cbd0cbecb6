"""kernels_pallas.select_pages, interpreted: page ids and counts exactly, in both modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from common.schedule import DENSE
from kernels_pallas import select_pages as module
from kernels_pallas.select_pages import Tuning
from tests.kernels import ladder
from tests.kernels.test_reference import LENGTHS

ON_WAIT = pltpu.InterpretParams(
    dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
)
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)
SMALL = Tuning(unit=4, ring=2, group=1, digit=2)
"""So that 11 pages go through every loop and reuse every buffer."""


def kernel(mode=ON_WAIT, tuning=SMALL):
    """select_pages as ladder.check_select calls it; races are failures."""
    select = functools.partial(module.select_pages, tuning=tuning, interpret=mode)
    select = jax.jit(select, static_argnames="max_selected", compiler_options=ladder.QUICK)

    def run(*args, **kwargs):
        out = jax.block_until_ready(select(*args, **kwargs))
        assert not (mode.detect_races and interpreter.races.races_found), "race"
        return out

    return run


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


def test_ties_go_to_the_lower_page():
    case = ladder.make_paged([37, 40, 41, 16], equal=True, head_dim=64)
    q, select = np.round(4 * queries(case, 2)) / 4, kernel()
    for k in (1, 3, 6):
        ladder.check_select(select, case, q, [k] * 4, 9)
    ladder.check_select(select, case, 0 * q, [3] * 4, 9)  # zeros of both signs inside


def test_zeros_of_both_signs_are_equal_and_negative_numbers_in_order():
    keys = module._ordered(jnp.array([-jnp.inf, -2, -1, -1e-30, -0.0, 0.0, 1e-30, 1, jnp.inf]))
    assert keys[4] == keys[5] and (np.diff(np.delete(keys, 4).astype(np.int64)) > 0).all()


def test_several_blocks_of_pages_and_of_the_list():
    """300 pages = 3 blocks of 128 in 2 groups, of which up to 153 are listed, in 2 blocks."""
    select = kernel(tuning=Tuning(unit=8, ring=4, group=2, digit=1))
    for equal in (False, True):
        case = ladder.make_paged([1201, 600], head_dim=128, kv_heads=1, equal=equal)
        ladder.check_select(select, case, np.round(4 * queries(case, 2)) / 4, [150, 20], 153)


def test_bfloat16_in_the_stored_form():
    """Keys in bfloat16 and pages of one token, so that landmarks are the keys, exactly."""
    case = ladder.make_paged([150, 40], head_dim=64, kv_heads=4, page_size=1)
    case.keys = [np.float32(jnp.bfloat16(k)) for k in case.keys]
    L, M, K, H = case.landmarks.shape
    case.landmarks = jnp.bfloat16(case.landmarks).reshape(L, M, K * H // 128, 128)
    q, select = jnp.bfloat16(queries(case, 2)), kernel()

    def in_bfloat16(q, *args, **kwargs):
        return select(jnp.bfloat16(q), *args, **kwargs)

    ladder.check_select(in_bfloat16, case, np.float32(q), [20, 9], 23)


FAULTY = Tuning(unit=2, ring=4, group=1, digit=1)
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


def last_candidate_missing(patch):
    patch.setattr(module, "_is_candidate", lambda page, n: (page >= 1) & (page < n - 3))


def negative_scores_reversed(patch):
    patch.setattr(module, "_ordered", lambda score: jax.lax.bitcast_convert_type(score, jnp.int32))


def rank_off_by_one(patch):
    search = module._search
    patch.setattr(module, "_search", lambda rank, entry: search(rank, entry - 1))


@pytest.mark.parametrize("fault", [
    no_wait, other_buffer, next_page, last_candidate_missing, negative_scores_reversed,
    rank_off_by_one,
])  # fmt: skip
def test_planted_faults_are_rejected(fault, monkeypatch):
    case = ladder.make_paged([43, 44], head_dim=128)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(tuning=FAULTY), case, queries(case, 2), [3, 4], 7)


@pytest.mark.parametrize(("fault", "match"), [(no_wait, "race"), (one_buffer, "not equal")])
def test_faults_of_timing_are_rejected_where_dmas_are_eager(fault, match, monkeypatch):
    case = ladder.make_paged([43], head_dim=128)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=match):
        ladder.check_select(kernel(EAGER, FAULTY), case, queries(case, 2), [3], 7)


def test_ties_to_the_higher_page_are_rejected(monkeypatch):
    ranks = module._ranks

    def from_the_end(chosen, upper, before):
        rank, total = ranks(chosen, upper, before)
        return (total - rank + 1 if calls.append(1) or len(calls) == 1 else rank), total

    calls = []
    case = ladder.make_paged([43], head_dim=128, equal=True)
    monkeypatch.setattr(module, "_ranks", from_the_end)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(tuning=FAULTY), case, np.round(queries(case, 2)), [3], 7)


@pytest.mark.parametrize(("change", "match"), [
    ({"q_BNH": np.zeros((2, 4, 96), np.float32)}, "landmarks"),
    ({"k_B": np.zeros(3, np.int32)}, "rows each"),
    ({"max_selected": 0}, "max_selected"),
    ({"tuning": Tuning(unit=48)}, "tuning"),
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
