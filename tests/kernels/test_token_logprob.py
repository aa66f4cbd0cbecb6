"""token_logprob and acceptance_overlap of both packages, interpreted: values and gradients.

37 tokens in blocks of 32 and 51 rows of the head in blocks of 32 or, in 2 parts, of 16: nothing
divides.
"""

import numpy as np
import pytest

from common import oracles
from tests.kernels import ladder
from tests.kernels.packages import BOTH, EAGER, PALLAS, TRITON

ALL = PALLAS, EAGER, TRITON


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Make Pallas handle the tokens of a block in two chunks."""
    monkeypatch.setattr(PALLAS.module("token_logprob"), "CHUNK", 16)


def kernel(package, name="token_logprob", **options):
    return package.kernel(name, **options)


@pytest.mark.parametrize("package", ALL)
def test_log_prob_and_entropy(package):
    token_logprob = kernel(package)
    for temperature in (0.6, 1.3):
        ladder.check_logprob(token_logprob, temperature)
    check_large_logits(token_logprob)


def check_large_logits(token_logprob):
    """Logits of +-3,000 do not overflow; the entropy of a certain token is 0."""
    hidden, _, head, token = ladder.head_inputs()
    head = head * 400
    want = oracles.token_logprob(np.float64(hidden) @ np.float64(head).T, token)
    got = token_logprob(hidden, head, token, temperature=1.0)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=2e-3)
    np.testing.assert_allclose(got[1], want[1], atol=2e-3)


@pytest.mark.parametrize(("package", "temperature"), [
    (PALLAS, 1.3), (EAGER, 1.3), (TRITON, np.float32([1.3])),
])  # fmt: skip
def test_acceptance_overlap(package, temperature):
    acceptance_overlap = kernel(package, "acceptance_overlap")
    for x in (0.6, temperature):
        ladder.check_overlap(acceptance_overlap, x)


@pytest.mark.parametrize("package", ALL)
def test_gradient(package):
    check_gradient(package)


def check_gradient(package):
    """Gradients through log-prob and entropy against differences of the oracle."""
    hidden, _, head, token = ladder.head_inputs()
    weights = np.random.default_rng(6).normal(size=(2, len(token)))
    _, gradients = package.vjp(
        "token_logprob", [hidden, head], tuple(np.float32(weights)), token_X=token, temperature=0.7
    )

    def f64(hidden, head):
        return np.sum(oracles.token_logprob(hidden @ head.T, token, 0.7) * weights)

    ladder.check_gradient(gradients, f64, [hidden, head])


@pytest.mark.parametrize(("package", "dtype", "limit"), [
    (PALLAS, "bfloat16", 0.005), (TRITON, "float16", 0.001),
])  # fmt: skip
def test_two_bytes_against_float64_on_the_rounded_inputs(package, dtype, limit):
    """limit: share of a gradient's norm, two roundings to 8 or 11 bits; products are exact."""
    *states, token = ladder.head_inputs()
    states = [package.array(x, dtype) for x in states]
    hidden, sparse, head = (np.float64(package.wide(x)) for x in states)
    dense64, sparse64 = hidden @ head.T, sparse @ head.T
    overlap = kernel(package, "acceptance_overlap")
    alpha, logp = overlap(*states, package.array(token), temperature=0.7)
    ladder.close(alpha, oracles.acceptance_overlap(dense64, sparse64, 0.7))
    ladder.close(logp, oracles.token_logprob(sparse64, token, 0.7)[0])
    a, b = np.random.default_rng(6).normal(size=(2, len(token))).astype(np.float32)
    got, gradients = package.vjp(
        "token_logprob", [states[0], states[2]], (a, b), token_X=token, temperature=0.7
    )
    want = oracles.token_logprob(dense64, token, 0.7)
    for x, exact in zip(got, want, strict=True):
        ladder.close(x, exact)
    p = np.exp(oracles.log_softmax(dense64, 0.7))
    d = a[:, None] * (np.eye(len(head))[token] - p)
    d = (d - b[:, None] * p * (np.log(p) + want[1][:, None])) / 0.7
    for grad, exact in zip(gradients, (d @ head, d.T @ hidden), strict=True):
        assert grad.dtype == states[0].dtype
        error = np.linalg.norm(np.float64(package.wide(grad)) - exact)
        assert error < limit * np.linalg.norm(exact)


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(("name", "change", "match"), [
    ("token_logprob", {"hidden": 36}, "one row"), ("acceptance_overlap", {"sparse": 36}, "one row"),
    ("token_logprob", {"head": "float16"}, "cast one"),
])  # fmt: skip
def test_inputs_that_do_not_belong_together_are_refused(package, name, change, match):
    hidden, sparse, head, token = ladder.head_inputs()
    hidden, sparse = hidden[: change.get("hidden")], sparse[: change.get("sparse")]
    head = package.array(head, change.get("head"))
    states = [hidden] if name == "token_logprob" else [hidden, sparse]
    with pytest.raises(ValueError, match=match):
        kernel(package, name)(*states, head, token)


@pytest.fixture
def reject(monkeypatch):
    """reject(package, name, fault, check): the fault in that function fails the check."""

    def run(package, name, fault, check):
        package.plant(monkeypatch, f"token_logprob.{name}", fault)
        with pytest.raises(AssertionError):
            check(package)

    return run


def check_logprob(package):
    ladder.check_logprob(kernel(package), 0.6)


def check_overlap(package):
    ladder.check_overlap(kernel(package, "acceptance_overlap"), 0.6)
