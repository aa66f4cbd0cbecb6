"""The policies of both packages against the float64 oracle: the same pages at every position."""

import functools

import jax
import numpy as np
import pytest

from common.profile import text_profile
from kernels_pallas import reference as in_jax
from kernels_pallas.policies import POLICIES as OF_JAX
from kernels_triton import reference as in_torch
from kernels_triton.policies import POLICIES as OF_TORCH
from tests.kernels import ladder

PREFILL = {
    "jax": jax.jit(in_jax.flash_prefill, static_argnames=("page", "chunk", "policy"),
                   compiler_options=ladder.QUICK),
    "torch": ladder.on_torch(in_torch.flash_prefill),
}  # fmt: skip
BUDGETS = np.array([2, 0, 3], np.int32)[np.arange(45) // 20]


def test_every_place_knows_the_same_policies():
    assert set(OF_JAX) == set(OF_TORCH) == set(text_profile.VECTORS)


@pytest.mark.parametrize("policy", text_profile.VECTORS)
@pytest.mark.parametrize("package", PREFILL)
def test_output_is_that_of_the_oracle_pages(package, policy):
    q, k, v = ladder.prefill_inputs(2)
    kinds = BUDGETS, np.arange(45) >= np.array([[5], [0]])
    prefill = functools.partial(PREFILL[package], policy=policy, page=4, chunk=16)
    got = prefill(q, k, v, budget_T=kinds[0], sparse_BT=kinds[1])
    ladder.close(got, ladder.prefill_oracle(q, k, v, *kinds, policy=policy)[0])


def test_policies_read_different_pages():
    q, k, v = ladder.prefill_inputs(2, rows=1)
    kinds = BUDGETS, np.ones((1, 45), bool)
    seen = [ladder.prefill_oracle(q, k, v, *kinds, policy=p)[1][0] for p in text_profile.VECTORS]
    for i, mask in enumerate(seen):
        assert (mask.sum(-1) == seen[0].sum(-1)).all()  # as many keys
        assert not any((mask == other).all() for other in seen[:i])


def test_budgets_of_equal_bytes():
    k = np.full(1024, 5)
    np.testing.assert_array_equal(text_profile.equal_bytes("mean", k, 16), k)
    # 64 pages of 32 vectors at the end: a vector less per page is two pages more
    assert text_profile.equal_bytes("window", k, 16)[[0, 511, 1023]].tolist() == [5, 6, 7]
    assert text_profile.equal_bytes("quest", k, 16)[[511, 1023]].tolist() == [4, 3]
    assert text_profile.equal_bytes("quest", 0 * k, 16).min() == 0
