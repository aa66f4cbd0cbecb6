"""The torch decoder against the float64 oracle; whole sequences against the paged cache."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from common import oracles
from common.config import ModelConfig
from common.model.geometry import Geometry
from common.rollout.page_pool import pages_for
from common.schedule.schedule import Schedule
from sparrow_jax.toy.random_init import random_weights
from sparrow_torch import cache as kv_cache
from sparrow_torch.model import Decoder

QWEN = ModelConfig(
    vocab_size=40, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=8, rope_theta=1e4, qk_gain=2.0,
)  # fmt: skip
LLAMA = dataclasses.replace(
    QWEN, qk_norm=False, tie_embeddings=False, num_kv_heads=1, norm_eps=1e-5
)
NO_GROUPS = dataclasses.replace(QWEN, num_kv_heads=4, tie_embeddings=False)
PAGE, T = 4, 41
PROMPTS = [1, 8, 13]
SCHEDULE = Schedule(page_size=PAGE, bin_tokens=8, budgets=(0, 2, 1, 3, 0))  # bins 0-7, 8-15, ...


@functools.cache
def weights(c):
    """Random weights by name with norm gains that are not all 1, as after training."""
    rng = np.random.default_rng(7)
    vary = lambda x: x * (1 + 0.3 * rng.normal(size=x.shape).astype(np.float32))  # noqa: E731
    return {name: vary(x) for name, x in random_weights(c).items()}


@functools.cache
def make(c):
    model = Decoder(Geometry.from_config(c))
    model.load(weights(c))
    return model.requires_grad_(False)


def oracle(c, ids, **sparse):
    own = {name.removeprefix("layers."): x for name, x in weights(c).items()}
    return oracles.decoder_forward(own, Geometry.from_config(c), ids, **sparse)


def tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, 40, (rows, length))


def whole(c, ids, **kwargs):
    given = {name: torch.as_tensor(x) if "_" in name[-3:] else x for name, x in kwargs.items()}
    return make(c).hidden(torch.as_tensor(ids), **given)


def replay(c, ids, num_dense, prompts):
    how = {"page": PAGE, "num_dense": num_dense}
    budgets = SCHEDULE.budgets_at(np.arange(ids.shape[1]))
    return whole(
        c,
        ids,
        budget_T=budgets,
        sparse_BT=np.arange(ids.shape[1]) >= np.array(prompts)[:, None],
        **how,
    )


def close(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("c", [QWEN, LLAMA, NO_GROUPS], ids=["qwen-tied", "llama", "qwen-mha"])
def test_hidden_gives_the_logits_of_the_oracle(c):
    ids = tokens(2, 23)
    logits = make(c).logits(whole(c, ids))
    for b in range(2):
        close(logits[b], oracle(c, ids[b]))


def test_padding_and_remat_change_nothing():
    ids = tokens(2, 23)
    plain = whole(QWEN, ids)
    close(whole(QWEN, ids, remat=True), plain, 1e-6)
    padded = np.pad(ids, ((0, 0), (0, 7)), constant_values=3)
    close(whole(QWEN, padded)[:, :23], plain, 1e-5)


def test_replay_equals_the_oracle():
    ids = tokens(2, T)
    logits = make(QWEN).logits(replay(QWEN, ids, 1, [5, 20]))
    for b, prompt_len in enumerate((5, 20)):
        want = oracle(
            QWEN, ids[b], sparse_T=np.arange(T) >= prompt_len, budgets=SCHEDULE.budget,
            page_size=PAGE, num_dense_layers=1,
        )  # fmt: skip
        close(logits[b], want)


@pytest.mark.parametrize(("c", "num_dense"), [(QWEN, 1), (LLAMA, 2)], ids=["qwen", "llama"])
def test_replay_equals_sparse_decode_token_by_token(c, num_dense):
    """Rows have scattered pages, and everything that is not written yet is NaN."""
    model, ids, rows = make(c), torch.as_tensor(tokens(len(PROMPTS), T)), len(PROMPTS)
    width = pages_for(T, PAGE)
    order = 1 + np.random.default_rng(0).permutation(rows * width)
    table = torch.as_tensor(order.reshape(rows, width).astype(np.int32))
    cache = kv_cache.allocate(model.geometry, 1 + rows * width, PAGE, torch.float32)
    for x in cache:
        x.fill_(torch.nan)
    out = torch.full((rows, T, model.geometry.hidden_size), torch.nan)
    start = torch.zeros(rows, dtype=torch.int32)
    new = torch.tensor(PROMPTS, dtype=torch.int32)
    first = model.extend(cache, ids[:, : max(PROMPTS)], start, new, table)
    for b, n in enumerate(PROMPTS):
        out[b, :n] = first[b, :n]
    length = new
    while (length < T).any():
        active = length < T
        at = length.clamp(max=T - 1).long()
        k_B = torch.as_tensor(SCHEDULE.budgets_at(at.numpy())).int()
        step = model.extend(
            cache, ids.gather(1, at[:, None]), length, active.int(), table, k_B=k_B,
            max_selected=6, num_dense=num_dense,
        )  # fmt: skip
        out[active, at[active]] = step[active, 0]
        length = length + active.int()
    close(out, replay(c, ids, num_dense, PROMPTS))
    assert (out - whole(c, ids)).abs().amax((1, 2)).min() > 1e-2  # sparse is not dense
