"""What only kernels_triton.token_logprob has: parts, chunks, any sizes and strides; its faults."""

import numpy as np
import pytest
import torch

from common import oracles
from tests.kernels import ladder
from tests.kernels.packages import TRITON
from tests.kernels.test_token_logprob import (  # noqa: F401
    check_gradient,
    check_logprob,
    check_overlap,
    kernel,
    reject,
)

triton = pytest.importorskip("triton", reason="there is no triton for this machine")
import triton.language as tl  # noqa: E402

module = TRITON.module("token_logprob")
SMALL = TRITON.small["token_logprob"]


@pytest.mark.parametrize(("tokens", "vocab", "width", "parts"), [
    (1, 1, 16, 1), (16, 17, 40, 3), (17, 48, 32, 100),
])  # fmt: skip
def test_sizes(tokens, vocab, width, parts):
    """One of everything; more parts than blocks; whole and broken steps of the width."""
    hidden, other, head, token = ladder.head_inputs(tokens, vocab, width)
    tuning = SMALL._replace(parts=parts)
    logits, other64 = (np.float64(x) @ np.float64(head).T for x in (hidden, other))
    got = kernel(TRITON, tuning=tuning)(hidden, head, token)
    for a, b in zip(got, oracles.token_logprob(logits, token), strict=True):
        ladder.close(a, b)
    overlap = kernel(TRITON, "acceptance_overlap", tuning=tuning)
    alpha, _ = overlap(hidden, other, head, token)
    ladder.close(alpha, oracles.acceptance_overlap(logits, other64))


@pytest.mark.parametrize("chunk_bytes", [1, 37 * 4 * 32])
def test_gradient_in_chunks(chunk_bytes, monkeypatch):
    """Of one and of two blocks of the vocabulary."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    check_gradient(TRITON)


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


def test_blocks_chosen_by_the_module_and_no_gradient_of_the_overlap():
    """More rows in a block than tokens and vocabulary; alpha of equal states is 1."""
    hidden, _, head, token = (torch.from_numpy(x) for x in ladder.head_inputs(num=5))
    hidden.requires_grad_()
    alpha, logp = module.acceptance_overlap(hidden, hidden, head, token)
    ladder.close(alpha, np.ones(5))
    assert not alpha.requires_grad and not logp.requires_grad


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


@pytest.mark.parametrize(("check", "name", "fault"), [
    (check_logprob, "_rescale", no_rescaling), (check_logprob, "_rescale", moment_not_shifted),
    (check_logprob, "_vocab", whole_block), (check_logprob, "_vocab", one_token_on),
    (check_logprob, "_parts", last_part_missing), (check_logprob, "_scale", no_temperature),
    (check_gradient, "_d_logits", no_entropy), (check_gradient, "_vocab", one_token_on),
    (check_gradient, "_gradients", rows_of_another_block),
    (check_overlap, "_vocab", whole_block), (check_overlap, "_parts", last_part_missing),
    (check_overlap, "_scale", no_temperature),
])  # fmt: skip
def test_faults_are_rejected(check, name, fault, reject):  # noqa: F811
    reject(TRITON, name, fault, check)
