"""The decoder against the float64 oracle; whole sequences against the paged cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import oracles
from common.config import ModelConfig
from common.rollout.page_pool import pages_for
from common.schedule.schedule import Schedule
from sparrow_jax import cache as kv_cache
from sparrow_jax.toy.random_init import random_decoder

QWEN = ModelConfig(
    vocab_size=40, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=8, rope_theta=1e4, qk_gain=2.0,
)  # fmt: skip
LLAMA = dataclasses.replace(
    QWEN, qk_norm=False, tie_embeddings=False, num_kv_heads=1, norm_eps=1e-5
)
NO_GROUPS = dataclasses.replace(QWEN, num_kv_heads=4, tie_embeddings=False)
PAGE = 4
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def make(g, seed=0):
    """A model with norm gains that are not all 1, as after training."""
    graph, params = random_decoder(dataclasses.replace(g, init_seed=seed))
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    vary = lambda x: x * (1 + 0.3 * jax.random.normal(next(keys), x.shape))  # noqa: E731
    return nnx.merge(graph, jax.tree.map(vary, params))


def weights(model):
    flat = {**nnx.state(model, nnx.Param)}
    layers = flat.pop("layers")
    return {name: np.asarray(value[...]) for name, value in {**flat, **layers}.items()}


def tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, 40, (rows, length)).astype(np.int32)


@functools.partial(jit, static_argnames=("graph", "remat", "page", "num_dense"))
def _hidden(graph, params, tokens_BT, **kwargs):
    return nnx.merge(graph, params).hidden(tokens_BT, dtype=jnp.float32, **kwargs)


def whole(model, tokens_BT, **kwargs):
    """hidden, compiled once per shape and kind."""
    return np.asarray(_hidden(*nnx.split(model), tokens_BT, **kwargs))


@functools.partial(jit, static_argnames=("graph", "max_selected", "num_dense"))
def _extend(graph, params, *args, **kwargs):
    return nnx.merge(graph, params).extend(*args, dtype=jnp.float32, **kwargs)


def close(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("g", [QWEN, LLAMA, NO_GROUPS], ids=["qwen-tied", "llama", "qwen-mha"])
def test_hidden_gives_the_logits_of_the_oracle(g):
    model, ids = make(g), tokens(2, 23)
    logits = whole(model, ids) @ np.asarray(model.head(jnp.float32)).T
    for b in range(2):
        close(logits[b], oracles.decoder_forward(weights(model), g, ids[b]))


def test_padding_and_remat_change_nothing():
    model, ids = make(QWEN), tokens(2, 23)
    plain = whole(model, ids)
    close(whole(model, ids, remat=True), plain, 1e-6)
    for pad in (1, 7):
        padded = np.pad(ids, ((0, 0), (0, pad)), constant_values=3)
        close(whole(model, padded)[:, :23], plain, 1e-5)


def test_remat_gives_the_same_gradient():
    graph, params = nnx.split(make(LLAMA))
    ids = tokens(1, 9)

    def loss(params, remat):
        model = nnx.merge(graph, params)
        hidden = model.hidden(ids, dtype=jnp.float32, remat=remat)
        return jnp.mean((hidden @ model.head(jnp.float32).T) ** 3)

    plain, remat = (jit(jax.grad(loss), static_argnums=1)(params, r) for r in (False, True))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), remat, plain)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(plain))


class Cached:
    """A model with a paged cache: rows get scattered pages, everything else is NaN."""

    def __init__(self, model, rows, length, **kwargs):
        g = model.geometry
        width = pages_for(length, PAGE) + 1
        num = 1 + rows * width
        order = 1 + np.random.default_rng(0).permutation(num - 1)
        self.table = order.reshape(rows, width).astype(np.int32)
        pool = kv_cache.allocate(g, num, PAGE, jnp.float32)
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
        self.graph, self.params = nnx.split(model)
        self.length = np.zeros(rows, np.int32)
        self.out = np.full((rows, length, g.hidden_size), np.nan, np.float32)
        self.kind = kwargs

    def feed(self, ids_BT, num_new_B, k_B=None):
        new = np.asarray(num_new_B, np.int32)
        piece = np.zeros((len(new), int(ids_BT.shape[1])), np.int32)
        for b, n in enumerate(new):
            piece[b, :n] = ids_BT[b, :n]
        kind = {} if k_B is None else {"k_B": k_B, **self.kind}
        args = self.cache, piece, self.length, new, self.table
        self.cache, hidden = _extend(self.graph, self.params, *args, **kind)
        for b, n in enumerate(new):
            self.out[b, self.length[b] : self.length[b] + n] = hidden[b, :n]
        self.length = self.length + new

    def prefill(self, ids_BT, lengths, chunk):
        """Up to `chunk` tokens a call and row, with ragged ends."""
        lengths = np.asarray(lengths)
        while (self.length < lengths).any():
            new = np.minimum(lengths - self.length, chunk)
            at = np.minimum(self.length[:, None] + np.arange(chunk), ids_BT.shape[1] - 1)
            self.feed(np.take_along_axis(ids_BT, at, 1), new)

    def next_tokens(self, ids_BT):
        active = self.length < ids_BT.shape[1]
        at = np.minimum(self.length, ids_BT.shape[1] - 1)[:, None]
        return np.take_along_axis(ids_BT, at, 1), active


@pytest.mark.parametrize(("g", "chunk"), [(QWEN, 5), (LLAMA, 9)], ids=["qwen", "llama"])
def test_prefill_in_chunks_and_decode_equal_the_whole_pass(g, chunk):
    model, ids = make(g), tokens(3, 22)
    run = Cached(model, 3, 22)
    run.prefill(ids, [1, 8, 19], chunk)
    while (run.length < 22).any():
        piece, active = run.next_tokens(ids)
        run.feed(piece, active)
    close(run.out, whole(model, ids))


PROMPTS = [1, 4, 7, 8, 9, 13, 20]
SCHEDULE = Schedule(page_size=PAGE, bin_tokens=8, budgets=(0, 2, 1, 3, 0))  # bins 0-7, 8-15, ...


def sparse_hidden(model, ids, num_dense, prompts=PROMPTS, schedule=SCHEDULE):
    budgets = schedule.budgets_at(np.arange(ids.shape[1]))
    sparse = np.arange(ids.shape[1]) >= np.array(prompts)[:, None]
    kind = {"page": PAGE, "num_dense": num_dense}
    return whole(model, ids, budget_T=budgets, sparse_BT=sparse, **kind)


@pytest.mark.parametrize(("g", "num_dense"), [(QWEN, 0), (QWEN, 1), (LLAMA, 2)])
def test_replay_equals_sparse_decode_token_by_token(g, num_dense):
    model, ids = make(g), tokens(len(PROMPTS), 41)
    run = Cached(model, len(PROMPTS), 41, max_selected=6, num_dense=num_dense)
    run.prefill(ids, PROMPTS, 8)
    while (run.length < 41).any():
        piece, active = run.next_tokens(ids)
        run.feed(piece, active, SCHEDULE.budgets_at(run.length))
    replay, dense = sparse_hidden(model, ids, num_dense), whole(model, ids)
    response = np.arange(41) >= np.array(PROMPTS)[:, None]
    close(run.out, replay)
    # the prompt is dense, and from position 20 on (6 pages, 2 or 3 candidates) every row is not
    np.testing.assert_allclose(replay[~response], dense[~response], atol=1e-5)
    assert (np.abs(replay - dense).max(-1)[:, 20:].max(-1) > 1e-2).all()
    for wrong in (np.array(PROMPTS) + 4, np.maximum(np.array(PROMPTS) - 4, 0)):
        assert np.abs(sparse_hidden(model, ids, num_dense, wrong) - run.out).max() > 1e-2


def test_replay_equals_the_oracle():
    model, ids = make(QWEN), tokens(2, 41)
    hidden = sparse_hidden(model, ids, 1, [5, 20])
    logits = hidden @ np.asarray(model.head(jnp.float32)).T
    for b, prompt_len in enumerate((5, 20)):
        want = oracles.decoder_forward(
            weights(model), QWEN, ids[b], sparse_T=np.arange(41) >= prompt_len,
            budgets=SCHEDULE.budget, page_size=PAGE, num_dense_layers=1,
        )  # fmt: skip
        close(logits[b], want)


def test_schedule_without_effect_is_dense():
    model, ids = make(QWEN), tokens(2, 41)
    dense = whole(model, ids)
    all_pages = dataclasses.replace(SCHEDULE, budgets=(0, 1, 8))  # 0-7: 2 pages, 8-15: at most 4
    close(sparse_hidden(model, ids, 0, [1, 9], all_pages), dense, 1e-5)
    close(sparse_hidden(model, ids, 3, [1, 9]), dense, 1e-5)
