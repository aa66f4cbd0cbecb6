"""kernels_triton.flash_prefill, interpreted: output, log-sum-exp, every element of gradients."""

import functools

import numpy as np
import pytest
import torch

from common import oracles
from tests.kernels import ladder

triton = pytest.importorskip("triton", reason="there is no triton for this machine")
import triton.language as tl  # noqa: E402

from kernels_triton import flash_prefill as module  # noqa: E402
from kernels_triton.tuning import PrefillBlocks, PrefillTuning  # noqa: E402


def blocks(queries, keys):
    return PrefillTuning(*[PrefillBlocks(queries, keys, num_warps=1, num_stages=1)] * 4)


SMALL = blocks(16, 32)
DENSE = None, None


def check_gradients(args, kinds, page=4, tolerance=None, tuning=SMALL):
    """Output and every element of dq, dk and dv."""
    args = [torch.as_tensor(x).requires_grad_() for x in args]
    do = np.random.default_rng(7).normal(size=args[0].shape)
    do = torch.from_numpy(do).to(args[0].dtype)
    budget_T, prompt_len_B = map(ladder.tensor, kinds)
    out = module.flash_prefill(
        *args, budget_T=budget_T, prompt_len_B=prompt_len_B, page=page, chunk=16, tuning=tuning
    )
    out.backward(do)
    got = [out.detach(), *(x.grad for x in args)]
    wide = [x.detach().float().numpy() for x in (*args, do)]
    _, masks = ladder.prefill_oracle(*wide[:3], *kinds, page)
    want = ladder.prefill_gradient_oracle(*wide, masks)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want[:1] + want[2:], strict=True):
        assert a.dtype == args[0].dtype
        if tolerance:
            np.testing.assert_allclose(a.float(), b, atol=tolerance * np.abs(b).max())
        else:
            ladder.close(a, b, name)


@pytest.mark.parametrize(("ratio", "head_dim", "tuning", "sparse"), [
    (1, 32, blocks(16, 32), True), (2, 128, blocks(32, 16), True), (5, 16, blocks(32, 32), True),
    (8, 64, blocks(32, 64), True), (2, 64, blocks(16, 16), False),
])  # fmt: skip
def test_output_and_gradients(ratio, head_dim, tuning, sparse):
    rows = 1 + (ratio == 1)
    args = ladder.prefill_inputs(ratio, head_dim=head_dim, num_tokens=39, rows=rows, kv_heads=1)
    check_gradients(args, ladder.replay(39, rows) if sparse else DENSE, tuning=tuning)


def test_gradients_are_differences_of_the_oracle():
    """Two heads of a group, replay; the choice of pages does not move."""
    args, kinds = (
        ladder.prefill_inputs(2, head_dim=16, num_tokens=20, rows=1, kv_heads=1),
        ladder.replay(20),
    )
    weight = np.random.default_rng(7).normal(size=args[0].shape)
    tensors = dict(zip(("budget_T", "prompt_len_B"), map(ladder.tensor, kinds), strict=True))
    f = functools.partial(module.flash_prefill, page=4, chunk=16, tuning=SMALL, **tensors)
    grads = ladder.torch_gradients(f, args, [weight])
    masks = ladder.prefill_oracle(*args, *kinds)[1]
    f64 = lambda q, k, v: np.sum(oracles.attention(q[0], k[0], v[0], masks[0])[0] * weight)  # noqa: E731
    ladder.check_gradient(grads, f64, args)


@pytest.mark.parametrize("sparse", [False, True])
def test_log_sum_exp(sparse):
    q, k, v = ladder.prefill_inputs(2, head_dim=16, num_tokens=39, rows=1)
    kinds = ladder.replay(39) if sparse else DENSE
    words = None
    if sparse:
        words = module._page_words(*map(torch.from_numpy, (q, k, *map(np.int64, kinds))), 4, 16)
    lse_BNT = module._forward(*map(torch.from_numpy, (q, k, v)), words, 4 * sparse, SMALL[0])[1]
    want = oracles.attention(q[0], k[0], v[0], ladder.prefill_oracle(q, k, v, *kinds)[1][0])[1]
    ladder.close(lse_BNT[0].T, want)


@pytest.mark.parametrize(("num_tokens", "tuning", "page"), [
    (1, blocks(16, 16), 16), (16, blocks(16, 16), 4), (17, blocks(32, 16), 16),
    (65, blocks(64, 16), 3), (65, blocks(16, 64), 4),
])  # fmt: skip
def test_lengths_and_schedules(num_tokens, tuning, page):
    """Several words of bits (page 3: 96 keys each), blocks of queries larger or smaller."""
    q, k, v = ladder.prefill_inputs(1, head_dim=16, num_tokens=num_tokens, kv_heads=1)
    budgets = np.array([1, 0, 3], np.int32)[np.arange(num_tokens) // 7 % 3]
    prefill = ladder.on_torch(module.flash_prefill, tuning=tuning)
    ladder.check_prefill(prefill, q, k, v, budgets, np.array([num_tokens, 0]), page, 8)


@pytest.mark.parametrize("page", [1, 4, 16, 32])
def test_pages_of_long_sequences_exactly(page):
    """The bits that the kernels read, against decode's choice at each position; with ties."""
    q, k, v = ladder.prefill_inputs(2, num_tokens=300)
    q, k = np.round(4 * q) / 4, np.round(4 * k[:, np.arange(300) % 24]) / 4
    budgets, prompt = np.array([0, 3, 1000, 7], np.int32)[np.arange(300) // 80], np.array([33, 0])
    tensors = map(torch.from_numpy, (q, k, budgets.astype(np.int64), prompt))
    words = module._page_words(*tensors, page, 48).numpy()
    seen = words.reshape(2, 2, -1, 1, 300) >> np.arange(32)[:, None] & 1
    seen = np.repeat(seen.reshape(2, 2, -1, 300), page, 2)[:, :, :300]
    causal = np.tri(300, dtype=bool)
    for b, mask in enumerate(ladder.prefill_oracle(q, k, v, budgets, prompt, page)[1]):
        np.testing.assert_array_equal(seen[b].swapaxes(1, 2).astype(bool) & causal, mask)


def test_parts_of_one_array():
    """q, k and v side by side in an array whose other numbers are NaN; an expanded gradient.

    Two rows, two KV heads and two heads each.
    """
    q, k, v = ladder.prefill_inputs(2, head_dim=16, num_tokens=20, rows=2, kv_heads=2)
    whole = torch.full((2, 25, 9, 24), torch.nan)
    parts = [whole[:, 3:23, a:b, :16] for a, b in [(0, 4), (4, 6), (7, 9)]]
    for part, x in zip(parts, (q, k, v), strict=True):
        part.copy_(torch.from_numpy(x))
        part.requires_grad_()
    out = module.flash_prefill(*parts, tuning=blocks(32, 32))
    out.sum().backward()
    masks = ladder.prefill_oracle(q, k, v)[1]
    want = ladder.prefill_gradient_oracle(q, k, v, np.ones_like(q), masks)
    got = [out.detach(), *(x.grad for x in parts)]
    for a, b in zip(got, want[:1] + want[2:], strict=True):
        ladder.close(a, b)


@pytest.mark.parametrize("sparse", [False, True])
def test_float16(sparse):
    args = ladder.prefill_inputs(2, head_dim=64, num_tokens=39, rows=1, kv_heads=1)
    args = [torch.from_numpy(x).half() for x in args]
    if sparse:  # keys of quarters: the choice does not hang on the rounding of landmarks
        args[1] = torch.round(4 * args[1][:, np.arange(39) // 4 * 4]) / 4
    check_gradients(args, ladder.replay(39) if sparse else DENSE, tolerance=0.004)


def test_refused_arguments():
    q, k, v = map(torch.from_numpy, ladder.prefill_inputs(2, head_dim=16, num_tokens=9))
    budget = {"budget_T": torch.ones(9), "prompt_len_B": torch.ones(2)}
    with pytest.raises(ValueError, match="q_BTNH.shape"):
        module.flash_prefill(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="cast them"):
        module.flash_prefill(q, k.half(), v)
    with pytest.raises(ValueError, match="a head of"):
        module.flash_prefill(q[..., :8], k[..., :8], v[..., :8])
    with pytest.raises(ValueError, match="page=3"):
        module.flash_prefill(q, k, v, **budget, page=3, tuning=blocks(16, 64))
    with pytest.raises(ValueError, match="pass both"):
        module.flash_prefill(q, k, v, budget_T=budget["budget_T"])
    with pytest.raises(ValueError, match="pass both"):
        module.flash_prefill(q, k, v, **budget, page=0)


# Planted faults


@triton.jit
def one_late(key, query):
    """Query t sees key t + 1."""
    return key <= query + 1


def pages_shifted_by_one(pages, right=module._to_bits):
    return right(pages.roll(1, -1))


@triton.jit
def one_block_short(i, T, X: tl.constexpr, Y: tl.constexpr):
    """The last block of keys is left out, where there are two."""
    stop = tl.cdiv(tl.minimum((i + 1) * X, T), Y)
    return (i * X + 1) // Y, tl.maximum(stop - 1, 1)


@triton.jit
def one_block_too_many_whole(i, T, X: tl.constexpr, Y: tl.constexpr):
    """The block on the diagonal counts as seen by all."""
    stop = tl.cdiv(tl.minimum((i + 1) * X, T), Y)
    return stop, stop


@pytest.mark.parametrize(("name", "fault"), [
    ("_visible", one_late), ("_to_bits", pages_shifted_by_one), ("_key_blocks", one_block_short),
    ("_key_blocks", one_block_too_many_whole),
])  # fmt: skip
def test_faults_of_the_forward_pass(name, fault, monkeypatch):
    q, k, v = ladder.prefill_inputs(1, head_dim=16, num_tokens=39, rows=1, kv_heads=1)
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError, match="Not equal"):
        ladder.check_prefill(
            ladder.on_torch(module.flash_prefill, tuning=SMALL), q, k, v, *ladder.replay(39)
        )


@triton.jit
def without_lse(s, lse):
    return tl.exp2(s + lse * 0)


def first_head_of_group(q, k, v, do, *rest, right=module._key_gradients):
    """dk and dv are not summed over the query heads of the group."""
    return right(q, k, v, do * (torch.arange(2) == 0)[:, None], *rest)


def no_pages(call):
    """A part of the backward pass is causal only."""
    return lambda *args: call(*args[:6], torch.full_like(args[-3], -1), *args[-2:])


@pytest.mark.parametrize(("name", "fault"), [
    ("_weights", without_lse), ("_key_gradients", first_head_of_group),
    ("_key_gradients", no_pages(module._key_gradients)),
    ("_query_gradient", no_pages(module._query_gradient)),
])  # fmt: skip
def test_faults_of_the_backward_pass(name, fault, monkeypatch):
    args = ladder.prefill_inputs(2, head_dim=16, num_tokens=30, rows=1, kv_heads=1)
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError, match=r"(?s)Not equal to tolerance.*\nd[qkv]\n"):
        check_gradients(args, ladder.replay(30), tuning=blocks(32, 32))
