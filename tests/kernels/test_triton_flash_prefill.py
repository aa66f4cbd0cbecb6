"""What only kernels_triton.flash_prefill has: strides, its words of pages; its faults."""

import numpy as np
import pytest
import torch

from common import oracles
from tests.kernels import ladder
from tests.kernels.packages import TRITON
from tests.kernels.test_flash_prefill import (  # noqa: F401
    blocks,
    check_backward,
    check_forward,
    check_pages,
    kinds,
    long_inputs,
    refuse,
    reject,
)

triton = pytest.importorskip("triton", reason="there is no triton for this machine")
import triton.language as tl  # noqa: E402

module, page_words = TRITON.module("flash_prefill"), TRITON.module("page_words")


@pytest.mark.parametrize("sparse", [False, True])
def test_log_sum_exp(sparse):
    q, k, v = ladder.prefill_inputs(2, head_dim=16, num_tokens=39, rows=1)
    words = None
    if sparse:
        schedule = map(np.int64, kinds(sparse))
        words = page_words.page_words(*map(torch.from_numpy, (q, k, *schedule)), 4, 16)
    tensors, tuning = map(torch.from_numpy, (q, k, v)), TRITON.small["flash_prefill"][0]
    lse_BNT = module._forward(*tensors, words, 4 * sparse, tuning)[1]
    masks = ladder.prefill_oracle(q, k, v, *kinds(sparse))[1]
    ladder.close(lse_BNT[0].T, oracles.attention(q[0], k[0], v[0], masks[0])[1])


@pytest.mark.parametrize("page", [1, 4, 16, 32])
def test_pages_of_long_sequences_exactly(page):
    q, k, _, budgets, sparse = long_inputs()
    tensors = map(torch.from_numpy, (q, k, budgets.astype(np.int64), sparse))
    check_pages(page_words.page_words(*tensors, page, 48), 32, page)


def test_parts_of_one_array():
    """q, k and v are views of one array with NaN between them; the gradient is an expanded view.

    Two rows, two KV heads and two heads each.
    """
    q, k, v = ladder.prefill_inputs(2, head_dim=16, num_tokens=20, rows=2, kv_heads=2)
    whole = torch.full((2, 25, 9, 24), torch.nan)
    parts = [whole[:, 3:23, a:b, :16] for a, b in [(0, 4), (4, 6), (7, 9)]]
    for part, x in zip(parts, (q, k, v), strict=True):
        part.copy_(torch.from_numpy(x))
        part.requires_grad_()
    out = module.flash_prefill(*parts, tuning=blocks(TRITON, 32, 32))
    out.sum().backward()
    masks = ladder.prefill_oracle(q, k, v)[1]
    want = ladder.prefill_gradient_oracle(q, k, v, np.ones_like(q), masks)
    got = [out.detach(), *(x.grad for x in parts)]
    for a, b in zip(got, want[:1] + want[2:], strict=True):
        ladder.close(a, b)


@pytest.mark.parametrize(("change", "match", "options"), [
    ({"k_BTKH": torch.ones(2, 9, 2, 16).half()}, "cast them", {}),
    ({"page": 3}, "page=3", {"tuning": blocks(TRITON, 16, 64)}),
])  # fmt: skip
def test_what_a_launch_cannot_take_is_refused(change, match, options):
    budget = {"budget_T": np.ones(9, np.int32), "sparse_BT": np.ones((2, 9), bool)}
    refuse(TRITON, budget | change, match, 9, 16, **options)


def test_heads_that_no_tile_fits_are_refused():
    refuse(TRITON, {}, "a head of", head_dim=8)


# Planted faults


@triton.jit
def one_late(key, query):
    """Query t sees key t + 1."""
    return key <= query + 1


def pages_shifted_by_one(pages, right=page_words._to_bits):
    return right(pages.roll(1, -1))


@triton.jit
def one_block_short(i, T, X: tl.constexpr, Y: tl.constexpr):
    """The last block of keys is left out, where there are two."""
    stop = tl.cdiv(tl.minimum((i + 1) * X, T), Y)
    return (i * X + 1) // Y, tl.maximum(stop - 1, 1)


@triton.jit
def one_block_too_many_whole(i, T, X: tl.constexpr, Y: tl.constexpr):
    """The block on the diagonal is not masked."""
    stop = tl.cdiv(tl.minimum((i + 1) * X, T), Y)
    return stop, stop


@triton.jit
def without_lse(s, lse):
    return tl.exp2(s + lse * 0)


def first_head_of_group(q, k, v, do, *rest, right=module._key_gradients):
    """dk and dv are not summed over the query heads of the group."""
    return right(q, k, v, do * (torch.arange(2) == 0)[:, None], *rest)


def no_pages(*args, right):
    """A part of the backward pass is causal only."""
    return right(*args[:6], torch.full_like(args[-3], -1), *args[-2:])


@pytest.mark.parametrize(("check", "name", "fault"), [
    (check_forward, "_visible", one_late), (check_forward, "_to_bits", pages_shifted_by_one),
    (check_forward, "_key_blocks", one_block_short),
    (check_forward, "_key_blocks", one_block_too_many_whole),
    (check_backward, "_weights", without_lse),
    (check_backward, "_key_gradients", first_head_of_group),
    (check_backward, "_key_gradients", no_pages), (check_backward, "_query_gradient", no_pages),
])  # fmt: skip
def test_faults_are_rejected(check, name, fault, reject):  # noqa: F811
    reject(TRITON, {name: fault}, check)
