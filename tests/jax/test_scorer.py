"""The scorer: log-probs by temperature, padding, buckets and splits; replay and its limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import oracles
from common.config import Config, LearnerConfig, ModelConfig, RolloutConfig
from common.model.geometry import Geometry
from common.schedule.schedule import DENSE, Schedule
from common.types import Prompt, Rollout
from sparrow_jax.engine import Engine
from sparrow_jax.scorer import Scorer
from sparrow_jax.toy.random_init import random_decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=24, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1,
    head_dim=8, rope_theta=1e4, qk_gain=2.0,
)  # fmt: skip
G = Geometry.from_config(MODEL)
GRAPH = random_decoder(MODEL)[0]
F32 = jnp.dtype("float32")
PAGE = 4
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
ROLLOUT = RolloutConfig(
    page_size=PAGE, num_dense_layers=1, max_prompt_tokens=16, max_response_tokens=32, num_slots=4,
    prefill_chunk=16, temperature=0.8,
)  # fmt: skip
SPARSE = Schedule(page_size=PAGE, bin_tokens=16, budgets=(0, 1))


@functools.cache
def weights():
    """Parameters that make some tokens likelier than others."""
    return jax.tree.map(lambda x: x * 1.2, random_decoder(MODEL)[1])


def make(**learner):
    settings = {"tokens_per_microbatch": 4 * 48, "length_buckets": (48,)} | learner
    config = Config(model=MODEL, rollout=ROLLOUT, learner=LearnerConfig(**settings))
    scorer = Scorer(GRAPH, config, F32)
    scorer.load_weights(weights(), 0)
    return scorer


@functools.cache
def example():
    """Random tokens as a rollout: 5 rows, prompts of 1 to 16 tokens, up to 48 in all."""
    rng = np.random.default_rng(1)
    prompt_len, total_len = np.array([1, 16, 5, 8, 3]), np.array([30, 48, 6, 33, 47])
    t = np.arange(48)
    tokens = np.where(t < total_len[:, None], rng.integers(0, 24, (5, 48)), 0).astype(np.int32)
    mask = (t >= prompt_len[:, None]) & (t < total_len[:, None])
    prompt = Prompt(prompt_id=0, tokens=np.zeros(1, np.int32), task="t", answer={})
    return Rollout(
        prompts=[prompt] * 5, group_B=np.arange(5), sample_B=np.zeros(5, np.int32),
        tokens_BT=tokens, response_mask_BT=mask, logp_sparse_BT=np.zeros((5, 48), np.float32),
        prompt_len_B=prompt_len.astype(np.int32), total_len_B=total_len.astype(np.int32),
        sparse_BT=mask & (t > prompt_len[:, None]), finished_B=np.ones(5, bool),
        version_BT=np.where(mask, 0, -1), stats={},
    )  # fmt: skip


def padded(rollout, extra):
    """The same rollout with `extra` empty columns."""
    arrays = {
        f: getattr(rollout, f)
        for f in ("tokens_BT", "response_mask_BT", "logp_sparse_BT", "sparse_BT")
    }
    arrays = {f: np.pad(a, ((0, 0), (0, extra))) for f, a in arrays.items()}
    return dataclasses.replace(rollout, **arrays)


@functools.cache
def logits(schedule=None):
    """Float64 logits of the example by the numpy oracle, [B, T, V]; row t speaks about t + 1."""
    flat = {**nnx.state(nnx.merge(GRAPH, weights()), nnx.Param)}
    layers = flat.pop("layers")
    arrays = {n: np.asarray(v[...], np.float64) for n, v in {**flat, **layers}.items()}
    sparse = {} if schedule is None else {"budgets": schedule.budget, "page_size": PAGE}
    r = example()
    return np.stack([
        oracles.decoder_forward(
            arrays, G, tokens, num_dense_layers=1,
            **({**sparse, "sparse_T": np.arange(len(tokens)) >= n} if sparse else {}),
        )
        for tokens, n in zip(r.tokens_BT, r.prompt_len_B, strict=True)
    ])  # fmt: skip


def expected(temperature, schedule=None):
    """Log-prob and entropy of the token at t, [B, T], from the oracle's logits; 0 outside."""
    r = example()
    p = oracles.log_softmax(logits(schedule)[:, :-1], temperature)
    logp = np.take_along_axis(p, r.tokens_BT[:, 1:, None], 2)[..., 0]
    entropy = -(np.exp(p) * p).sum(-1)
    return [
        np.where(r.response_mask_BT, np.pad(x, ((0, 0), (1, 0))), 0) for x in (logp, entropy)
    ]  # fmt: skip


ALL = np.arange(5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_log_probs_and_entropy_are_those_of_the_oracle_at_the_temperature(temperature):
    got = make().logprobs(example(), temperature=temperature)
    logp, entropy = expected(temperature)
    np.testing.assert_allclose(got.logp_dense_BT, logp, **CLOSE)
    np.testing.assert_allclose(got.entropy_BT, entropy, **CLOSE)
    other, _ = expected(temperature * 1.1)
    assert np.abs(other - got.logp_dense_BT).max() > 0.05, "the temperature must be seen"


def test_the_temperature_is_that_of_the_rollout_unless_given():
    scorer = make()
    a, b = (scorer.logprobs(example(), temperature=t) for t in (None, 0.8))
    np.testing.assert_array_equal(a.logp_dense_BT, b.logp_dense_BT)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_on_policy_the_ratio_of_engine_and_scorer_is_one(temperature):
    """Same weights, dense. (Sparse against replay: test_engine.py, test_end_to_end.py.)"""
    engine = Engine(GRAPH, G, ROLLOUT, [7], F32)
    engine.load_weights(weights(), 0)
    prompts = [
        Prompt(prompt_id=i, tokens=np.arange(1, n), task="t", answer={})
        for i, n in enumerate((2, 9, 17))
    ]
    rollout = engine.generate(
        prompts, num_samples=2, schedule=None, seed=3, temperature=temperature
    )
    scored = make().logprobs(rollout, temperature=temperature)
    ratio = np.exp(scored.logp_dense_BT - rollout.logp_sparse_BT)
    np.testing.assert_allclose(ratio, 1, atol=1e-4)


def test_replay_is_the_overlap_with_the_oracle_of_sparse_decoding():
    got = make().replay(example(), ALL, SPARSE, temperature=0.6)
    dense, sparse = (oracles.log_softmax(logits(s)[:, :-1], 0.6) for s in (None, SPARSE))
    alpha = np.pad(np.minimum(np.exp(dense), np.exp(sparse)).sum(-1), ((0, 0), (1, 0)))
    mask = example().response_mask_BT
    np.testing.assert_allclose(got.alpha_BT, np.where(mask, alpha, 1), **CLOSE)
    np.testing.assert_allclose(got.logp_replay_BT, expected(0.6, SPARSE)[0], **CLOSE)
    assert got.alpha_BT.min() < 0.9, "sparse attention must differ from dense"
    assert 0 <= got.alpha_BT.min() and got.alpha_BT.max() <= 1
    first = np.arange(5), example().prompt_len_B  # comes from the dense prefill
    np.testing.assert_allclose(got.alpha_BT[first], 1, **CLOSE)


@pytest.mark.parametrize("k", [None, 9, DENSE], ids=["dense", "9 + 3 of 12 pages", "all"])
def test_alpha_is_one_where_every_page_is_read(k):
    schedule = k and Schedule(page_size=PAGE, bin_tokens=16, budgets=(k,))
    scorer = make()
    got = scorer.replay(example(), ALL, schedule)
    np.testing.assert_allclose(got.alpha_BT, 1, **CLOSE)
    dense = scorer.logprobs(example()).logp_dense_BT
    np.testing.assert_allclose(got.logp_replay_BT, dense, **CLOSE)


def test_replayed_rows_come_in_the_order_asked_for():
    scorer = make()
    every, some = (scorer.replay(example(), rows, SPARSE) for rows in (ALL, np.array([4, 1])))
    np.testing.assert_array_equal(some.rows, [4, 1])
    np.testing.assert_allclose(some.alpha_BT, every.alpha_BT[[4, 1]], **CLOSE)
    np.testing.assert_allclose(some.logp_replay_BT, every.logp_replay_BT[[4, 1]], **CLOSE)


SETTINGS = {
    "one row at a time": {"tokens_per_microbatch": 1},
    "explicit buckets": {"length_buckets": (6, 48), "tokens_per_microbatch": 192},
    "automatic buckets": {"length_buckets": (), "tokens_per_microbatch": 512},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_buckets_and_splits_change_nothing(settings):
    plain, other = make(), make(**settings)
    a, b = (s.logprobs(example()) for s in (plain, other))
    np.testing.assert_allclose(a.logp_dense_BT, b.logp_dense_BT, **CLOSE)
    np.testing.assert_allclose(a.entropy_BT, b.entropy_BT, **CLOSE)
    if "length_buckets" in settings:
        c, d = (s.replay(example(), ALL, SPARSE) for s in (plain, other))
        np.testing.assert_allclose(c.alpha_BT, d.alpha_BT, **CLOSE)
        np.testing.assert_allclose(c.logp_replay_BT, d.logp_replay_BT, **CLOSE)


@pytest.mark.parametrize("extra", [1, 7])
def test_empty_columns_of_the_rollout_change_nothing(extra):
    scorer, wide = make(), padded(example(), extra)
    a, b = scorer.logprobs(example()), scorer.logprobs(wide)
    np.testing.assert_array_equal(a.logp_dense_BT, b.logp_dense_BT[:, :48])
    c, d = (scorer.replay(r, ALL, SPARSE) for r in (example(), wide))
    np.testing.assert_array_equal(c.alpha_BT, d.alpha_BT[:, :48])
    assert not b.logp_dense_BT[:, 48:].any() and (d.alpha_BT[:, 48:] == 1).all()


def test_tokens_past_the_end_of_a_row_cannot_reach_it():
    r = example()
    past = np.arange(48) >= r.total_len_B[:, None]
    dirty = dataclasses.replace(r, tokens_BT=np.where(past, 5, r.tokens_BT))
    scorer = make()
    a, b = scorer.logprobs(r), scorer.logprobs(dirty)
    np.testing.assert_allclose(a.logp_dense_BT, b.logp_dense_BT, **CLOSE)
    c, d = (scorer.replay(x, ALL, SPARSE) for x in (r, dirty))
    np.testing.assert_allclose(c.alpha_BT, d.alpha_BT, **CLOSE)
