"""kernels_triton.sparse_decode, interpreted: output and log-sum-exp at 1e-5."""

import numpy as np
import pytest
import torch

from tests.kernels import ladder

pytest.importorskip("triton", reason="there is no triton for this machine")
from kernels_triton import sparse_decode as module  # noqa: E402
from kernels_triton.tuning import DecodeTuning, tune_decode  # noqa: E402

SMALL = DecodeTuning(tile=16, splits=2, least=1, num_warps=4, num_stages=2)
ONE = SMALL._replace(splits=1)
THREE = SMALL._replace(splits=3, least=2)
# Pages of 4, tiles of 4 pages: empty rows, one token, around a page and a tile, one to three tiles.
LENGTHS = [0, 1, 5, 16, 17, 43, 48]


def kernel(tuning=SMALL, **kwargs):
    return ladder.on_torch(module.sparse_decode, tuning=tuning, **kwargs)


@pytest.mark.parametrize(("head_dim", "ratio", "tuning"), [(128, 3, SMALL), (64, 8, ONE)])
def test_selected_pages(head_dim, ratio, tuning):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    q, k = ladder.random_queries(case, 1, ratio), [2, 0, 1, 1, 2, 5, 3]
    ladder.check_decode(kernel(tuning), case, q, 1, k, 8)


def test_selected_pages_and_several_new_tokens():
    """All queries of a row read the same list; the last two pages are always in it."""
    case = ladder.make_paged(LENGTHS, head_dim=32, kv_heads=1)
    new, k = np.array([1, 1, 3, 3, 0, 2, 3]), [2, 0, 1, 1, 2, 5, 3]
    ladder.check_decode(kernel(), case, ladder.random_queries(case, 3, 2), new, k, 8)


@pytest.mark.parametrize(("head_dim", "ratio", "tuning"), [(128, 5, THREE), (64, 1, SMALL)])
def test_page_table_and_several_new_tokens(head_dim, ratio, tuning):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim, kv_heads=3 - ratio // 2)
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30  # padding of the table is not read
    new = np.array([1, 1, 4, 3, 0, 5, 2])
    ladder.check_decode(kernel(tuning), case, ladder.random_queries(case, 5, ratio), new)


def test_more_queries_than_a_program_takes():
    case = ladder.make_paged([9, 43], head_dim=32, kv_heads=1)
    ladder.check_decode(kernel(), case, ladder.random_queries(case, 9, 8), np.array([9, 8]))


def test_pages_of_16_and_the_tuning_of_a_card():
    case = ladder.make_paged([2085, 64], head_dim=64, kv_heads=1, page_size=16)
    tuning = tune_decode(4, 64, programs=2, tokens=2128)
    assert tuning.splits == 16 and tuning.tile == 32
    ladder.check_decode(kernel(tuning), case, ladder.random_queries(case, 1, 2), 1)


POOL_ORDERS = {"blocks of all heads": (0, 2, 3, 4, 1, 5), "keys first": (3, 0, 2, 1, 4, 5)}


@pytest.mark.parametrize("order", POOL_ORDERS.values(), ids=POOL_ORDERS)
def test_layouts(order):
    """Views of other layouts of the pool and of the queries give the same."""
    case = ladder.make_paged([17, 43], head_dim=32)
    back = tuple(np.argsort(order))

    def decode(q, kv, *args):
        kv = kv.permute(order).contiguous().permute(back)
        q = q.transpose(0, 2).contiguous().transpose(0, 2)
        return module.sparse_decode(q, kv, *args, tuning=SMALL)

    ladder.check_decode(ladder.on_torch(decode), case, ladder.random_queries(case, 3, 2), 3)


def narrow(lengths, dtype, head_dim):
    """Case whose keys and values `dtype` holds exactly (NaN elsewhere), and its pool."""
    case = ladder.make_paged(lengths, head_dim=head_dim, page_size=16, kv_heads=1)
    for rows in (case.keys, case.values):
        rows[:] = [torch.from_numpy(x).to(dtype).float().numpy() for x in rows]
    return case, torch.from_numpy(case.kv_pages).to(dtype)


def errors(case, pool, q, keys, values, **options):
    """ladder.decode_errors of the kernel."""
    decode = ladder.on_torch(module.sparse_decode, tuning=SMALL, **options)
    return ladder.decode_errors(decode, case, pool, q, keys, values)


def test_float16():
    """Output within a few roundings of it (2^-12), the log-sum-exp without one."""
    case, pool = narrow([100, 1, 64], torch.float16, 128)
    q = torch.from_numpy(ladder.random_queries(case, 1, 2)).half()
    got = errors(case, pool, q, case.keys, case.values)
    assert got[0] < 1e-3 and got[1] < 1e-5, got


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 1e-6), (torch.float16, 2**-10)])
def test_float8_with_page_scales(dtype, roundings):
    """roundings: of the output, relative to the largest value."""
    case, pool = narrow([100, 1, 64], torch.float8_e4m3fn, 64)
    scales, keys, values = ladder.scaled_pages(case)
    q = torch.from_numpy(ladder.random_queries(case, 1, 2)).to(dtype)
    got = errors(case, pool, q, keys, values, page_scales_LKM=torch.from_numpy(scales))
    assert got[0] < roundings * max(np.abs(v).max() for v in values) and got[1] < 1e-5, got


def test_every_float8_number(monkeypatch):
    """One key of one number 1 per row: the output is the value, so all bytes are seen, as floats.

    By bit operations, and by Triton's conversion where it has one.
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pool = torch.zeros(1, 1, 3, 2, 1, 128).to(torch.float8_e4m3fn)
    pool[0, 0, 1:, 1, 0] = numbers.view(2, 128)
    table, one = torch.tensor([[1], [2]], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for convert in (False, True):
        monkeypatch.setattr(module, "_converts_float8", lambda x, convert=convert: convert)
        out, _ = module.sparse_decode(torch.ones(2, 1, 1, 128), pool, 0, table, 0 * one, one)
        finite = ~numbers.float().isnan()
        assert (out.flatten() == numbers.float())[finite].all()


def entry_before(token, C):
    return (token - 4).to(token.dtype) // C * (token >= 4)


def visible_one_longer(token, limit):
    return token < limit + 1


def last_tile_missing(tiles, split, splits, LEAST, right=module._share):
    return right(tiles - 1, split, splits, LEAST)


def first_tile_twice(tiles, split, splits, LEAST, right=module._share):
    first, last = right(tiles, split, splits, LEAST)
    return first * (split != 1), last


def all_splits_alike(lse, top):
    return 0.0 * lse + 1.0


def one_number_more(x, DOT, right=module._number):
    return right(x, DOT) * 1.0001


FAULTS = {
    "_entry": entry_before, "_visible": visible_one_longer, "_weight": all_splits_alike,
    "_number": one_number_more,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_rejected(name, monkeypatch):
    monkeypatch.setattr(module, name, FAULTS[name])
    case = ladder.make_paged([21, 43], kv_heads=1, head_dim=32)
    with pytest.raises(AssertionError):
        ladder.check_decode(kernel(), case, ladder.random_queries(case, 2, 1), 2)


@pytest.mark.parametrize("fault", [last_tile_missing, first_tile_twice])
def test_faulty_shares_are_rejected(fault, monkeypatch):
    monkeypatch.setattr(module, "_share", fault)
    case = ladder.make_paged([43], kv_heads=1, head_dim=32)
    with pytest.raises(AssertionError):
        ladder.check_decode(kernel(), case, ladder.random_queries(case, 1, 1), 1)


def test_tuning():
    """A full batch is not split, few rows are split as far as their lists allow."""
    assert tune_decode(2, 128, programs=64 * 8, tokens=4096).splits == 2
    assert tune_decode(2, 128, programs=128 * 8, tokens=40960).splits == 1
    assert tune_decode(2, 128, programs=8, tokens=131072).splits == 64
    assert tune_decode(2, 128, programs=8, tokens=1024).splits == 4
    assert tune_decode(2, 128, programs=8, tokens=16).splits == 1
    for itemsize, head_dim in ((2, 128), (1, 64), (4, 128), (2, 64)):
        t = tune_decode(itemsize, head_dim, programs=8, tokens=1024)
        in_flight = (t.num_stages - 2) * 2 * t.tile * head_dim * itemsize
        assert 2**14 <= in_flight and (t.num_stages - 1) * in_flight < 2**17


@pytest.mark.parametrize(("change", "message"), [
    ({"q": (2, 1, 4, 32)}, "kv_pages"), ({"q": (2, 1, 3, 64)}, "KV heads"),
    ({"ids": (2, 3, 4)}, "page_ids"), ({"scales": (1, 2, 5)}, "page_scales"),
    ({"pool": (1, 2, 5, 2, 16, 48), "q": (2, 1, 4, 48)}, "H=48"), ({"rows": (3,)}, "start_B"),
])  # fmt: skip
def test_mistakes_end_in_a_clear_error(change, message):
    shapes = {
        "q": (2, 1, 4, 64), "pool": (1, 2, 5, 2, 16, 64), "ids": (2, 2, 4), "rows": (2,),
        "scales": (1, 2, 5, 2), **change,
    }  # fmt: skip
    x = {name: torch.zeros(shape) for name, shape in shapes.items()}
    rows, ids = x["rows"].int(), x["ids"].int()
    with pytest.raises(ValueError, match=message):
        module.sparse_decode(x["q"], x["pool"], 0, ids, rows, rows, page_scales_LKM=x["scales"])
    if not change.get("scales"):
        with pytest.raises(ValueError, match="stride 1"):
            module.sparse_decode(
                torch.zeros(2, 1, 4, 128)[..., ::2], torch.zeros(1, 2, 5, 2, 16, 64), 0,
                torch.zeros(2, 4).int(), torch.zeros(2).int(), torch.zeros(2).int(),
            )  # fmt: skip
