"""What only kernels_triton.append_kv has: strides, any page size, float8 made by bit operations."""

import numpy as np
import pytest
import torch

from tests.kernels import ladder
from tests.kernels.packages import TRITON
from tests.kernels.test_append_kv import kernel, refuse, reject

module = TRITON.module("append_kv")


def test_pages_of_a_size_that_is_no_power_of_2():
    ladder.check_append(kernel(TRITON), [[7, 2], [3, 5]], page_size=3, kv_heads=1)


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


def test_float8_is_rounded_as_torch_does_and_saturates():
    """Numbers halfway between two float8 and beside that, subnormal numbers, both zeros."""
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


@pytest.mark.parametrize(("change", "match"), [
    ({"num_new": np.ones(2, np.int32)}, "rows each"),
    ({"k": torch.ones(1, 1, 2, 128)[..., ::2]}, "stride 1"),
])  # fmt: skip
def test_what_a_launch_cannot_take_is_refused(change, match):
    refuse(TRITON, change, match)


def one_token_less(c, lo, hi):
    return (c >= lo) & (c < hi - 1)


def from_the_start_of_the_page(c, lo, hi):
    return c < hi


@pytest.mark.parametrize("fault", [one_token_less, from_the_start_of_the_page])
def test_faults_are_rejected(fault, monkeypatch):
    reject(TRITON, "_is_fresh", fault, monkeypatch)


def test_landmarks_of_values_are_rejected():
    def swapped(kv, landmarks, layer, k, v, *args):
        kv, landmarks = module.append_kv(kv, landmarks, layer, v, k, *args)
        return kv.flip(3), landmarks

    with pytest.raises(AssertionError, match="landmarks"):
        ladder.check_append(ladder.on_torch(swapped), [[3, 5], [5, 4]], kv_heads=1)
