"""sparse_decode of both packages, interpreted: output and log-sum-exp at 1e-5."""

import numpy as np
import pytest

from kernels_pallas import tuning as pallas
from tests.kernels import ladder
from tests.kernels.packages import BOTH, EAGER, PALLAS, TRITON

# Pages of 4, blocks of 2 pages in Pallas and of 4 in Triton: empty rows before, between and after
# others, one token, around one page and one block, rows of fewer blocks than buffers and of more.
LENGTHS = [0, 1, 5, 8, 0, 0, 43, 48, 3, 16, 17, 0]
K = [2, 0, 1, 2, 2, 2, 5, 3, 2, 1, 2, 2]
ONE = {"tuning": TRITON.small["sparse_decode"]._replace(splits=1)}
THREE = {"tuning": TRITON.small["sparse_decode"]._replace(splits=3, least=2)}
PAIR = {"tuning": pallas.DecodeTuning(pages_per_block=2, num_buffers=2)}
"""With the fewest buffers, a copy started too early overwrites the buffer in use."""
FAULTY, HEAD_DIM = {PALLAS: PAIR, EAGER: PAIR, TRITON: {}}, {PALLAS: 128, EAGER: 128, TRITON: 32}


def kernel(package, **options):
    return package.kernel("sparse_decode", **options)


@pytest.mark.parametrize(("package", "head_dim", "ratio", "options"), [
    (PALLAS, 128, 3, {}), (EAGER, 64, 8, {}), (TRITON, 128, 3, {}), (TRITON, 64, 8, ONE),
])  # fmt: skip
def test_selected_pages(package, head_dim, ratio, options):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    q = ladder.random_queries(case, 1, ratio)
    ladder.check_decode(kernel(package, **options), case, q, 1, K, 8)


@pytest.mark.parametrize(("package", "head_dim"), [(PALLAS, 64), (TRITON, 32)])
def test_selected_pages_and_several_new_tokens(package, head_dim):
    """All queries of a row read one list, which always has the last two pages."""
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    new = np.array([1, 1, 3, 3, 0, 2, 2, 3, 2, 1, 1, 0])
    ladder.check_decode(kernel(package), case, ladder.random_queries(case, 3, 2), new, K, 8)


@pytest.mark.parametrize(("package", "head_dim", "ratio", "kv_heads", "options"), [
    (EAGER, 128, 4, 2, {}), (PALLAS, 64, 2, 2, {}), (TRITON, 128, 5, 1, THREE),
    (TRITON, 64, 1, 3, {}),
])  # fmt: skip
def test_page_table_and_several_new_tokens(package, head_dim, ratio, kv_heads, options):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim, kv_heads=kv_heads)
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30  # padding of the table is not read
    q, decode = ladder.random_queries(case, 5, ratio), kernel(package, **options)
    ladder.check_decode(decode, case, q, np.array([1, 1, 5, 3, 0, 2, 5, 5, 2, 4, 1, 0]))
    if package is not TRITON:  # compiled once
        ladder.check_decode(decode, case, q, 5)


def rounded(package, lengths, dtype, head_dim):
    """Case with keys and values that `dtype` holds exactly, and its pool (NaN elsewhere)."""
    case = ladder.make_paged(
        lengths, head_dim=head_dim, page_size=16, kv_heads=1 + (package is not TRITON)
    )
    for rows in (case.keys, case.values):
        rows[:] = [package.wide(package.array(x, dtype)) for x in rows]
    return case, package.array(case.kv_pages, dtype)


@pytest.mark.parametrize(("package", "dtype", "limit"), [
    (PALLAS, "bfloat16", 8e-3), (TRITON, "float16", 1e-3),
])  # fmt: skip
def test_two_bytes(package, dtype, limit):
    """The output is within a few roundings (2^-9 and 2^-12); the log-sum-exp is not rounded."""
    case, pool = rounded(package, [100, 1, 64], dtype, 128)
    q = package.array(ladder.random_queries(case, 1, 2), dtype)
    got = ladder.decode_errors(kernel(package), case, pool, q, case.keys, case.values)
    assert got[0] < limit and got[1] < 1e-5, got


@pytest.mark.parametrize(("package", "longest", "dtype", "roundings"), [
    (PALLAS, 2085, "float32", 1e-6), (PALLAS, 2085, "bfloat16", 2**-8),
    (TRITON, 100, "float32", 1e-6), (TRITON, 100, "float16", 2**-10),
])  # fmt: skip
def test_float8_with_page_scales(package, longest, dtype, roundings):
    """roundings: accepted error of the output, relative to the largest value."""
    case, pool = rounded(package, [longest, 1, 64], "float8_e4m3fn", 64)
    scales, keys, values = ladder.scaled_pages(case)
    q = package.array(ladder.random_queries(case, 1, 2), dtype)
    decode = kernel(package, page_scales_LKM=package.array(scales))
    got = ladder.decode_errors(decode, case, pool, q, keys, values)
    assert got[0] < roundings * max(np.abs(v).max() for v in values) and got[1] < 1e-5, got


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(("change", "match"), [
    ({"q": (2, 1, 3, 64)}, "KV heads"), ({"q": (2, 1, 4, 32)}, "head dim|kv_pages"),
    ({"ids": (2, 3, 4)}, "page_ids"), ({"scales": (1, 2, 5)}, "page_scales"),
])  # fmt: skip
def test_wrong_arguments(package, change, match):
    refuse(package, change, match)


def refuse(package, change, match):
    shapes = {"q": (2, 1, 4, 64), "pool": (1, 2, 5, 2, 16, 64), "ids": (2, 2, 4), "rows": (2,)}
    shapes = shapes | {"scales": (1, 2, 5, 2)} | change
    x = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    rows, ids = x["rows"].astype(np.int32), x["ids"].astype(np.int32)
    decode = kernel(package, page_scales_LKM=package.array(x["scales"]))
    with pytest.raises(ValueError, match=match):
        decode(x["q"], x["pool"], 0, ids, rows, rows)


@pytest.mark.parametrize("package", [PALLAS, EAGER, TRITON])
def test_without_a_fault_the_inputs_of_faults_pass(package):
    check(package)


def reject(package, place, fault, patch, match=None, **inputs):
    """Check that a fault in that function changes the result, or causes a race."""
    package.plant(patch, place, fault)
    with pytest.raises(AssertionError, match=match):
        check(package, **inputs)


def check(package, *, lengths=(21, 43)):
    case = ladder.make_paged(list(lengths), kv_heads=1, head_dim=HEAD_DIM[package])
    q = ladder.random_queries(case, 1, 1)
    ladder.check_decode(kernel(package, **FAULTY[package]), case, q, 1)
