"""What only kernels_pallas.flash_prefill has: its packing, its words of pages; its faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import oracles
from kernels_pallas.tuning import PrefillTuning
from tests.kernels import ladder
from tests.kernels.packages import PALLAS
from tests.kernels.test_flash_prefill import (  # noqa: F401
    check_backward,
    check_forward,
    check_pages,
    kinds,
    long_inputs,
    refuse,
    reject,
)

module = PALLAS.module("flash_prefill")
SMALL = PALLAS.small["flash_prefill"]
jit = functools.partial(jax.jit, compiler_options=ladder.QUICK)


@pytest.mark.parametrize("sparse", [False, True])
def test_log_sum_exp(sparse):
    q, k, v = ladder.prefill_inputs(2, head_dim=64, num_tokens=39, rows=1)
    *packed, spec = module._prepare(q, k, v, *kinds(sparse), 4, 16, PALLAS.mode, SMALL)
    lse_G1X = jit(lambda *packed: module._forward(*packed, spec)[1])(*packed)
    lse_KrT = np.asarray(lse_G1X).reshape(2, -1, 2, 16).swapaxes(1, 2).reshape(4, -1)
    masks = ladder.prefill_oracle(q, k, v, *kinds(sparse))[1]
    ladder.close(lse_KrT.T[:39], oracles.attention(q[0], k[0], v[0], masks[0])[1])


@pytest.mark.parametrize(("page", "tuning"), [
    (4, PrefillTuning(32, 256)), (16, PrefillTuning(64, 64)), (1, PrefillTuning(32, 64)),
])  # fmt: skip
def test_pages_of_long_sequences_exactly(page, tuning):
    q, k, v, *schedule = long_inputs()
    words = module._prepare(q, k, v, *schedule, page, 48, PALLAS.mode, tuning)[3]
    check_pages(words, min(32, tuning.keys // page), page)


def test_blocks_that_do_not_hold_whole_pages_or_lanes_are_refused():
    budget = {"budget_T": np.ones(39, np.int32), "sparse_BT": np.ones((2, 39), bool), "page": 7}
    refuse(PALLAS, budget, "spec.page=7")
    with pytest.raises(ValueError, match="spec.queries=16"):
        module.flash_prefill(*ladder.prefill_inputs(2, head_dim=64), tuning=SMALL)


# Planted faults


def limit_one_late(i, j, spec, right):
    """Query t sees key t + 1."""
    key, query = right(i, j, spec)
    return key, query + 1


def pages_shifted_by_one(pages, *rest, right):
    return right(jnp.roll(pages, 1, -1), *rest)


def last_block_missing(num_queries, num_keys, spec, major, right):
    """The last block of keys of a block of queries is left out."""
    table = right(num_queries, num_keys, spec, major)
    return np.where((table[1] > 0) & (table[0] > 1), [[2], [0]], table).astype(np.int32)


def without_lse(s, lse):
    return jnp.exp(s)


def first_head_of_group(arrays, words, spec, right):
    """dk and dv are not summed over the query heads of the group."""
    q, k, v, do, lse, delta = arrays
    only = jnp.arange(spec.ratio) == 0
    delta = delta.reshape(len(q), -1, spec.ratio, spec.queries) * only[:, None]
    return right([q, k, v, do * only[:, None, None], lse, delta.reshape(lse.shape)], words, spec)


def no_pages(arrays, words, spec, right):
    """Every query reads all pages before it."""
    return right(arrays, jnp.full_like(words, -1), spec)


@pytest.mark.parametrize(("check", "faults"), [
    (check_forward, {"_positions": limit_one_late}),
    (check_forward, {"_to_bits": pages_shifted_by_one}),
    (check_forward, {"_pairs": last_block_missing}),
    (check_backward, {"_weights": without_lse}),
    (check_backward, {"_key_gradients": first_head_of_group}),
    (check_backward, {"_query_gradient": no_pages, "_key_gradients": no_pages}),
])  # fmt: skip
def test_faults_are_rejected(check, faults, reject):  # noqa: F811
    reject(PALLAS, faults, check)
