"""Eight devices compute what one does. In a process of its own: the number of devices is fixed."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from sparrow_jax import sharding
from sparrow_jax.model import PARTITION
from tests.conftest import ROOT

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from common.config import Config, LearnerConfig, ModelConfig
from common.types import MicroBatch, TrainBatch
from sparrow_jax.learner import JaxLearner
from sparrow_jax.model import PARTITION, Decoder

assert len(jax.devices()) == 8
G = ModelConfig(vocab_size=24, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=4,
                num_kv_heads=2, head_dim=8, tie_embeddings=False)
graph, params = nnx.split(Decoder(G, np.random.default_rng(0)))

def micro(seed, rows=6, length=16):
    rng = np.random.default_rng(seed)
    logp = rng.normal(-2, 0.3, (rows, length)).astype(np.float32)
    return MicroBatch(
        tokens_BT=rng.integers(0, 24, (rows, length)).astype(np.int32),
        loss_mask_BT=rng.random((rows, length)) < 0.7,
        advantage_BT=rng.normal(size=(rows, length)).astype(np.float32),
        weight_BT=rng.random((rows, length)).astype(np.float32),
        logp_old_BT=logp, logp_ref_BT=logp - 0.1)

batches = [[micro(0), micro(1)], [micro(2)]]
batch = TrainBatch(minibatches=batches, stats={},
                   denominators=[float(sum(m.loss_mask_BT.sum() for m in b)) for b in batches])
results = {}
for mesh in ((1, 1, 1), (2, 2, 2)):
    config = Config(model=G, learner=LearnerConfig(mesh=mesh, remat=False))
    learner = JaxLearner(graph, params, config, jnp.dtype("float32"))
    sgd = optax.sgd(0.1)  # Adam would magnify rounding where gradients are tiny
    learner.optimizer, learner._opt_state = sgd, learner._init_state(sgd)
    report = dict(learner.update(batch))
    clipped = report.pop("clipped_by_position")
    state = learner.state_dict()["params"]
    flat = {"/".join(map(str, k)): v for k, v in nnx.traversals.flatten_mapping(state).items()}
    results[mesh] = report, clipped, flat
(report_a, clipped_a, one), (report_b, clipped_b, eight) = results.values()
start = nnx.traversals.flatten_mapping(nnx.to_pure_dict(params))
moved = 0
for (name, a), b, s in zip(one.items(), eight.values(), start.values(), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
    moved = max(moved, float(np.abs(np.asarray(a) - np.asarray(s)).max()))
    spec = PARTITION[name.split("/")[-1]]
    axes = [x for x in spec if x is not None]
    assert b.sharding.spec == spec, (name, b.sharding)
    share = b.addressable_shards[0].data.size / b.size
    assert share == 0.5 ** len(axes), (name, spec, share)  # each named axis has two devices
    assert len(b.sharding.device_set) == 8 and len(a.sharding.device_set) == 1
assert moved > 1e-3
for key in report_a:
    np.testing.assert_allclose(report_a[key], report_b[key], rtol=1e-4, atol=1e-6, err_msg=key)
np.testing.assert_array_equal(clipped_a, clipped_b)
print("equal on one and eight devices")
"""


def test_an_update_on_eight_devices_equals_that_on_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = {
        **os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.stdout == "equal on one and eight devices\n", result.stderr[-3000:]


def test_more_devices_than_there_are_get_one_line():
    have = len(jax.devices())
    with pytest.raises(ValueError, match=rf"needs {have + 1} devices, this process sees {have}"):
        sharding.make_mesh((have + 1, 1, 1))


def test_every_parameter_is_placed_and_kept():
    mesh = sharding.make_mesh((1, 1, 1))
    tree = {"layers": {"q_LDNH": np.ones((2, 3, 4, 5), np.float32)}, "embed_VD": np.ones((4, 3))}
    placed = sharding.shard_params(tree, mesh)
    assert placed["layers"]["q_LDNH"].sharding.spec == PARTITION["q_LDNH"]
    assert placed["embed_VD"].sharding.spec == PARTITION["embed_VD"]
    np.testing.assert_array_equal(placed["layers"]["q_LDNH"], tree["layers"]["q_LDNH"])
    assert sharding.batch_sharding(mesh).spec == sharding.BATCH
