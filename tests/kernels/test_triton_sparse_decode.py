"""What only kernels_triton.sparse_decode has: layouts, splits, float8 by its bits, tunings."""

import numpy as np
import pytest
import torch

from tests.kernels import ladder
from tests.kernels.packages import TRITON
from tests.kernels.test_sparse_decode import kernel, refuse, reject

pytest.importorskip("triton", reason="there is no triton for this machine")
from kernels_triton.tuning import tune_decode  # noqa: E402

module = TRITON.module("sparse_decode")
SMALL = TRITON.small["sparse_decode"]


def test_more_queries_than_a_program_takes():
    case = ladder.make_paged([9, 43], head_dim=32, kv_heads=1)
    ladder.check_decode(kernel(TRITON), case, ladder.random_queries(case, 9, 8), np.array([9, 8]))


def test_pages_of_16_and_the_tuning_of_a_card():
    case = ladder.make_paged([2085, 64], head_dim=64, kv_heads=1, page_size=16)
    tuning = tune_decode(4, 64, programs=2, tokens=2128)
    assert tuning.splits == 16 and tuning.tile == 32
    ladder.check_decode(kernel(TRITON, tuning=tuning), case, ladder.random_queries(case, 1, 2), 1)


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


def test_every_float8_number(monkeypatch):
    """One key per row: the output is its value, so that every byte of float8 is decoded.

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


FAULTS = [
    ("_entry", entry_before), ("_visible", visible_one_longer), ("_weight", all_splits_alike),
    ("_number", one_number_more),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_faults_are_rejected(name, fault, monkeypatch):
    reject(TRITON, f"sparse_decode.{name}", fault, monkeypatch)


@pytest.mark.parametrize("fault", [last_tile_missing, first_tile_twice])
def test_faulty_shares_are_rejected(fault, monkeypatch):
    reject(TRITON, "sparse_decode._share", fault, monkeypatch, lengths=[43])


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


@pytest.mark.parametrize(("change", "match"), [
    ({"pool": (1, 2, 5, 2, 16, 48), "q": (2, 1, 4, 48)}, "H=48"), ({"rows": (3,)}, "start_B"),
])  # fmt: skip
def test_what_a_launch_cannot_take_is_refused(change, match):
    refuse(TRITON, change, match)


def test_queries_of_distant_numbers_are_refused():
    rows, ids = torch.zeros(2).int(), torch.zeros(2, 4).int()
    with pytest.raises(ValueError, match="stride 1"):
        module.sparse_decode(
            torch.zeros(2, 1, 4, 128)[..., ::2], torch.zeros(1, 2, 5, 2, 16, 64), 0, ids, rows, rows
        )
