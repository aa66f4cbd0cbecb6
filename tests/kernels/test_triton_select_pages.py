"""What only kernels_triton.select_pages has: layouts, sums of float16, its search."""

import numpy as np
import pytest
import torch

from tests.kernels import ladder
from tests.kernels.packages import TRITON
from tests.kernels.test_select_pages import queries, refuse, reject

tl = pytest.importorskip("triton.language", reason="there is no triton for this machine")
module = TRITON.module("select_pages")


def strided(x, order):
    """The same numbers and axes, laid out in another order of the axes."""
    return x.permute(order).contiguous().permute(tuple(np.argsort(order)))


def test_layouts():
    case = ladder.make_paged([41, 44], head_dim=64, kv_heads=2)

    def select(q, landmarks, *args, **kwargs):
        landmarks = torch.cat([landmarks, landmarks], 3)[..., :64]
        return module.select_pages(strided(q, (1, 0, 2)), landmarks, *args, **kwargs)

    ladder.check_select(ladder.on_torch(select), case, queries(case, 2), [3, 4], 7)

    def heads_first(q, landmarks, *args, **kwargs):
        return module.select_pages(q, strided(landmarks, (2, 0, 1, 3)), *args, **kwargs)

    ladder.check_select(ladder.on_torch(heads_first), case, queries(case, 2), [3, 4], 7)


def test_float16_landmarks_are_summed_in_float32():
    """Landmarks in 64ths and queries in 4ths are exact in float16, their products are not."""
    case = ladder.make_paged([1201, 600], head_dim=128, kv_heads=1)
    marks = case.landmarks[ladder.LAYER]
    case.landmarks[ladder.LAYER] = np.round(marks * 64) / 64
    for pages, keys in zip(case.table_BP, case.keys, strict=True):
        whole = len(keys) // 4
        keys[: 4 * whole] = np.repeat(case.landmarks[ladder.LAYER, pages[:whole]], 4, 0)

    def select(q, landmarks, *args, **kwargs):
        return module.select_pages(q.half(), landmarks.half(), *args, **kwargs)

    q = np.round(4 * queries(case, 4)) / 4
    ladder.check_select(ladder.on_torch(select), case, q, [150, 20], 153)


def one_page_less(num_pages_ptr, k_ptr, b, P, right):
    n, taken = right(num_pages_ptr, k_ptr, b, P)
    return n, taken - 1


def counts_one_too_many(*args, right):
    return right(*args) + 1


def only_the_first_block(keys_ptr, keys, trial, end, COUNT, WHOLE):
    return tl.sum((keys >= trial).to(tl.int32), 0)


@pytest.mark.parametrize(("place", "fault", "equal"), [
    ("select_pages._row", one_page_less, False),
    ("select_pages._count", only_the_first_block, False),
    ("select_pages._count", counts_one_too_many, True),  # one equal page too many
])  # fmt: skip
def test_planted_faults_are_rejected(place, fault, equal, monkeypatch):
    reject(TRITON, place, fault, monkeypatch, equal=equal)


def test_a_table_with_gaps_is_refused():
    refuse(TRITON, {"page_table_BP": np.zeros((5, 2), np.int32).T}, "stride 1")
