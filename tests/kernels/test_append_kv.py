"""append_kv of both packages, interpreted: the whole pool after every call."""

import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.layout import page_shape
from tests.kernels import ladder
from tests.kernels.packages import BOTH, EAGER, PALLAS, TRITON

ONE = [[1, 1, 0, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]
SEVERAL = [[9, 1, 6], [8, 9, 2], [0, 9, 9], [1, 1, 3]]  # pages of 4: whole, begun, completed


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Make Pallas handle two pages of two heads of 64 together, so that buffers are reused."""
    monkeypatch.setattr(PALLAS.module("append_kv"), "GROUP_BYTES", 2 * 2 * 2 * 4 * 64 * 4)


def kernel(package):
    return package.kernel("append_kv")


@pytest.mark.parametrize(("package", "pieces", "head_dim", "kv_heads"), [
    (PALLAS, ONE, 128, 1), (PALLAS, SEVERAL, 64, 1), (EAGER, ONE, 64, 4), (EAGER, SEVERAL, 128, 2),
    (TRITON, ONE, 128, 1), (TRITON, ONE, 64, 3), (TRITON, SEVERAL, 32, 2),
])  # fmt: skip
def test_tokens_and_landmarks_and_nothing_else(package, pieces, head_dim, kv_heads):
    ladder.check_append(kernel(package), pieces, head_dim=head_dim, kv_heads=kv_heads)


@pytest.mark.parametrize("package", BOTH)
def test_tokens_past_the_page_table_are_dropped(package):
    ladder.check_end_of_table(kernel(package))


@pytest.mark.parametrize("package", BOTH)
def test_the_null_page_and_rows_without_tokens_are_left_alone(package):
    """Padding rows of a batch list page 0 everywhere; the other row starts far past its table."""
    kv, marks = np.full((1, 1, 3, 2, 4, 64), 5, np.float32), np.full((1, 3, 1, 64), 5, np.float32)
    new, table = np.ones((2, 3, 1, 64), np.float32), np.array([[0, 0], [1, 2]], np.int32)
    start, count = np.array([3, 100], np.int32), np.array([0, 3], np.int32)
    for x in kernel(package)(kv, marks, 0, new, new, table, start, count):
        assert (np.asarray(x) == 5).all()


@pytest.mark.parametrize(("package", "dtype", "other"), [
    (PALLAS, "bfloat16", "bfloat16"), (PALLAS, "float8_e4m3fn", "bfloat16"),
    (TRITON, "float16", "float16"), (TRITON, "float8_e4m3fn", "float16"),
])  # fmt: skip
def test_narrow_types(package, dtype, other):
    """Rounded to the nearest; landmarks, of type `other`, are the mean of the keys as the cache
    holds them. Pallas takes tokens of that type, and pool and landmarks in the stored form."""
    B, T, K, H, C, M = 3, 7, 4 if package is PALLAS else 2, 64, 4, 12
    rng = np.random.default_rng(0)
    k, v, pool = (
        np.float32(rng.normal(size=shape)) for shape in ([B, T, K, H],) * 2 + ([2, K, M, 2, C, H],)
    )
    k, v = (package.array(x, other if package is PALLAS else None) for x in (k, v))
    pool = package.array(pool, dtype)
    marks = package.array(np.full((2, M, K, H), np.nan, np.float32), other)
    table = 1 + np.arange(9, dtype=np.int32).reshape(B, 3)
    start, new = np.array([2, 0, 5], np.int32), np.array([7, 4, 3], np.int32)
    want = package.wide(pool).copy()
    tokens = np.stack([package.wide(k), package.wide(v)], 2)
    for b in range(B):
        for t in range(int(new[b])):
            page, slot = table[b, (start[b] + t) // C], (start[b] + t) % C
            want[1, :, page, :, slot] = rounded(tokens[b, t], dtype).swapaxes(0, 1)
    if package is PALLAS:
        pool = pool.reshape(2, K, M, *page_shape(C, H))
        marks = marks.reshape(2, M, K * H // 128, 128)
    got, got_marks = kernel(package)(pool, marks, 1, k, v, table, start, new)
    got = package.wide(got).reshape(want.shape)
    got_marks = package.wide(got_marks).reshape(2, M, K, H)
    np.testing.assert_array_equal(got[:, :, 1:], want[:, :, 1:])
    mean = np.float64(want[1, :, :, 0]).mean(2).swapaxes(0, 1)
    done = [1, 2, 4, 8]  # pages 0 and 1 of row 0, 0 of row 1, 1 of row 2
    rounding = 2**-8 if other == "bfloat16" else 2**-10
    np.testing.assert_allclose(got_marks[1, done], mean[done], rtol=rounding, atol=1e-6)
    rest = np.setdiff1d(np.arange(1, M), done)
    assert np.isnan(got_marks[0]).all() and np.isnan(got_marks[1, rest]).all()


def rounded(x, dtype):
    return np.float32(x.astype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(("change", "match"), [
    ({"k": np.ones((1, 1, 1, 64), np.float32)}, "expected"),
    ({"marks": np.ones((2, 5, 2, 64), np.float32)}, "expected"),
])  # fmt: skip
def test_wrong_arguments(package, change, match):
    refuse(package, change, match)


def refuse(package, change, match):
    new, one = np.ones((1, 1, 2, 64), np.float32), np.ones(1, np.int32)
    kv, marks, table = ladder.empty_pool(1, 2, kv_heads=2, head_dim=64, page_size=4)
    args = {"kv": kv, "marks": marks, "layer": 1, "k": new, "v": new, "table": table, "start": one}
    args = args | {"num_new": one} | change
    with pytest.raises(ValueError, match=match):
        kernel(package)(*args.values())


def completes_early(hi, C):
    return hi == C - 1


def never_completes(hi, C):
    return hi > C


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("fault", [completes_early, never_completes])
def test_planted_faults_are_rejected(package, fault, monkeypatch):
    reject(package, "_completes", fault, monkeypatch)


@pytest.mark.parametrize("package", BOTH)
def test_without_a_fault_the_same_inputs_pass(package):
    check(package)


def reject(package, name, fault, patch):
    """Check that a fault in that function changes the pool or the landmarks."""
    package.plant(patch, f"append_kv.{name}", fault)
    with pytest.raises(AssertionError):
        check(package)


def check(package):
    ladder.check_append(kernel(package), [[3, 5], [5, 4]], head_dim=64)
