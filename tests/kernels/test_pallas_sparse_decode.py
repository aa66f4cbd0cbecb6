"""kernels_pallas.sparse_decode, interpreted: output and log-sum-exp at 1e-5, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import decode_block
from kernels_pallas import sparse_decode as module
from kernels_pallas.tuning import DecodeTuning, tune_decode
from tests.kernels import ladder
from tests.kernels.ladder import EAGER, ON_WAIT

SMALL = DecodeTuning(pages_per_block=2, num_buffers=4)
PAIR = DecodeTuning(pages_per_block=2, num_buffers=2)
# Pages of 4, blocks of 2 pages: empty rows before, between and after others, one token, around one
# page, one block, rows of fewer blocks than buffers and of more, whole pages and part-filled ones.
LENGTHS = [0, 1, 5, 8, 0, 0, 43, 48, 3, 16, 21, 0]


def kernel(mode=ON_WAIT, tuning=SMALL, **kwargs):
    return ladder.interpreted(module.sparse_decode, mode, tuning=tuning, **kwargs)


@pytest.mark.parametrize(("head_dim", "ratio", "mode"), [(128, 3, ON_WAIT), (64, 8, EAGER)])
def test_selected_pages(head_dim, ratio, mode):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    q, k = ladder.random_queries(case, 1, ratio), [2, 0, 1, 2, 2, 2, 5, 3, 2, 1, 2, 2]
    ladder.check_decode(kernel(mode), case, q, 1, k, 8)


def test_selected_pages_and_several_new_tokens():
    """All queries of a row read the same list; the last two pages are always in it."""
    case = ladder.make_paged(LENGTHS, head_dim=64)
    new = np.array([1, 1, 3, 3, 0, 2, 2, 3, 2, 1, 1, 0])
    k = [2, 0, 1, 2, 2, 2, 5, 3, 2, 1, 2, 2]
    ladder.check_decode(kernel(), case, ladder.random_queries(case, 3, 2), new, k, 8)


@pytest.mark.parametrize(("head_dim", "ratio", "mode"), [(128, 4, EAGER), (64, 2, ON_WAIT)])
def test_page_table_and_several_new_tokens(head_dim, ratio, mode):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    q = ladder.random_queries(case, 5, ratio)
    new = np.array([1, 1, 5, 3, 0, 2, 5, 5, 2, 4, 1, 0])
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30  # padding of the table is not read
    decode = kernel(mode)
    ladder.check_decode(decode, case, q, new)
    ladder.check_decode(decode, case, q, 5)


def rounded(lengths, dtype, head_dim, seed=0):
    """Case with queries and a pool that `dtype` holds exactly (NaN elsewhere), and that pool."""
    case = ladder.make_paged(lengths, head_dim=head_dim, page_size=16, seed=seed)
    for rows in (case.keys, case.values):
        rows[:] = [np.asarray(jnp.asarray(x, dtype), np.float32) for x in rows]
    return case, jnp.asarray(case.kv_pages, dtype)


def test_bfloat16():
    """Output within a few roundings of it (2^-9), the log-sum-exp without one."""
    case, pool = rounded([100, 1, 64], jnp.bfloat16, 128)
    q = jnp.asarray(ladder.random_queries(case, 1, 2), jnp.bfloat16)
    got = ladder.decode_errors(kernel(), case, pool, q, case.keys, case.values)
    assert got[0] < 8e-3 and got[1] < 1e-5


@pytest.mark.parametrize(("dtype", "roundings"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
def test_float8_with_page_scales_and_more_than_2048_tokens(dtype, roundings):
    """roundings: of the output, relative to the largest value."""
    case, pool = rounded([2085, 1, 64], jnp.float8_e4m3fn, 64)
    scales, keys, values = ladder.scaled_pages(case)
    q = jnp.asarray(ladder.random_queries(case, 1, 2), dtype)
    got = ladder.decode_errors(kernel(page_scales_LKM=scales), case, pool, q, keys, values)
    assert got[0] < roundings * max(np.abs(v).max() for v in values) and got[1] < 1e-5, got


def no_wait(buf_ref, sem_ref):
    pass


def wrong_buffer(page_ref, buf_refs, slot, odd, j, sem_ref):
    """The one after the right one: with two buffers, the one that is being read."""
    return pltpu.make_async_copy(
        page_ref, buf_refs[1 - odd].at[jax.lax.div(slot, 2), j], sem_ref.at[slot]
    )


def page_before(ids_ref, j):
    return ids_ref[jnp.maximum(j - 1, 0)]


def visible_one_longer(*args, visible=decode_block.visible):
    *args, start, length, shape = args
    return visible(*args, start + 1, length + 1, shape)


FAULTS = [
    (module, "_wait", no_wait), (module, "_page_copy", wrong_buffer),
    (module, "_page_id", page_before), (decode_block, "visible", visible_one_longer),
]  # fmt: skip


@pytest.mark.parametrize("mode", [ON_WAIT, EAGER])
def test_without_a_fault_the_same_inputs_pass(mode):
    case = ladder.make_paged([21, 43], kv_heads=1, head_dim=128)
    ladder.check_decode(kernel(mode, PAIR), case, ladder.random_queries(case, 1, 1), 1)


@pytest.mark.parametrize(("file", "name", "fault"), FAULTS)
def test_faults_are_rejected(file, name, fault, monkeypatch):
    monkeypatch.setattr(file, name, fault)
    case = ladder.make_paged([21, 43], kv_heads=1, head_dim=128)
    with pytest.raises(AssertionError):
        ladder.check_decode(kernel(tuning=PAIR), case, ladder.random_queries(case, 1, 1), 1)


def test_missing_wait_is_a_race(monkeypatch):
    monkeypatch.setattr(module, "_wait", no_wait)
    case = ladder.make_paged([21, 43], kv_heads=1, head_dim=128)
    with pytest.raises(AssertionError, match="race"):
        ladder.check_decode(kernel(EAGER, PAIR), case, ladder.random_queries(case, 1, 1), 1)


def test_tuning_keeps_enough_in_flight():
    for chip in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "cpu"):
        for dtype, head_dim in ((jnp.bfloat16, 128), (jnp.float8_e4m3fn, 64), (jnp.float32, 128)):
            t = tune_decode(dtype, head_dim, 16, chip)
            page = 32 * head_dim * jnp.dtype(dtype).itemsize
            in_flight = (t.num_buffers - 1) * t.pages_per_block * page
            assert 2**17 <= in_flight and t.num_buffers * t.pages_per_block * page <= 2**22


@pytest.mark.parametrize(("change", "message"), [
    ({"q": (2, 1, 4, 32)}, "head dim"), ({"q": (2, 1, 3, 64)}, "KV heads"),
    ({"ids": (2, 3, 4)}, "page_ids"), ({"scales": (1, 2, 5)}, "page_scales"),
])  # fmt: skip
def test_mistakes_end_in_a_clear_error(change, message):
    shapes = {"q": (2, 1, 4, 64), "ids": (2, 2, 4), "scales": (1, 2, 5, 2), **change}
    pool = jnp.zeros((1, 2, 5, 2, 16, 64))
    rows = jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match=message):
        module.sparse_decode(
            jnp.zeros(shapes["q"]), pool, 0, jnp.zeros(shapes["ids"], jnp.int32), rows, rows,
            page_scales_LKM=jnp.zeros(shapes["scales"]),
        )  # fmt: skip
