"""The estimate of alpha from top log-probs, in both packages, against the lists themselves."""

import numpy as np
import pytest

from common import oracles
from kernels_pallas import reference as in_jax
from kernels_triton import reference as in_torch
from tests.kernels import ladder

X, D, V = 11, 8, 30
PACKAGES = {"jax": in_jax, "torch": in_torch}


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch):
    """The reference in blocks of 4 rows, which 11 rows do not fill."""
    module = PACKAGES[request.param]
    monkeypatch.setattr(module, "HEAD_ELEMENTS", 4 * V)
    return lambda name: getattr(module, name) if module is in_jax else ladder.on_torch(
        getattr(module, name)
    )  # fmt: skip


def inputs():
    rng = np.random.default_rng(0)
    dense, head = (rng.normal(size=s).astype(np.float32) for s in ((X, D), (V, D)))
    return dense, dense + 0.4 * rng.normal(size=(X, D)).astype(np.float32), head


def lists(hidden, head, top, temperature):
    logp = oracles.log_softmax(np.float64(hidden) @ np.float64(head).T, temperature)
    ids = np.argsort(-logp, axis=1)[:, :top]
    return np.take_along_axis(logp, ids, 1), ids


@pytest.mark.parametrize("top", [1, 7, V])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_estimate_is_that_of_the_lists(package, top, temperature):
    dense, sparse, head = inputs()
    got = package("topk_overlap")(dense, sparse, head, temperature=temperature, top=top)
    want = oracles.topk_estimate(
        *lists(dense, head, top, temperature), *lists(sparse, head, top, temperature)
    )
    assert got.shape == (X,)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_estimate_rises_to_alpha(package):
    dense, sparse, head = inputs()
    token = np.zeros(X, np.int32)
    alpha, _ = package("acceptance_overlap")(dense, sparse, head, token)
    np.testing.assert_allclose(
        alpha, oracles.acceptance_overlap(*(np.float64(x) @ head.T for x in (dense, sparse))),
        atol=1e-6,
    )  # fmt: skip
    before = np.zeros(X)
    for top in (1, 3, 10, V):
        estimate = np.asarray(package("topk_overlap")(dense, sparse, head, top=top))
        assert (estimate >= before - 1e-6).all() and (estimate <= np.asarray(alpha) + 1e-6).all()
        before = estimate
    np.testing.assert_allclose(before, alpha, atol=1e-6)
