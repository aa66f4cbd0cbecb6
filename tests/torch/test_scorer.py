"""Scorer and replay in torch against those in JAX, in float32."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from common.config import Config, LearnerConfig
from common.model.geometry import Geometry
from kernels_triton.ops import REFERENCE, resolve
from sparrow_jax.backend import export_weights
from sparrow_jax.scorer import Scorer as JaxScorer
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import Scorer as TorchScorer
from tests.torch.test_engine import (
    ALL_PAGES,
    QWEN,
    SPARSE,
    config,
    generate,
    torch_engine,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def scorers():
    settings = LearnerConfig(tokens_per_microbatch=8 * 50, length_buckets=(50,))
    whole = Config(model=QWEN, rollout=config(temperature=0.8), learner=settings)
    graph, params = weights(QWEN)
    ours = TorchScorer(Decoder(Geometry.from_config(QWEN)), whole)
    theirs = JaxScorer(graph, whole, jnp.float32)
    ours.load_weights(export_weights(params), 3)
    theirs.load_weights(params, 3)
    return ours, theirs


@functools.cache
def rollout(schedule=SPARSE):
    return generate(torch_engine(), schedule, seed=5, temperature=0.8)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)


def test_log_probs_and_entropy():
    got, want = (s.logprobs(rollout()) for s in scorers())
    close(got.logp_dense_BT, want.logp_dense_BT)
    close(got.entropy_BT, want.entropy_BT)


@pytest.mark.parametrize("schedule", [None, SPARSE, ALL_PAGES], ids=["dense", "sparse", "all"])
def test_replay(schedule):
    rows = np.array([20, 3, 11, 26])
    got, want = (s.replay(rollout(), rows, schedule) for s in scorers())
    close(got.alpha_BT, want.alpha_BT)
    close(got.logp_replay_BT, want.logp_replay_BT)
    if schedule is SPARSE:  # it must make a difference, and replay what the engine did
        mask = rollout().response_mask_BT[rows]
        assert got.alpha_BT[mask].min() < 0.95
        close(got.logp_replay_BT[mask], rollout().logp_sparse_BT[rows][mask])
    else:
        close(got.alpha_BT, 1)


def test_the_choice_of_operations():
    assert resolve("auto", "cpu", head_dim=64) is REFERENCE
    assert resolve("reference", "cuda", head_dim=64) is REFERENCE
    assert resolve("reference", "cuda", head_dim=256) is REFERENCE  # as asked: no reason to give
    fallback = resolve("auto", "cuda", head_dim=256)
    assert fallback == dataclasses.replace(REFERENCE, name="reference (no kernel for heads of 256)")
    with pytest.raises(ValueError, match="head_dim=256: kernels need a GPU and heads of 32, 64"):
        resolve("kernel", "cuda", head_dim=256)
    with pytest.raises(ValueError, match="attention='kernel' with device='cpu'"):
        resolve("kernel", "cpu", head_dim=64)
    with pytest.raises(ValueError, match="attention='pallas'"):
        resolve("pallas", "cuda", head_dim=64)
