"""kernels_triton.token_logprob, interpreted: float32 at 1e-5, gradients, several blocks and parts.

37 tokens in blocks of 32 and 51 rows of the head in blocks of 16, in 2 parts: nothing divides.
"""

import functools

import numpy as np
import pytest
import torch

from common import oracles
from tests.kernels import ladder

triton = pytest.importorskip("triton", reason="there is no triton for this machine")
import triton.language as tl  # noqa: E402

from kernels_triton import token_logprob as module  # noqa: E402
from kernels_triton.tuning import HeadTuning  # noqa: E402

SMALL = HeadTuning(32, 16, 16, parts=2, num_warps=1, num_stages=1)
token_logprob = ladder.on_torch(module.token_logprob, tuning=SMALL)
acceptance_overlap = ladder.on_torch(module.acceptance_overlap, tuning=SMALL)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_prob_and_entropy(temperature):
    ladder.check_logprob(token_logprob, temperature)


@pytest.mark.parametrize("temperature", [0.6, np.float32([1.3])])
def test_acceptance_overlap(temperature):
    ladder.check_overlap(acceptance_overlap, temperature)


@pytest.mark.parametrize(("tokens", "vocab", "width", "parts"), [
    (1, 1, 16, 1), (16, 17, 40, 3), (17, 48, 32, 100),
])  # fmt: skip
def test_sizes(tokens, vocab, width, parts):
    """One of everything; more parts than blocks; whole and broken steps of the width."""
    hidden, other, head, token = ladder.head_inputs(tokens, vocab, width)
    tuning = SMALL._replace(parts=parts)
    logits, other64 = (np.float64(x) @ np.float64(head).T for x in (hidden, other))
    got = ladder.on_torch(module.token_logprob, tuning=tuning)(hidden, head, token)
    for a, b in zip(got, oracles.token_logprob(logits, token), strict=True):
        ladder.close(a, b)
    overlap = ladder.on_torch(module.acceptance_overlap, tuning=tuning)
    alpha, _ = overlap(hidden, other, head, token)
    ladder.close(alpha, oracles.acceptance_overlap(logits, other64))


def test_large_logits():
    """Logits of +-3,000 neither overflow nor leave NaN; the entropy of a sure token is 0."""
    hidden, _, head, token = ladder.head_inputs(16, 32, 16)
    head = head * 400
    logits = np.float64(hidden) @ np.float64(head).T
    got = token_logprob(hidden, head, token)
    want = oracles.token_logprob(logits, token)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(got[1], want[1], atol=1e-3)


def check_gradient():
    """Through log-prob and entropy, in chunks of the head, against differences of the oracle."""
    hidden, _, head, token = ladder.head_inputs()
    weights = np.random.default_rng(6).normal(size=(2, len(token)))

    def f64(hidden, head):
        logp, entropy = oracles.token_logprob(hidden @ head.T, token, 0.7)
        return np.sum(logp * weights[0] + entropy * weights[1])

    f = functools.partial(
        module.token_logprob, token_X=torch.from_numpy(token), temperature=0.7, tuning=SMALL
    )
    ladder.check_gradient(ladder.torch_gradients(f, [hidden, head], weights), f64, [hidden, head])


@pytest.mark.parametrize("chunk_bytes", [1, 37 * 4 * 32, 2**26])
def test_gradient(chunk_bytes, monkeypatch):
    """Chunks of one and of two blocks of the vocabulary, and one chunk."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    check_gradient()


def test_only_the_gradients_that_are_needed():
    """Of the log-prob alone, of one argument alone; rows of any distance, gradients expanded."""
    hidden, _, head, token = ladder.head_inputs(num=5)
    d = np.eye(len(head))[token] - np.exp(oracles.log_softmax(np.float64(hidden) @ head.T))
    want = d @ head, d.T @ hidden
    spread = torch.full((5, 40), torch.nan)
    spread[:, 8:20] = torch.from_numpy(hidden)
    for i in range(2):
        args = [spread[:, 8:20], torch.from_numpy(head)]
        args[i] = args[i].detach().requires_grad_()
        logp, _ = module.token_logprob(*args, torch.from_numpy(token), tuning=SMALL)
        logp.sum().backward()
        ladder.close(args[i].grad, want[i])
        assert args[1 - i].grad is None


def test_float16_against_float64_on_the_rounded_inputs():
    hidden, _, head, token = ladder.head_inputs()
    hidden, head = (torch.from_numpy(x).half().requires_grad_() for x in (hidden, head))
    wide = [np.float64(x.detach()) for x in (hidden, head)]
    want = oracles.token_logprob(wide[0] @ wide[1].T, token, 0.7)
    got = module.token_logprob(hidden, head, torch.from_numpy(token), temperature=0.7, tuning=SMALL)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.detach(), b, rtol=1e-5, atol=1e-5)  # exact products
    a, b = np.random.default_rng(6).normal(size=(2, len(token)))
    torch.autograd.backward(got, [torch.from_numpy(np.float32(x)) for x in (a, b)])
    p = np.exp(oracles.log_softmax(wide[0] @ wide[1].T, 0.7))
    d = a[:, None] * (np.eye(len(head))[token] - p)
    d = (d - b[:, None] * p * (np.log(p) + want[1][:, None])) / 0.7
    for x, exact in zip((hidden, head), (d @ wide[1], d.T @ wide[0]), strict=True):
        assert x.grad.dtype == torch.float16
        error = np.linalg.norm(np.float64(x.grad) - exact)
        assert error < 0.001 * np.linalg.norm(exact)  # two roundings to 11 bits


def test_blocks_chosen_by_the_module_and_no_gradient_of_the_overlap():
    """More rows in a block than tokens and vocabulary; alpha of equal states is 1."""
    hidden, _, head, token = (torch.from_numpy(x) for x in ladder.head_inputs(num=5))
    hidden.requires_grad_()
    alpha, logp = module.acceptance_overlap(hidden, hidden, head, token)
    ladder.close(alpha, np.ones(5))
    assert not alpha.requires_grad and not logp.requires_grad


def test_inputs_that_do_not_belong_together_are_refused():
    hidden, _, head, token = (torch.from_numpy(x) for x in ladder.head_inputs())
    with pytest.raises(ValueError, match="one row"):
        module.token_logprob(hidden[:-1], head, token)
    with pytest.raises(ValueError, match="one row"):
        module.acceptance_overlap(hidden, hidden[:, :-1], head, token)
    with pytest.raises(ValueError, match="cast one"):
        module.token_logprob(hidden, head.bfloat16(), token)


# Planted faults


@triton.jit
def no_rescaling(m, m_new):
    return m * 0 + 1.0, m - m_new


@triton.jit
def moment_not_shifted(m, m_new):
    return tl.exp2(m - m_new), m * 0


@triton.jit
def whole_block(first, v: tl.constexpr):
    """Rows past the vocabulary count as token 0."""
    return tl.arange(0, v) * 0


@triton.jit
def one_token_on(first, v: tl.constexpr):
    return first + 1 + tl.arange(0, v)


def last_part_missing(V, tuning, right=module._parts):
    per_part, num_parts = right(V, tuning)
    return per_part, num_parts - 1


def no_temperature(temperature, like):
    return torch.ones(1)


@triton.jit
def no_entropy(logp, own, entropy_x, d_logp_x, d_entropy_x):
    d = tl.where(own, d_logp_x[:, None], 0.0)
    return d - tl.exp(logp) * (d_logp_x[:, None] + d_entropy_x[:, None] * logp)


def rows_of_another_block(*args, right=module._gradients):
    """A chunk's product goes to the wrong rows of the head."""
    d_hidden, d_head = right(*args)
    return d_hidden, d_head.roll(16, 0)


@pytest.mark.parametrize(("name", "fault"), [
    ("_rescale", no_rescaling), ("_rescale", moment_not_shifted), ("_vocab", whole_block),
    ("_vocab", one_token_on), ("_parts", last_part_missing), ("_scale", no_temperature),
])  # fmt: skip
def test_faults_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_logprob(token_logprob, 0.6)


@pytest.mark.parametrize(("name", "fault"), [
    ("_d_logits", no_entropy), ("_vocab", one_token_on),
    ("_gradients", rows_of_another_block),
])  # fmt: skip
def test_faults_of_the_gradient_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        check_gradient()


@pytest.mark.parametrize(("name", "fault"), [
    ("_vocab", whole_block), ("_parts", last_part_missing), ("_scale", no_temperature),
])  # fmt: skip
def test_faults_of_the_overlap_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_overlap(acceptance_overlap, 0.6)
