"""The policies of both packages against the float64 oracle: the same pages at every position."""

import functools

import jax
import numpy as np
import pytest

from common.schedule import policies
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
    assert set(OF_JAX) == set(OF_TORCH) == set(policies.VECTORS)


@pytest.mark.parametrize("policy", policies.VECTORS)
@pytest.mark.parametrize("package", PREFILL)
def test_output_is_that_of_the_oracle_pages(package, policy):
    q, k, v = ladder.prefill_inputs(2)
    kinds = BUDGETS, np.array([5, 0])
    prefill = functools.partial(PREFILL[package], policy=policy, page=4, chunk=16)
    got = prefill(q, k, v, budget_T=kinds[0], prompt_len_B=kinds[1])
    ladder.close(got, ladder.prefill_oracle(q, k, v, *kinds, policy=policy)[0])


def test_policies_read_different_pages():
    q, k, v = ladder.prefill_inputs(2, rows=1)
    kinds = BUDGETS, np.zeros(1, int)
    seen = [ladder.prefill_oracle(q, k, v, *kinds, policy=p)[1][0] for p in policies.VECTORS]
    for i, mask in enumerate(seen):
        assert (mask.sum(-1) == seen[0].sum(-1)).all()  # as many keys
        assert not any((mask == other).all() for other in seen[:i])


def test_window_reads_the_newest_pages():
    scores = policies.page_scores("window", np.ones((2, 4)), np.ones((23, 1, 4)), 4)
    np.testing.assert_array_equal(scores, [[0, 1, 2, 3, 4]])


def test_quest_bounds_every_product_and_is_reached_by_equal_keys():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 8)), rng.normal(size=(16, 1, 8))
    bound = policies.page_scores("quest", q, k, 4)[0]
    assert (bound >= (k[:, 0] @ q[0]).reshape(4, 4).max(1)).all()
    k = np.repeat(k[::4], 4, 0)
    np.testing.assert_allclose(
        policies.page_scores("quest", q, k, 4), policies.page_scores("mean", q, k, 4)
    )


def test_oracle_finds_the_page_with_the_key_that_is_looked_for():
    """One key among many that point away: the mean hides it, the mass and the bounds do not."""
    k = np.zeros((64, 1, 8))
    k[:, 0, 0] = -1.0
    k[37, 0, 0] = 9.0
    k[8:12, 0, 0] = 1.9
    q = np.eye(8)[:1]
    best = {p: policies.page_scores(p, q, k, 4)[0].argmax() for p in ("mean", "quest", "oracle")}
    assert best == {"mean": 2, "quest": 9, "oracle": 9}


def test_random_pages_are_spread_evenly():
    ranks = [
        policies.page_scores("random", np.ones((2, 4)), np.ones((t, 2, 4)), 4).argsort()[:, -2:]
        for t in range(40, 240)
    ]
    ranks = [r[r < 10] for r in ranks]
    counts = np.bincount(np.concatenate(ranks), minlength=10)
    assert counts.min() > 0.5 * counts.max()


def test_budgets_of_equal_bytes():
    k = np.full(1024, 5)
    np.testing.assert_array_equal(policies.equal_bytes("mean", k, 16), k)
    # 64 pages of 32 vectors at the end: a vector less per page is two pages more
    assert policies.equal_bytes("window", k, 16)[[0, 511, 1023]].tolist() == [5, 6, 7]
    assert policies.equal_bytes("quest", k, 16)[[511, 1023]].tolist() == [4, 3]
    assert policies.equal_bytes("quest", 0 * k, 16).min() == 0
