"""kernels_pallas.token_logprob, interpreted: float32 at 1e-5, gradients, several blocks and chunks.

37 tokens in blocks of 32 (chunks of 16) and 51 rows of the head in blocks of 32: neither divides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import oracles
from kernels_pallas import token_logprob as module
from kernels_pallas.tuning import HeadTuning
from tests.kernels import ladder
from tests.kernels.ladder import EAGER, ON_WAIT

SMALL = HeadTuning(tokens=32, vocabulary=32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)


def kernel(function=module.token_logprob, mode=ON_WAIT):
    return ladder.interpreted(function, mode, tuning=SMALL)


@pytest.mark.parametrize("mode", [ON_WAIT, EAGER])
def test_log_prob_and_entropy(mode):
    token_logprob = kernel(mode=mode)
    for temperature in (0.6, 1.3):
        ladder.check_logprob(token_logprob, temperature)


@pytest.mark.parametrize("mode", [ON_WAIT, EAGER])
def test_acceptance_overlap(mode):
    acceptance_overlap = kernel(module.acceptance_overlap, mode)
    for temperature in (0.6, 1.3):
        ladder.check_overlap(acceptance_overlap, temperature)


def check_gradient(mode=ON_WAIT):
    """Through log-prob and entropy, against differences of the oracle."""
    hidden, _, head, token = ladder.head_inputs()
    weights = np.random.default_rng(6).normal(size=(2, len(token)))

    def f(hidden, head):
        run = functools.partial(module.token_logprob, tuning=SMALL, interpret=mode)
        return run(hidden, head, token, temperature=0.7)

    def f64(hidden, head):
        return np.sum(oracles.token_logprob(hidden @ head.T, token, 0.7) * weights)

    ladder.check_gradient(ladder.jax_gradients(f, [hidden, head], weights), f64, [hidden, head])
    ladder.assert_no_race()


@pytest.mark.parametrize("mode", [ON_WAIT, EAGER])
def test_gradient(mode):
    check_gradient(mode)


def test_bfloat16_against_float64_on_the_rounded_inputs():
    hidden, sparse, head, token = ladder.head_inputs()
    hidden, sparse, head = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, sparse, head))
    logits = [np.float64(x.astype(jnp.float32)) for x in (hidden, sparse, head)]
    dense, sparse64 = (x @ logits[2].T for x in logits[:2])
    want = oracles.token_logprob(dense, token, 0.7)
    run = functools.partial(
        module.token_logprob,
        token_X=token,
        temperature=0.7,
        tuning=SMALL,
        interpret=ON_WAIT,
    )
    got, back = jax.vjp(run, hidden, head)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # products of bf16 are exact
    alpha, logp = kernel(module.acceptance_overlap)(hidden, sparse, head, token, temperature=0.7)
    ladder.close(alpha, oracles.acceptance_overlap(dense, sparse64, 0.7))
    ladder.close(logp, oracles.token_logprob(sparse64, token, 0.7)[0])
    a, b = np.random.default_rng(6).normal(size=(2, len(token)))
    p = np.exp(oracles.log_softmax(dense, 0.7))
    d = a[:, None] * (np.eye(len(head))[token] - p)
    d -= b[:, None] * p * (np.log(p) + want[1][:, None])
    grads = back((np.float32(a), np.float32(b)))
    for grad, exact in zip(grads, (d @ logits[2], d.T @ logits[0]), strict=True):
        assert grad.dtype == jnp.bfloat16
        error = np.linalg.norm(np.float64(grad.astype(jnp.float32)) - exact / 0.7)
        assert error < 0.005 * np.linalg.norm(exact / 0.7)  # two roundings to 8 bits


def test_blocks_chosen_by_the_module_and_no_gradient_of_the_overlap():
    """More rows in a block than tokens and vocabulary; alpha of equal states is 1."""
    hidden, other, head, token = ladder.head_inputs(num=5)

    def f(hidden):
        alpha, _ = module.acceptance_overlap(hidden, hidden, head, token, interpret=ON_WAIT)
        return alpha.sum(), alpha

    grad, alpha = jax.jit(jax.grad(f, has_aux=True), compiler_options=ladder.QUICK)(hidden)
    ladder.close(alpha, np.ones(5))
    assert (np.asarray(grad) == 0).all()


def test_inputs_that_do_not_belong_together_are_refused():
    hidden, _, head, token = ladder.head_inputs()
    with pytest.raises(ValueError, match="one row"):
        module.token_logprob(hidden[:-1], head, token)
    with pytest.raises(ValueError, match="cast one"):
        module.token_logprob(hidden, head.astype(jnp.bfloat16), token)


def no_rescaling(m, m_new):
    return jnp.ones_like(m), m - m_new


def moment_not_shifted(m, m_new):
    return jnp.exp(m - m_new), jnp.zeros_like(m)


def whole_block(first, shape):
    """Garbage rows past the vocabulary count as token 0."""
    return jnp.zeros(shape, jnp.int32)


def one_token_on(first, shape, right=module._vocab):
    return right(first + 1, shape)


def first_chunk(i, size, right=module._slice):
    return right(0 * i, size)


def no_scale(temperature):
    return jnp.ones(1)


def nothing_cleared(head, V):
    pass


def no_entropy(head, hidden, scale, token, lse, entropy, *rest, right=module._d_logits):
    return right(head, hidden, scale, token, lse, 0 * entropy, *rest)


@pytest.mark.parametrize(("name", "fault"), [
    ("_rescale", no_rescaling), ("_rescale", moment_not_shifted), ("_vocab", whole_block),
    ("_vocab", one_token_on), ("_slice", first_chunk), ("_scale", no_scale),
])  # fmt: skip
def test_faults_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_logprob(kernel(), 0.6)


@pytest.mark.parametrize(("name", "fault"), [
    ("_clear_tail", nothing_cleared), ("_d_logits", no_entropy), ("_vocab", one_token_on),
])  # fmt: skip
def test_faults_of_the_gradient_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        check_gradient()


@pytest.mark.parametrize(("name", "fault"), [("_vocab", whole_block), ("_slice", first_chunk)])
def test_faults_of_the_overlap_are_rejected(name, fault, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        ladder.check_overlap(kernel(module.acceptance_overlap), 0.6)
