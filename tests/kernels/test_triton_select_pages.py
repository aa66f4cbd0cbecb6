"""kernels_triton.select_pages, interpreted: page ids and counts exactly."""

import numpy as np
import pytest
import torch
import triton.language as tl

from common.schedule import DENSE
from kernels_triton import select_pages as module
from kernels_triton.tuning import SelectTuning, tune_select
from tests.kernels import ladder

SMALL = SelectTuning(score=8, count=4, list=4, num_warps=4)
"""So that 11 pages go through every loop."""
WHOLE = SelectTuning(score=4, count=16, list=8, num_warps=4)
LENGTHS = [0, 1, 4, 5, 9, 12, 13, 16, 17, 21, 43]  # pages of 4


def kernel(tuning=SMALL):
    return ladder.on_torch(module.select_pages, tuning=tuning)


def queries(case, ratio, seed=1):
    return ladder.random_queries(case, 1, ratio, seed)[:, 0]


@pytest.mark.parametrize(("ratio", "head_dim", "kv_heads", "tuning"), [
    (1, 32, 3, WHOLE), (3, 64, 2, SMALL), (5, 128, 1, WHOLE), (8, 128, 1, SMALL),
])  # fmt: skip
def test_every_length_ratio_and_shape(ratio, head_dim, kv_heads, tuning):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim, kv_heads=kv_heads)
    q, k = queries(case, ratio), np.full(len(LENGTHS), 2)
    ladder.check_select(kernel(tuning), case, q, k, 5)


def test_rows_have_budgets_of_their_own_and_padding_of_the_table_is_not_read():
    case = ladder.make_paged([41] * 9 + [2, 40, 41, 0], head_dim=64, kv_heads=1)
    for pages, n in zip(case.table_BP, case.num_pages_B, strict=True):
        pages[n:] = 2**30
    k = np.array([0, 1, 2, 4, 7, 8, 9, DENSE, 2**31 - 1, 5, 0, 3, 4])  # 11 pages: 8 candidates
    ladder.check_select(kernel(), case, queries(case, 2), k, 14)


@pytest.mark.parametrize("tuning", [SMALL, WHOLE])
def test_ties_go_to_the_lower_page(tuning):
    case = ladder.make_paged([37, 41, 41, 16], equal=True, head_dim=64, kv_heads=1)
    q, select = np.round(4 * queries(case, 2)) / 4, kernel(tuning)
    q[2] = 0  # zeros of both signs inside
    ladder.check_select(select, case, q, [1, 6, 3, 3], 9)


def test_ties_within_the_list():
    """Two values of the score, so that part of the equal ones is taken, in any block."""
    case = ladder.make_paged([61, 64, 64], head_dim=32, kv_heads=1, equal=True)
    for pages, keys in zip(case.table_BP, case.keys, strict=True):
        for page in (3, 6, 7, 11):
            keys[4 * page : 4 * page + 4] *= -1
            case.landmarks[ladder.LAYER, pages[page]] *= -1
    q = np.round(4 * queries(case, 1)) / 4
    ladder.check_select(kernel(WHOLE), case, q, [3, 5, 9], 12)


def test_several_blocks_of_pages_and_of_the_list():
    """300 pages in blocks of 64 and 128, of which up to 153 are listed; then in one block."""
    case = ladder.make_paged([1201, 600], head_dim=32, kv_heads=1)
    for tuning in (SelectTuning(64, 128, 64, 4), tune_select(302)):
        ladder.check_select(kernel(tuning), case, queries(case, 2), [150, 20], 153)


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


def last_candidate_missing(page, n):
    return (page >= 1) & (page < n - 3)


def negative_scores_reversed(score):
    return score.to(tl.int32, bitcast=True)


def one_page_less(num_pages_ptr, k_ptr, b, P, right=module._row):
    n, taken = right(num_pages_ptr, k_ptr, b, P)
    return n, taken - 1


def counts_one_too_many(*args, right=module._count):
    return right(*args) + 1


def only_the_first_block(keys_ptr, keys, trial, end, COUNT, WHOLE):
    return tl.sum((keys >= trial).to(tl.int32), 0)


FAULTS = {
    "_is_candidate": last_candidate_missing, "_ordered": negative_scores_reversed,
    "_row": one_page_less, "_count": only_the_first_block,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_rejected(name, monkeypatch):
    monkeypatch.setattr(module, name, FAULTS[name])
    case = ladder.make_paged([43, 44], head_dim=32, kv_heads=1)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(), case, queries(case, 2), [3, 4], 7)


def test_one_equal_page_too_many_is_rejected(monkeypatch):
    monkeypatch.setattr(module, "_count", counts_one_too_many)
    case = ladder.make_paged([43], head_dim=32, kv_heads=1, equal=True)
    with pytest.raises(AssertionError):
        ladder.check_select(kernel(), case, np.round(queries(case, 2)), [3], 7)


@pytest.mark.parametrize(("change", "match"), [
    ({"q_BNH": torch.zeros(2, 4, 32)}, "landmarks"), ({"k_B": torch.zeros(3).int()}, "rows each"),
    ({"q_BNH": torch.zeros(2, 3, 64)}, "landmarks"), ({"max_selected": 0}, "max_selected"),
    ({"page_table_BP": torch.zeros(5, 2).int().T}, "stride 1"),
])  # fmt: skip
def test_wrong_arguments(change, match):
    args = {
        "q_BNH": torch.zeros(2, 4, 64),
        "landmarks_LMKH": torch.zeros(1, 9, 2, 64),
        "layer": 0,
        "page_table_BP": torch.zeros(2, 5).int(),
        "num_pages_B": torch.zeros(2).int(),
        "k_B": torch.zeros(2).int(),
        "max_selected": 4,
    }
    with pytest.raises(ValueError, match=match):
        module.select_pages(**args | change)
