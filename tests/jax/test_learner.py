"""The GRPO update: gradient against the float64 oracle, splits, ratios, steps without a signal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from common import oracles
from common.config import Config, GrpoConfig, LearnerConfig, ModelConfig, RolloutConfig
from common.model.geometry import Geometry
from common.objective import batching
from common.objective.grpo import Advantages
from common.types import MicroBatch, Prompt, Rollout, Scored, TrainBatch
from sparrow_jax import learner as learning
from sparrow_jax.learner import Learner
from sparrow_jax.scorer import token_logprobs
from sparrow_jax.toy.random_init import random_decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=24, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1,
    head_dim=8, rope_theta=1e4,
)  # fmt: skip
G = Geometry.from_config(MODEL)
GRAPH = random_decoder(MODEL)[0]
F32 = jnp.dtype("float32")
B, T = 6, 16
LIMITS = {"clip_low": 0.2, "clip_high": 0.28}


@functools.cache
def weights(seed=0):
    """Parameters that make some tokens likelier than others."""
    return jax.tree.map(
        lambda x: x * 1.5, random_decoder(dataclasses.replace(MODEL, init_seed=seed))[1]
    )


@functools.cache
def make_optimizer(config):
    """One optimizer object for equal settings: the compiled step is found again."""
    return optimizer_of(config)


optimizer_of = learning.make_optimizer


@pytest.fixture(autouse=True)
def shared_optimizers(monkeypatch):
    monkeypatch.setattr(learning, "make_optimizer", make_optimizer)


def make(kl_coef=0.0, temperature=0.7, **learner):
    settings = {
        "learning_rate": 1e-2, "warmup_steps": 1, "tokens_per_microbatch": 2 * T, "remat": False,
    } | learner  # fmt: skip
    config = Config(
        model=MODEL,
        rollout=RolloutConfig(temperature=temperature),
        grpo=GrpoConfig(kl_coef=kl_coef),
        learner=LearnerConfig(**settings),
    )
    return Learner(GRAPH, weights(), config, F32)


@functools.partial(jax.jit, static_argnames="graph")
def _logp(params, tokens, temperature, graph=GRAPH):
    return token_logprobs(
        nnx.merge(graph, params), tokens, temperature, dtype=F32, remat=False
    )[0]  # fmt: skip


def log_probs(params, tokens, temperature=0.7):
    """Log-probs as the learner sees them, [B, T]."""
    return np.asarray(_logp(params, tokens, np.float32(temperature)))


def example(seed=0, idle_rows=()):
    """A scored rollout of 3 groups of 2 with different lengths, advantages and weights."""
    rng = np.random.default_rng(seed)
    prompt_len, total_len = np.repeat([3, 5, 2], 2), np.array([9, 16, 12, 7, 16, 5])
    t = np.arange(T)
    mask = (t >= prompt_len[:, None]) & (t < total_len[:, None])
    tokens = np.where(t < total_len[:, None], rng.integers(0, 24, (B, T)), 0).astype(np.int32)
    logp = np.where(mask, log_probs(weights(), tokens), 0).astype(np.float32)
    prompt = Prompt(prompt_id=0, tokens=np.zeros(1, np.int32), task="t", answer={})
    rollout = Rollout(
        prompts=[prompt] * B, group_B=np.repeat(np.arange(3), 2), sample_B=np.tile([0, 1], 3),
        tokens_BT=tokens, response_mask_BT=mask, logp_sparse_BT=logp, sparse_BT=mask,
        prompt_len_B=prompt_len,
        total_len_B=total_len, finished_B=np.ones(B, bool), version_BT=np.where(mask, 0, -1),
        stats={},
    )  # fmt: skip
    advantage = rng.normal(size=B).astype(np.float32)
    advantage[list(idle_rows)] = 0
    weight = np.where(mask, rng.uniform(0, 2, (B, T)), 0).astype(np.float32)
    advantages = Advantages(advantage_B=advantage, use_B=np.ones(B, bool))
    return rollout, Scored(logp_dense_BT=logp, entropy_BT=logp * 0), advantages, weight


def pack(data, *, num_minibatches=1, tokens=2 * T, reference=None):
    return batching.pack(
        *data, num_minibatches=num_minibatches, tokens_per_microbatch=tokens, seed=1,
        buckets=(T,), logp_ref_BT=reference,
    )  # fmt: skip


RATE = 1e-3
SGD = optax.sgd(RATE)


def plain(learner):
    """Gradient descent: Adam would hide a wrong scale, and magnify rounding where it is tiny."""
    learner.optimizer, learner._opt_state = SGD, learner._init_state(SGD)
    return learner


def leaves(learner):
    return [np.array(x) for x in jax.tree.leaves(learner.params)]


def micro_batch(far=0.6):
    """One micro-batch with ratios on both sides of both clip limits, and a padding row."""
    rollout, scored, _, weight = example()
    rng = np.random.default_rng(3)
    mask = rollout.response_mask_BT.copy()
    mask[-1] = False  # a padding row: its other fields must not matter
    old = scored.logp_dense_BT + rng.choice([-far, -0.1, 0.1, far], (B, T))
    return MicroBatch(
        tokens_BT=rollout.tokens_BT,
        loss_mask_BT=mask,
        advantage_BT=rng.normal(size=(B, T)).astype(np.float32),
        weight_BT=weight,
        scale_BT=rng.uniform(0.5, 1.5, (B, T)).astype(np.float32),
        logp_old_BT=old.astype(np.float32),
        logp_ref_BT=(scored.logp_dense_BT + rng.normal(0, 0.5, (B, T))).astype(np.float32),
    )


def oracle_arguments(m, logp, kl_coef):
    arrays = (logp, m.logp_old_BT, m.advantage_BT, m.weight_BT, m.loss_mask_BT)
    return arrays, {
        **LIMITS,
        "kl_coef": kl_coef,
        "logp_ref_BT": m.logp_ref_BT,
        "scale_BT": m.scale_BT,
    }


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_oracle_through_the_model(kl_coef):
    m = micro_batch()
    logp = log_probs(weights(), m.tokens_BT)
    arrays, options = oracle_arguments(m, logp, kl_coef)
    want = oracles.policy_loss(*arrays, **options)
    assert min(want.num_clipped_low, want.num_clipped_high) >= 4, "both clips must be hit"
    grad_logp = oracles.policy_loss_grad(*arrays, **options)
    _, pull = jax.vjp(lambda p: _logp(p, m.tokens_BT, np.float32(0.7)), weights())
    (want_grads,) = pull(jnp.asarray(grad_logp, jnp.float32))

    zeros = jax.tree.map(jnp.zeros_like, weights())
    fields = {f: getattr(m, f) for f in learning.FIELDS}
    got_grads, sums = learning.accumulate_gradient(
        weights(), zeros, fields, (0.2, 0.28, kl_coef, 0.0), False, np.float32(0.7),
        graph=GRAPH, dtype=F32, remat=False,
    )  # fmt: skip
    np.testing.assert_allclose(sums["loss"], want.loss_sum, rtol=1e-5)
    assert sums["clipped_T"].sum() == want.num_clipped_low + want.num_clipped_high
    np.testing.assert_allclose(sums["k3"], want.kl_sum, rtol=1e-5)
    for got, target in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        scale = np.abs(target).max()
        assert scale > 0
        np.testing.assert_allclose(got, target, rtol=0, atol=1e-5 * scale)


def test_a_step_goes_along_the_gradient_over_the_denominator():
    m = micro_batch()
    arrays, options = oracle_arguments(m, log_probs(weights(), m.tokens_BT), 0.0)
    arrays = (arrays[0], arrays[0], *arrays[2:])  # on-policy: rho = 1
    grad_logp = jnp.asarray(oracles.policy_loss_grad(*arrays, **options), jnp.float32)
    (grads,) = jax.vjp(lambda p: _logp(p, m.tokens_BT, np.float32(0.7)), weights())[1](grad_logp)
    learner = plain(make())
    report = learner.update(
        TrainBatch(minibatches=[[m]], denominators=[50.0], num_tokens=50.0, stats={})
    ).values
    want = jax.tree.map(lambda w, g: w - RATE * g / 50, weights(), grads)
    for a, b in zip(leaves(learner), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads))) / 50
    assert report["grpo/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert RATE * norm > 1e-3, "the step must be large enough to be seen"


def test_report_is_the_mean_over_all_loss_tokens():
    # a first minibatch of 3 tokens without weight, then one with known ratios
    m, learner = micro_batch(), make(learning_rate=0.0)
    arrays, options = oracle_arguments(m, log_probs(weights(), m.tokens_BT), 0.0)
    want = oracles.policy_loss(*arrays, **options)
    first = dataclasses.replace(m, weight_BT=m.weight_BT * 0)
    tokens = float(m.loss_mask_BT.sum())
    batch = TrainBatch(
        minibatches=[[first], [m]], denominators=[3.0, tokens], num_tokens=3.0 + tokens, stats={}
    )
    result = learner.update(batch)
    report = result.values
    num_clipped = want.num_clipped_low + want.num_clipped_high
    assert report["grpo/loss"] == pytest.approx(want.loss_sum / (tokens + 3), rel=1e-5)
    assert report["grpo/clip_fraction"] == pytest.approx(num_clipped / (tokens + 3))
    per_position = result.clipped_T
    assert per_position.shape == (T,) and per_position.sum() == num_clipped
    assert not per_position[:2].any()  # no response starts before position 2


def test_loss_by_hand():
    # two tokens, A = 1 and -1, w = 2: rho = 1.5 is cut to 1.28, rho = 0.5 to 0.8
    # loss = -2 * min(1.5, 1.28) - 2 * min(-0.5, -0.8) = -2.56 + 1.6 = -0.96
    # k3 of logp_ref - logp = log 2: 2 - log 2 - 1 = 0.306853; twice, times 0.5: + 0.306853
    logp = jnp.log(jnp.array([[0.6, 0.2, 0.9]]))
    batch = {
        "loss_mask_BT": jnp.array([[True, True, False]]),
        "advantage_BT": jnp.array([[1.0, -1.0, 5.0]]),
        "scale_BT": jnp.ones((1, 3)),
        "weight_BT": jnp.array([[2.0, 2.0, jnp.nan]]),  # what is not in the loss cannot harm it
        "logp_old_BT": jnp.log(jnp.array([[0.4, 0.4, 1e-30]])),
        "logp_ref_BT": jnp.log(jnp.array([[1.2, 0.4, 1e-30]])),
    }
    for kl_coef, want in ((0.0, -0.96), (0.5, -0.96 + 0.306853)):
        loss, sums = learning.policy_loss_sum(logp, batch, 0.2, 0.28, kl_coef, 0.0, False)
        assert float(loss) == pytest.approx(want, abs=1e-5)
        assert sums["clipped_T"].tolist() == [1, 1, 0]
        assert float(sums["k3"]) == pytest.approx(2 * 0.306853, abs=1e-5)
    # in the first minibatch rho = 1 whatever logp_old says: -2 * 1 - 2 * -1 = 0
    loss, sums = learning.policy_loss_sum(logp, batch, 0.2, 0.28, 0.0, 0.0, True)
    assert float(loss) == 0 and not sums["clipped_T"].any()


def test_padding_rows_and_columns_do_not_matter():
    m = micro_batch()
    wide = {f: np.pad(getattr(m, f), ((0, 2), (0, T)), constant_values=0) for f in learning.FIELDS}
    wide["tokens_BT"][-2:] = 5
    wide["advantage_BT"][-2:] = 1e6
    wide["logp_old_BT"][-2:] = -1e6
    runs = []
    for batch in (m, MicroBatch(**wide)):
        learner = plain(make(0.3))
        learner.update(TrainBatch(
            minibatches=[[batch]], denominators=[float(m.loss_mask_BT.sum())], num_tokens=1.0,
            stats={},
        ))  # fmt: skip
        runs.append(leaves(learner))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_no_split_into_micro_batches_changes_the_update(kl_coef):
    data = example()
    reference = data[1].logp_dense_BT - 0.3 if kl_coef else None
    runs, counts = [], []
    for tokens in (1, 2 * T, B * T):
        batch = pack(data, num_minibatches=2, tokens=tokens, reference=reference)
        learner = plain(make(kl_coef))
        result = learner.update(batch)
        runs.append((leaves(learner), result))
        counts.append(batch.stats["batch/num_microbatches"])
    assert len(set(counts)) == 3
    for got, result in runs[1:]:
        for a, b in zip(runs[0][0], got, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_array_equal(result.clipped_T, runs[0][1].clipped_T)
        for name, value in result.values.items():
            assert value == pytest.approx(runs[0][1].values[name], rel=1e-4, abs=1e-6), name
    moved = [np.abs(a - b).max() for a, b in zip(leaves(make()), runs[0][0], strict=True)]
    assert max(moved) > 1e-3


def test_ratio_is_exactly_one_in_the_first_minibatch_and_not_in_the_second():
    data = example()
    wrong = dataclasses.replace(data[1], logp_dense_BT=data[1].logp_dense_BT - 1.0)

    def run(scored, num_minibatches, fresh=True):
        learner = make(learning_rate=0.05)
        batch = pack((data[0], scored, *data[2:]), num_minibatches=num_minibatches)
        batch = dataclasses.replace(batch, fresh=fresh)
        return learner.update(batch).values, leaves(learner)

    # one minibatch: a wrong logp_old changes nothing, and nothing is clipped
    (right_report, right), (wrong_report, other) = run(data[1], 1), run(wrong, 1)
    for a, b in zip(right, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert right_report["grpo/clip_fraction"] == wrong_report["grpo/clip_fraction"] == 0
    assert right_report["grpo/ratio_first_minibatch"] == pytest.approx(1, abs=1e-5)
    assert wrong_report["grpo/ratio_first_minibatch"] == pytest.approx(np.e, rel=1e-4)  # exp(1)
    # a batch that is not fresh was scored by other weights: its logp_old counts at once
    report, stale = run(wrong, 1, fresh=False)
    assert report["grpo/clip_fraction"] > 0 and report["grpo/ratio_first_minibatch"] == 1
    assert any((a != b).any() for a, b in zip(right, stale, strict=True))
    # two minibatches: in the second one the weights have moved, and logp_old counts
    (right_report, right), (wrong_report, other) = run(data[1], 2), run(wrong, 2)
    assert right_report["grpo/num_updates"] == 2
    assert right_report["grpo/clip_fraction"] > 0, "so large a step must reach the clip"
    assert any((a != b).any() for a, b in zip(right, other, strict=True))


def test_the_first_step_is_on_policy_even_if_the_first_minibatch_has_no_signal():
    data = example()
    batch = pack(data, num_minibatches=2)
    batch = dataclasses.replace(batch, minibatches=[[], batch.minibatches[1]])
    shifted = dataclasses.replace(batch, minibatches=[[], [
        dataclasses.replace(m, logp_old_BT=m.logp_old_BT - 1) for m in batch.minibatches[1]
    ]])  # fmt: skip
    runs = []
    for b in (batch, shifted):
        learner = make()
        report = learner.update(b).values
        assert report["grpo/num_updates"] == 1 and report["grpo/clip_fraction"] == 0
        runs.append(leaves(learner))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["no advantage", "no usable row"])
def test_without_a_signal_there_is_no_optimizer_step(kind):
    rollout, scored, advantages, weight = example(idle_rows=range(B))
    if kind == "no usable row":
        advantages = dataclasses.replace(advantages, use_B=np.zeros(B, bool))
    learner = make(weight_decay=0.1)  # would shrink the weights in any step that is made
    before, state = leaves(learner), [np.array(x) for x in jax.tree.leaves(learner._opt_state)]
    batch = pack((rollout, scored, advantages, weight), num_minibatches=2)
    report = learner.update(batch).values
    assert report["grpo/num_updates"] == report["grpo/grad_norm"] == report["grpo/loss"] == 0
    for a, b in zip(before, leaves(learner), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(state, jax.tree.leaves(learner._opt_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_learning_rate_zero_leaves_the_weights_flat():
    learner, data = make(learning_rate=0.0), example()
    before = leaves(learner)
    for _ in range(5):
        report = learner.update(pack(data, num_minibatches=2)).values
        assert report["grpo/num_updates"] == 2 and report["grpo/grad_norm"] > 0
        assert report["grpo/ratio_first_minibatch"] == pytest.approx(1, abs=1e-5)
        assert report["grpo/clip_fraction"] == 0
    for a, b in zip(before, leaves(learner), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_goes_on_in_another_learner_bit_by_bit():
    data = example()
    a, b = make(), make()
    a.update(pack(data, num_minibatches=2))
    state = jax.tree.map(lambda x: jnp.array(x), a.state_dict())
    b.load_state_dict(state)
    for learner in (a, b):
        learner.update(pack(data, num_minibatches=2))
    for x, y in zip(jax.tree.leaves(a.state_dict()), jax.tree.leaves(b.state_dict()), strict=True):
        np.testing.assert_array_equal(x, y)
    fresh = make()
    fresh.update(pack(data, num_minibatches=2))
    assert any((x != y).any() for x, y in zip(leaves(a), leaves(fresh), strict=True))


def test_the_start_weights_survive_an_update():
    """They serve as reference policy; the update reuses the memory of its own copy only."""
    start = [np.array(x) for x in jax.tree.leaves(weights())]
    make().update(pack(example()))
    for a, b in zip(start, jax.tree.leaves(weights()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_recomputed_layers_give_the_same_update():
    runs = []
    for remat in (False, True):
        learner = make(remat=remat)
        learner.update(pack(example()))
        runs.append(leaves(learner))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
