"""kernels_triton.append_kv, interpreted: the whole pool after every call."""

import numpy as np
import pytest
import torch

from tests.kernels import ladder

pytest.importorskip("triton", reason="there is no triton for this machine")
from kernels_triton import append_kv as module  # noqa: E402

ONE = [[1, 1, 0, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]
SEVERAL = [[9, 1, 6], [8, 9, 2], [0, 9, 9], [1, 1, 3]]  # pages of 4: whole, begun, completed

kernel = ladder.on_torch(module.append_kv)


@pytest.mark.parametrize(("pieces", "head_dim", "kv_heads"), [
    (ONE, 128, 1), (ONE, 64, 3), (SEVERAL, 32, 2),
])  # fmt: skip
def test_tokens_and_landmarks_and_nothing_else(pieces, head_dim, kv_heads):
    ladder.check_append(kernel, pieces, head_dim=head_dim, kv_heads=kv_heads)


def test_pages_of_a_size_that_is_no_power_of_2():
    ladder.check_append(kernel, [[7, 2], [3, 5]], page_size=3, kv_heads=1)


def test_tokens_past_the_page_table_are_dropped():
    ladder.check_end_of_table(kernel)


def test_the_null_page_and_rows_without_tokens_are_left_alone():
    """Padding rows of a batch list page 0 everywhere; the other row starts far past its table."""
    kv, marks = torch.full((1, 1, 3, 2, 4, 16), 5.0), torch.full((1, 3, 1, 16), 5.0)
    new, table = torch.ones(2, 3, 1, 16), torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    start, count = torch.tensor([3, 100]).int(), torch.tensor([0, 3]).int()
    module.append_kv(kv, marks, 0, new, new, table, start, count)
    assert (kv == 5).all() and (marks == 5).all()


def test_layouts():
    """Views of a pool [M, 2, C, K, H], of landmarks [K, M, H], of keys beside their values."""

    def append(kv, landmarks, layer, k, v, *args):
        kv_view = kv.permute(0, 2, 3, 4, 1, 5).contiguous().permute(0, 4, 1, 2, 3, 5)
        marks_view = landmarks.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        K = k.shape[2]
        both = torch.cat([k, v], 2)
        got = module.append_kv(kv_view, marks_view, layer, both[:, :, :K], both[:, :, K:], *args)
        assert got[0] is kv_view and got[1] is marks_view
        return got

    ladder.check_append(ladder.on_torch(append), [[9, 1], [2, 9]], head_dim=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_narrow_types(dtype):
    """Bits as torch rounds them; landmarks are the mean of the keys as the cache holds them."""
    B, T, K, H, C, M = 3, 7, 2, 32, 4, 12
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, T, K, H, generator=rng) for _ in range(2))
    pool = torch.randn(2, K, M, 2, C, H, generator=rng).to(dtype)
    marks = torch.full((2, M, K, H), torch.nan).half()
    table = 1 + torch.arange(9).int().reshape(B, 3)
    start, new = torch.tensor([2, 0, 5]).int(), torch.tensor([7, 4, 3]).int()
    want = pool.clone()
    for b in range(B):
        for t in range(int(new[b])):
            page, slot = table[b, (start[b] + t) // C], (start[b] + t) % C
            want[1, :, page, :, slot] = torch.stack([k[b, t], v[b, t]], 1).to(dtype)
    module.append_kv(pool, marks, 1, k, v, table, start, new)
    assert (pool.float() == want.float()).all()
    mean = want[1, :, :, 0].double().mean(2).transpose(0, 1)
    done = [1, 2, 4, 8]  # pages 0 and 1 of row 0, 0 of row 1, 1 of row 2
    np.testing.assert_allclose(marks[1, done].double(), mean[done], rtol=2**-10, atol=1e-6)
    rest = np.setdiff1d(np.arange(M), done)
    assert marks[0].isnan().all() and marks[1, rest].isnan().all()


def test_float8_is_rounded_as_torch_does_and_saturates():
    """Halfway between neighbours and just beside that; subnormal numbers; zeros of both signs."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, halves, halves.nextafter(numbers[1:]), halves.nextafter(numbers[:-1])])
    x = torch.cat([x, -x])[: 1008 - 8]
    x = torch.cat([x, torch.tensor([449.0, -1e9, torch.inf, -torch.inf, 1e-30, -1e-30, 0, 0])])
    new = torch.nn.functional.pad(x, (0, 16)).reshape(1, 8, 1, 128)
    pool = torch.zeros(1, 1, 2, 2, 8, 128).to(torch.float8_e4m3fn)
    table, start = torch.ones(1, 1).int(), torch.zeros(1).int()
    module.append_kv(pool, torch.zeros(1, 2, 1, 128), 0, new, new, table, start, start + 8)
    want = new.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert (pool.view(torch.uint8)[0, 0, 1] == want[0, :, 0]).all()


def test_shapes_that_do_not_belong_together_are_refused():
    kv, marks, table = map(torch.tensor, ladder.empty_pool(
        1, 2, kv_heads=2, head_dim=64, page_size=4))  # fmt: skip
    new, one = torch.ones(1, 1, 2, 64), torch.ones(1).int()
    for pool, landmarks, k in ((kv, marks, new[:, :, :1]), (kv, marks[:, 1:], new)):
        with pytest.raises(ValueError, match="expected"):
            module.append_kv(pool, landmarks, 1, k, new, table, one, one)
    with pytest.raises(ValueError, match="rows each"):
        module.append_kv(kv, marks, 1, new, new, table, one, torch.ones(2).int())
    with pytest.raises(ValueError, match="stride 1"):
        module.append_kv(kv, marks, 1, new.repeat(1, 1, 1, 2)[..., ::2], new, table, one, one)


def completes_early(hi, C):
    return hi == C - 1


def never_completes(hi, C):
    return hi > C


def one_token_less(c, lo, hi):
    return (c >= lo) & (c < hi - 1)


def from_the_start_of_the_page(c, lo, hi):
    return c < hi


FAULTS = [
    ("_completes", completes_early), ("_completes", never_completes),
    ("_is_fresh", one_token_less), ("_is_fresh", from_the_start_of_the_page),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_faults_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_append(kernel, [[3, 5], [5, 4]], kv_heads=1)


def test_landmarks_of_values_are_rejected():
    def swapped(kv, landmarks, layer, k, v, *args):
        kv, landmarks = module.append_kv(kv, landmarks, layer, v, k, *args)
        return kv.flip(3), landmarks

    with pytest.raises(AssertionError, match="landmarks"):
        ladder.check_append(ladder.on_torch(swapped), [[3, 5], [5, 4]], kv_heads=1)
