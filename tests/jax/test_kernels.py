"""The engine and the passes of the learner with Pallas kernels, interpreted, against references."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from common.config import Config, ModelConfig, RolloutConfig
from common.errors import UserError
from common.model.geometry import Geometry
from common.schedule.schedule import Schedule
from common.types import Prompt
from kernels_pallas.ops import REFERENCE, kernels, resolve
from sparrow_jax import backend
from sparrow_jax.engine import Engine
from sparrow_jax.scorer import token_logprobs
from sparrow_jax.toy.random_init import random_decoder

MODEL = ModelConfig(
    vocab_size=40, num_layers=2, hidden_size=32, intermediate_size=32, num_heads=4, num_kv_heads=2,
    head_dim=64, qk_gain=2.0,
)  # fmt: skip
G = Geometry.from_config(MODEL)
SCHEDULE = Schedule(page_size=16, bin_tokens=64, budgets=(0, 1))
CALLED = set()


def recorded(ops):
    """The same operations; CALLED gets the names of those that a program is built with."""

    def record(name):
        def f(*args, **kwargs):
            CALLED.add(name)
            return getattr(ops, name)(*args, **kwargs)

        return f

    return dataclasses.replace(ops, **{name: record(name) for name in OPERATIONS})


OPERATIONS = [f.name for f in dataclasses.fields(REFERENCE) if f.name != "name"]
INTERPRETED = recorded(kernels(pltpu.InterpretParams(dma_execution_mode="on_wait")))


@functools.cache
def model(ops):
    graph, params = random_decoder(MODEL, ops=ops)
    return graph, jax.tree.map(lambda x: x * 1.5, params)


def generate(ops, schedule):
    """Two samples of a prompt of 100 tokens (7 pages, of which a sparse row reads 4)."""
    graph, params = model(ops)
    settings = {"page_size": 16, "num_slots": 2, "decode_chunk": 4, "num_dense_layers": 1}
    lengths = {"max_prompt_tokens": 104, "max_response_tokens": 8, "prefill_chunk": 104}
    engine = Engine(graph, G, RolloutConfig(**settings, **lengths), [39], jnp.float32)
    engine.load_weights(params, 0)
    tokens = np.random.default_rng(5).integers(0, 39, 100).astype(np.int32)
    prompt = Prompt(prompt_id=0, task="x", answer={}, tokens=tokens)
    return engine.generate([prompt], num_samples=2, schedule=schedule, seed=3)


def test_the_engine_samples_the_same_tokens_with_kernels_and_references():
    want, dense = generate(REFERENCE, SCHEDULE), generate(REFERENCE, None)
    got = generate(INTERPRETED, SCHEDULE)
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_allclose(got.logp_sparse_BT, want.logp_sparse_BT, atol=1e-4)
    assert {"append_kv", "select_pages", "sparse_decode"} <= CALLED
    same = np.abs(dense.logp_sparse_BT - want.logp_sparse_BT).max() < 1e-3
    assert not same, "the schedule must make a difference here, else this shows nothing"


def test_log_probs_and_gradient_of_a_model_with_kernels():
    tokens = np.random.default_rng(6).integers(0, 40, (2, 24)).astype(np.int32)

    def loss(params, graph):
        logp, entropy = token_logprobs(
            nnx.merge(graph, params), tokens, np.float32(0.8), dtype=jnp.float32, remat=False
        )
        return (logp * jnp.cos(jnp.arange(24))).sum() + 0.1 * entropy.sum()

    values = [
        jax.value_and_grad(functools.partial(loss, graph=graph))(params)
        for graph, params in (model(REFERENCE), model(INTERPRETED))
    ]
    assert {"flash_prefill", "token_logprob"} <= CALLED
    (want, want_grad), (got, got_grad) = values
    np.testing.assert_allclose(got, want, atol=1e-4)
    pairs = zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_the_choice_is_made_once_and_refused_where_it_cannot_run():
    for head_dim in (64, 128):
        assert resolve("auto", "tpu", head_dim=head_dim) is kernels()
        assert resolve("kernel", "tpu", head_dim=head_dim) is kernels()
        assert resolve("reference", "tpu", head_dim=head_dim) is REFERENCE
    assert resolve("auto", "cpu", head_dim=64) is REFERENCE
    fallback = resolve("auto", "tpu", head_dim=32)
    assert fallback == dataclasses.replace(REFERENCE, name="reference (no kernel for heads of 32)")
    fallback = resolve("auto", "tpu", head_dim=64, num_devices=4)
    assert fallback == dataclasses.replace(REFERENCE, name="reference (no kernel for 4 devices)")
    for wrong in ({"head_dim": 32}, {"head_dim": 64, "num_devices": 4}):
        with pytest.raises(ValueError, match="one TPU device and heads of 64 or 128"):
            resolve("kernel", "tpu", **wrong)
    with pytest.raises(ValueError, match="platform='cpu'.*set reference or auto"):
        backend.build(Config(model=MODEL, attention="kernel"), vocab_size=40, stop_ids=[39])
    with pytest.raises(ValueError, match="attention='triton'"):
        resolve("triton", "cpu", head_dim=64)


def test_pages_that_the_kernels_cannot_read_are_refused():
    for page_size, head_dim in ((8, 128), (16, 64), (128, 64)):
        backend.check_page(page_size, head_dim)
    for page_size, head_dim in ((4, 128), (8, 64), (24, 128), (256, 128)):
        with pytest.raises(UserError, match=f"page_size={page_size}: expected a power of 2 from"):
            backend.check_page(page_size, head_dim)
