"""Scorer, replay, GRPO loss and gradients in torch against those in JAX, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import Config, LearnerConfig
from common.types import MicroBatch
from kernels_triton.ops import REFERENCE, resolve
from sparrow_jax import hf, learner
from sparrow_jax.backend import export_weights
from sparrow_jax.scorer import JaxScorer
from sparrow_torch.learner import accumulate_gradient
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import TorchScorer
from tests.torch.test_engine import (
    ALL_PAGES,
    LLAMA,
    QWEN,
    SPARSE,
    config,
    generate,
    torch_engine,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def model(geometry):
    decoder = Decoder(geometry)
    decoder.load(export_weights(weights(geometry)[1]))
    return decoder


@functools.cache
def scorers():
    settings = LearnerConfig(tokens_per_microbatch=8 * 50, length_buckets=(50,))
    whole = Config(model=QWEN, rollout=config(temperature=0.8), learner=settings)
    graph, params = weights(QWEN)
    ours, theirs = TorchScorer(Decoder(QWEN), whole), JaxScorer(graph, whole, jnp.float32)
    ours.load_weights(export_weights(params), 3)
    theirs.load_weights(params, 3)
    return ours, theirs


@functools.cache
def rollout(schedule=SPARSE):
    return generate(torch_engine(), schedule, temperature=0.8)


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


def micro(geometry, rows=3, length=22):
    rng = np.random.default_rng(0)
    shape = rows, length
    logp = rng.normal(-3.9, 0.3, shape).astype(np.float32)
    normal = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return MicroBatch(
        tokens_BT=rng.integers(0, geometry.vocab_size, shape).astype(np.int32),
        loss_mask_BT=rng.random(shape) < 0.7,
        advantage_BT=normal(),
        weight_BT=np.abs(normal()),
        logp_old_BT=logp,
        logp_ref_BT=logp - 0.1 * normal(),
    )


@pytest.mark.parametrize("geometry", [QWEN, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize(("fresh", "kl_coef", "remat"), [(True, 0.0, False), (False, 0.1, True)])
def test_loss_and_every_gradient(geometry, fresh, kl_coef, remat):
    graph, params = weights(geometry)
    batch, numbers = micro(geometry), (0.2, 0.28, kl_coef)
    arrays = {name: getattr(batch, name) for name in learner.FIELDS}
    want, sums = learner.accumulate_gradient(
        params, jax.tree.map(jnp.zeros_like, params), arrays, numbers, fresh, jnp.float32(0.8),
        graph=graph, dtype=jnp.dtype("float32"), remat=False,
    )  # fmt: skip
    decoder = model(geometry)
    got = accumulate_gradient(decoder, batch, numbers, fresh, 0.8, remat=remat)
    np.testing.assert_allclose(got["loss"], sums["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["k3"], sums["k3"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got["clipped_T"], sums["clipped_T"])
    gradients = hf.flat_weights(want)
    assert gradients.keys() == dict(decoder.named_parameters()).keys()
    for name, x in decoder.named_parameters():
        scale = float(np.abs(gradients[name]).max())
        assert scale > 0, name
        np.testing.assert_allclose(x.grad, gradients[name], atol=1e-4 * scale, err_msg=name)


def test_another_temperature_is_seen():
    """The comparison above is sharp: half the temperature moves every gradient."""
    grads = []
    for temperature in (0.8, 0.4):
        decoder = model(QWEN)
        accumulate_gradient(decoder, micro(QWEN), (0.2, 0.28, 0.0), True, temperature)
        grads.append([x.grad for x in decoder.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() > 1e-2 * a.abs().max()


def test_the_choice_of_operations():
    assert resolve("auto", "cpu", head_dim=64) is REFERENCE
    assert resolve("reference", "cuda", head_dim=64) is REFERENCE
    with pytest.raises(ValueError, match="attention='kernel' with device='cpu'"):
        resolve("kernel", "cpu", head_dim=64)
    with pytest.raises(ValueError, match="attention='pallas'"):
        resolve("pallas", "cuda", head_dim=64)
