"""kernels_pallas.append_kv, interpreted: the whole pool after every call, in both modes."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import append_kv as module
from kernels_pallas import reference
from tests.kernels import ladder
from tests.kernels.ladder import EAGER, ON_WAIT

ONE = [[1, 1, 0, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]
SEVERAL = [[9, 1, 6], [8, 9, 2], [0, 9, 9], [1, 1, 3]]  # pages of 4: whole, begun, completed


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two pages of two heads of 64 at once, so that the calls below reuse every buffer."""
    monkeypatch.setattr(module, "GROUP_BYTES", 2 * 2 * 2 * 4 * 64 * 4)


def kernel(mode=ON_WAIT):
    return ladder.interpreted(module.append_kv, mode)


@pytest.mark.parametrize(("pieces", "head_dim", "kv_heads", "mode"), [
    (ONE, 128, 1, ON_WAIT), (ONE, 64, 4, EAGER),
    (SEVERAL, 64, 1, ON_WAIT), (SEVERAL, 128, 2, EAGER),
])  # fmt: skip
def test_tokens_and_landmarks_and_nothing_else(pieces, head_dim, kv_heads, mode):
    ladder.check_append(kernel(mode), pieces, head_dim=head_dim, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_types_in_the_stored_form(dtype):
    """Rows of 128 lanes for pool and landmarks; NaN where nothing is written, bits as they came."""
    B, T, K, H, C, M = 3, 7, 4, 64, 4, 12
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(B, T, K, H)), jnp.bfloat16) for _ in range(2))
    pool = jnp.asarray(rng.normal(size=(2, K, M, *reference.page_shape(C, H))), dtype)
    marks = jnp.full((2, M, K * H // 128, 128), jnp.nan, jnp.bfloat16)
    table = 1 + jnp.arange(9, dtype=jnp.int32).reshape(B, 3)
    start, new = jnp.array([2, 0, 5], jnp.int32), jnp.array([7, 4, 3], jnp.int32)
    args = k, v, table, start, new
    got, got_marks = kernel()(pool, marks, 1, *args)
    want, want_marks = reference.append_kv(pool, marks, 1, *args)
    bits = jnp.uint8 if dtype == jnp.float8_e4m3fn else jnp.uint16
    same = got.view(bits)[:, :, 1:] == want.view(bits)[:, :, 1:]
    assert same.all()
    keys = np.float64(reference.logical_pages(want, H)[1, :, :, 0].astype(jnp.float32))
    mean = keys.mean(2).swapaxes(0, 1)
    done = [1, 2, 4, 8]  # pages 0 and 1 of row 0, 0 of row 1, 1 of row 2
    got_marks = np.float64(got_marks.reshape(2, M, K, H).astype(jnp.float32))
    np.testing.assert_allclose(got_marks[1, done], mean[done], rtol=2**-8, atol=1e-6)
    rest = np.setdiff1d(np.arange(1, M), done)
    assert np.isnan(got_marks[0]).all() and np.isnan(got_marks[1, rest]).all()
    assert np.isfinite(np.float64(want_marks[1, jnp.array(done)].astype(jnp.float32))).all()


def test_tokens_past_the_page_table_are_dropped():
    ladder.check_end_of_table(kernel())


def test_shapes_that_do_not_belong_together_are_refused():
    kv, marks, table = ladder.empty_pool(1, 2, kv_heads=2, head_dim=64, page_size=4)
    new, one = np.ones((1, 1, 2, 64), np.float32), np.ones(1, np.int32)
    for pool, landmarks, k in ((kv, marks, new[:, :, :1]), (kv, marks[:, 1:], new)):
        with pytest.raises(ValueError, match="expected"):
            module.append_kv(pool, landmarks, 1, k, new, table, one, one)
    with pytest.raises(ValueError, match="larger page"):
        module.append_kv(kv[..., :1, :], marks, 1, new, new, table, one, one)


def no_wait(copy):
    pass


def same_buffer(group):
    return 0


def read_unless_completed(lo, hi, C):
    """The old tokens of a page that the new ones complete are not kept."""
    return (lo < hi) & (hi < C)


def completes_early(hi, C):
    return hi == C - 1


def never_completes(hi, C):
    return hi > C


def next_page(table, start, num, T, C, right=module._items):
    return right(table, start + C, num, T, C)


def one_token_less(old, new, lo, hi, H, right=module._merge):
    return right(old, new, lo, hi - 1, H)


def mean_of_values(page, H, lanes, right=module._mean_key):
    return right(jnp.roll(page, page.shape[1] // 2, 1), H, lanes)


FAULTS = [
    ("_wait_read", no_wait), ("_wait_write", no_wait), ("_slot", same_buffer),
    ("_is_partial", read_unless_completed), ("_completes", completes_early),
    ("_completes", never_completes), ("_items", next_page), ("_merge", one_token_less),
    ("_mean_key", mean_of_values),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_faults_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_append(kernel(), [[3, 5], [5, 4]], head_dim=64)


@pytest.mark.parametrize(("name", "fault"), FAULTS[:3])
def test_faults_of_timing_are_races(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError, match="race"):
        ladder.check_append(kernel(EAGER), [[3, 5, 5, 4]], head_dim=64)
