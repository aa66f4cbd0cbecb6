"""What only kernels_pallas.token_logprob has: its own blocks, chunks and padding; its faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import ladder
from tests.kernels.packages import PALLAS
from tests.kernels.test_token_logprob import (  # noqa: F401
    check_gradient,
    check_logprob,
    check_overlap,
    reject,
    small_chunks,
)

module = PALLAS.module("token_logprob")


def test_blocks_chosen_by_the_module_and_no_gradient_of_the_overlap():
    """A block has more rows than there are tokens or vocabulary; alpha of equal states is 1."""
    hidden, other, head, token = ladder.head_inputs(num=5)

    def f(hidden):
        alpha, _ = module.acceptance_overlap(hidden, hidden, head, token, interpret=PALLAS.mode)
        return alpha.sum(), alpha

    grad, alpha = jax.jit(jax.grad(f, has_aux=True), compiler_options=ladder.QUICK)(hidden)
    ladder.close(alpha, np.ones(5))
    assert (np.asarray(grad) == 0).all()


def no_rescaling(m, m_new):
    return jnp.ones_like(m), m - m_new


def moment_not_shifted(m, m_new):
    return jnp.exp(m - m_new), jnp.zeros_like(m)


def whole_block(first, shape):
    """Undefined rows past the vocabulary count as token 0."""
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


@pytest.mark.parametrize(("check", "name", "fault"), [
    (check_logprob, "_rescale", no_rescaling), (check_logprob, "_rescale", moment_not_shifted),
    (check_logprob, "_vocab", whole_block), (check_logprob, "_vocab", one_token_on),
    (check_logprob, "_slice", first_chunk), (check_logprob, "_scale", no_scale),
    (check_gradient, "_clear_tail", nothing_cleared), (check_gradient, "_d_logits", no_entropy),
    (check_gradient, "_vocab", one_token_on),
    (check_overlap, "_vocab", whole_block), (check_overlap, "_slice", first_chunk),
])  # fmt: skip
def test_faults_are_rejected(check, name, fault, reject):  # noqa: F811
    reject(PALLAS, name, fault, check)
