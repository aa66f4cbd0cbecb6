"""Eight devices compute what one does. In a process of its own: the number of devices is fixed."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from common.errors import UserError
from sparrow_jax.placement import PARTITION, ROWS, Placement
from tests.conftest import ROOT

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from common.config import Config, LearnerConfig, ModelConfig, RolloutConfig
from common.types import MicroBatch, TrainBatch
from sparrow_jax import hf
from sparrow_jax.backend import export_weights
from sparrow_jax.learner import Learner
from sparrow_jax.placement import PARTITION, Placement
from sparrow_jax.scorer import Scorer
from sparrow_jax.toy.random_init import random_decoder

assert len(jax.devices()) == 8
G = ModelConfig(vocab_size=24, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=4,
                num_kv_heads=2, head_dim=8, tie_embeddings=False)
graph, params = random_decoder(G)

def micro(seed, rows=6, length=16):
    rng = np.random.default_rng(seed)
    logp = rng.normal(-2, 0.3, (rows, length)).astype(np.float32)
    return MicroBatch(
        tokens_BT=rng.integers(0, 24, (rows, length)).astype(np.int32),
        loss_mask_BT=rng.random((rows, length)) < 0.7,
        advantage_BT=rng.normal(size=(rows, length)).astype(np.float32),
        weight_BT=rng.random((rows, length)).astype(np.float32),
        scale_BT=np.ones((rows, length), np.float32), logp_old_BT=logp, logp_ref_BT=logp - 0.1)

batches = [[micro(0), micro(1)], [micro(2)]]
batch = TrainBatch(minibatches=batches, stats={}, num_tokens=1.0,
                   denominators=[float(sum(m.loss_mask_BT.sum() for m in b)) for b in batches])
results, exported = {}, {}
for mesh in ((1, 1, 1), (2, 2, 2)):
    config = Config(model=G, learner=LearnerConfig(mesh=mesh, remat=False))
    learner = Learner(graph, params, config, jnp.dtype("float32"))
    sgd = optax.sgd(0.1)  # Adam would magnify rounding where gradients are tiny
    learner.optimizer, learner._opt_state = sgd, learner._init_state(sgd)
    result = learner.update(batch)
    report, clipped = result.values, result.clipped_T
    for name, x in export_weights(learner.params).items():  # whole, wherever the parts lie
        exported.setdefault(name, []).append(x)
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
assert moved > 1e-3 and exported.keys() == hf.flat_weights(params).keys()
for name, (a, b) in exported.items():
    assert isinstance(a, jax.Array) and isinstance(b, np.ndarray), name
    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
for key in report_a:
    np.testing.assert_allclose(report_a[key], report_b[key], rtol=1e-4, atol=1e-6, err_msg=key)
np.testing.assert_array_equal(clipped_a, clipped_b)

tokens, alphas = np.random.default_rng(3).integers(0, 24, (4, 20)).astype(np.int32), []
peaked = jax.tree.map(lambda x: 1.5 * x, params)
for mesh in ((1, 1, 1), (2, 2, 2)):  # four rows, one for each share of the batch
    config = Config(model=G, rollout=RolloutConfig(page_size=2, num_dense_layers=1),
                    learner=LearnerConfig(mesh=mesh))
    scorer = Scorer(graph, config, jnp.dtype("float32"))
    scorer.load_weights(Placement.on_devices(mesh).put_weights(peaked), 0)
    budgets = [np.full(20, 1, np.int32), np.full(20, 99, np.int32)]
    out = scorer.overlaps(tokens, np.ones(tokens.shape, bool), budgets, np.float32(1), top=5)
    alphas.append([np.stack([x.alpha_BT, x.logp_BT, x.estimate_BT]) for x in out])
np.testing.assert_allclose(alphas[0], alphas[1], rtol=1e-5, atol=1e-5)
few, every = (x[0] for x in alphas[1])
assert few.min() < 0.95 and abs(every - 1).max() < 1e-6
print("equal on one and eight devices")
"""

OPERATIONS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from kernels_pallas.layout import landmark_shape, page_shape
from kernels_pallas.ops import REFERENCE
from sparrow_jax import placement, sharded_ops

mesh = placement.Placement.on_devices((2, 2, 2)).mesh  # 4 shares of rows and pages, 2 of heads
ops = sharded_ops.shard_ops(REFERENCE, mesh)
rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
B, N, K, H, C, PAGES, D, V = 8, 8, 4, 8, 4, 6, 16, 40
M = 2 * PAGES + 1  # of a share: two rows and the null page

def put(x, *where):
    return jax.device_put(x, NamedSharding(mesh, P(*where)))

def shares(x, axis=0):
    return np.split(np.asarray(x), 4, axis)

rows, heads = placement.ROWS, placement.HEADS
pool = normal(1, K, 4 * M, 2, C, H)
marks = normal(1, 4 * M, K, H)
table = np.tile(1 + rng.permutation(2 * PAGES).reshape(2, PAGES), (4, 1)).astype(np.int32)
length = np.array([24, 9, 17, 24, 1, 13, 20, 5], np.int32)
k = np.array([1, 0, 2, 1, 0, 2, 1, 1], np.int32)
q, new_k, new_v = normal(B, 1, N, H), normal(B, 1, K, H), normal(B, 1, K, H)

def decode(ops, pool, marks, q, new_k, new_v, table, length, k):
    one = jnp.ones_like(length)
    pool, marks = ops.append_kv(pool, marks, 0, new_k, new_v, table, length - 1, one)
    pages = (length + C - 1) // C
    ids, count = ops.select_pages(q[:, 0], marks, 0, table, pages, k, max_selected=5)
    skipped = (pages - count) * C
    sparse = ops.sparse_decode(q, pool, 0, ids, length - skipped - 1, length - skipped)
    dense = ops.sparse_decode(q, pool, 0, table, length - 1, length)
    return pool, marks, ids, count, *sparse, *dense

args = pool, marks, q, new_k, new_v, table, length, k
per_row = P(rows, None), P(rows), P(rows)
specs = (placement.POOL, placement.LANDMARKS, *[placement.QUERIES] * 3, *per_row)
got = jax.jit(lambda *a: decode(ops, *a))(*(put(a, *s) for a, s in zip(args, specs)))
axes = (2, 1) + (0,) * 6  # where the shares of rows or pages lie
split = zip(*(shares(a, x) for a, x in zip(args, axes)))
parts = [decode(REFERENCE, *map(jnp.asarray, share)) for share in split]
for name, a, *want in zip("pool marks ids count out lse dense lse".split(), got, *parts):
    a = shares(a, {"pool": 2, "marks": 1}.get(name, 0))
    for x, y in zip(a, want):
        x, y = (np.delete(v, 0, {"pool": 2, "marks": 1}[name]) if name in ("pool", "marks") else v
                for v in (x, np.asarray(y)))  # all but the null page
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)

T = 22
q, kk, vv = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H)
budget, sparse = np.full(T, 1, np.int32), np.arange(T) >= np.arange(B)[:, None]
hidden, other, head = normal(B * T, D), normal(B * T, D), normal(V, D)
token = rng.integers(0, V, B * T).astype(np.int32)

def train(ops, q, kk, vv, hidden, other, head, sparse, token):
    def loss(q, kk, vv, hidden, head):
        dense = ops.flash_prefill(q, kk, vv)
        replay = ops.flash_prefill(q, kk, vv, budget_T=budget, sparse_BT=sparse, page=C)
        logp, entropy = ops.token_logprob(hidden, head, token, temperature=jnp.float32(0.8))
        weight = jnp.cos(jnp.arange(len(logp)))
        return (dense * replay).sum() + (logp * weight).sum() + entropy.sum()

    value, grads = jax.value_and_grad(loss, tuple(range(5)))(q, kk, vv, hidden, head)
    return value, *grads, *ops.acceptance_overlap(hidden, other, head, token, temperature=0.8)

args = q, kk, vv, hidden, other, head, sparse, token
flat = P(rows, None)
specs = (*[placement.QUERIES] * 3, flat, flat, P(heads, None), flat, P(rows))
got = jax.jit(lambda *a: train(ops, *a))(*(put(a, *s) for a, s in zip(args, specs)))
want = jax.jit(lambda *a: train(REFERENCE, *a))(*args)
for name, a, b in zip("value dq dk dv dhidden dhead alpha logp".split(), got, want):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max(), err_msg=name)
print("equal on one and eight devices")
"""


@pytest.mark.parametrize("program", ["PROGRAM", "OPERATIONS"])
def test_eight_devices_compute_what_one_does(program):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = {
        **os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", globals()[program]]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.stdout == "equal on one and eight devices\n", result.stderr[-3000:]


def test_more_devices_than_there_are_get_one_line():
    have = len(jax.devices())
    with pytest.raises(UserError, match=rf"needs {have + 1} devices, this process sees {have}"):
        Placement.on_devices((have + 1, 1, 1))


def test_every_parameter_is_placed_and_kept():
    one = Placement.on_devices((1, 1, 1))
    tree = {"layers": {"q_LDNH": np.ones((2, 3, 4, 5), np.float32)}, "embed_VD": np.ones((4, 3))}
    placed = one.put_weights(tree)
    assert placed["layers"]["q_LDNH"].sharding.spec == PARTITION["q_LDNH"]
    assert placed["embed_VD"].sharding.spec == PARTITION["embed_VD"]
    np.testing.assert_array_equal(placed["layers"]["q_LDNH"], tree["layers"]["q_LDNH"])
    assert one.rows.spec == P(ROWS)


def test_a_mesh_that_does_not_divide_the_model_gets_one_line():
    mesh = jax.sharding.AbstractMesh((2, 1, 4), ("data", "fsdp", "tensor"))
    tree = {"layers": {"k_LDKH": np.ones((2, 3, 2, 8), np.float32)}}
    words = r"learner.mesh=\(2, 1, 4\): cannot split 2 of k_LDKH \[2, 3, 2, 8\] over tensor=4"
    with pytest.raises(UserError, match=words):
        Placement(mesh).put_weights(tree)
