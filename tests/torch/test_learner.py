"""One GRPO step in JAX and in torch, from a rollout to the weights after the optimizer.

Both take the tokens of one sparse rollout; log-probs, correction, micro-batches, gradients and
AdamW are each backend's own. In float32 on CPU the loss agrees within 1e-6 of itself, and the
gradient of each parameter within 1e-5: of its norm as a vector, and of its largest element
elementwise. One exception: sequence_tis multiplies the ratios of a row, so it adds up the rounding
of up to 26 log-probs; from the same log-probs its loss agrees within 1e-6, from each backend's own
within 5e-6 (2.9e-6 measured).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from common import loop
from common.config import Config, GrpoConfig, LearnerConfig
from common.model.geometry import Geometry
from common.objective.corrections import CORRECTIONS
from common.objective.prepare import prepare_batch
from common.rollout import noise
from kernels_pallas import reference
from kernels_triton.ops import REFERENCE
from sparrow_jax import hf
from sparrow_jax import learner as in_jax
from sparrow_jax.backend import export_weights
from sparrow_jax.scorer import Scorer as JaxScorer
from sparrow_jax.toy.random_init import random_decoder
from sparrow_torch import learner as in_torch
from sparrow_torch.engine import Engine
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import Scorer as TorchScorer
from tests.torch.test_engine import LLAMA, QWEN, SPARSE, config, generate

pytestmark = pytest.mark.usefixtures("quick_compilation", "short_programs")

# Sharp attention multiplies rounding: with a gain of 2, gradients only just agree within 1e-5.
QWEN = dataclasses.replace(QWEN, qk_gain=1.0)
STOP = range(7, 12)  # short and long responses
TEMPERATURE = 0.8
CAP, LOW = 1.055, 0.95
FRESH = {"fresh": True, "numbers": (0.2, 0.28, 0.0, 0.0)}
LATER = {"fresh": False, "numbers": (0.2, 0.28, 0.1, 0.0)}


@pytest.fixture(scope="module")
def short_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SEGMENTS", 1)  # a quarter of the compilation, the same result
        yield


class Step(NamedTuple):
    """Means over the minibatch's tokens, clipped tokens, gradient of the mean loss by parameter."""

    loss: float
    k3: float
    num_clipped: int
    grads: dict[str, np.ndarray]


def settings(geometry=QWEN, correction="token_tis", rows=6, **learner):
    """Bounds at which every correction acts; micro-batches of `rows` x 50 tokens."""
    return Config(
        model=geometry,
        rollout=config(temperature=TEMPERATURE),
        grpo=GrpoConfig(
            correction=correction, correction_cap=CAP, correction_low=LOW, num_minibatches=1
        ),
        learner=LearnerConfig(
            tokens_per_microbatch=rows * 50, length_buckets=(50,), remat=False, **learner
        ),
    )


@functools.cache
def learner(geometry):
    """JAX's, with the start weights; never updated."""
    graph, params = random_decoder(geometry)
    return in_jax.Learner(graph, params, settings(geometry), jnp.float32)


@functools.cache
def rollout(geometry):
    engine = Engine(
        Geometry.from_config(geometry), config(), STOP, torch.float32, ops=REFERENCE, device="cpu"
    )
    engine.load_weights(export_weights(learner(geometry).params), 3)
    return generate(engine, SPARSE, num_samples=4, seed=5, temperature=TEMPERATURE)


@functools.cache
def scored(backend, geometry):
    c, params = settings(geometry), learner(geometry).params
    if backend == "jax":
        scorer = JaxScorer(learner(geometry).graph, c, jnp.float32)
        scorer.load_weights(params, 3)
    else:
        scorer = TorchScorer(Decoder(Geometry.from_config(geometry)), c)
        scorer.load_weights(export_weights(params), 3)
    return scorer.logprobs(rollout(geometry))


def pack(backend, c, tokens=None):
    """Advantages, correction and micro-batches, made as the loop makes them.

    The reward of a response is its length: terms of one sign dominate the loss, or its relative
    error would be that of a difference.
    """
    tokens, log_probs = tokens or rollout(c.model), scored(backend, c.model)
    rewards = tokens.total_len_B - tokens.prompt_len_B
    reject_seed = noise.fold_in(c.rollout.seed, 0, loop.REJECT)
    return prepare_batch(
        tokens, log_probs, rewards, c, reject_seed=reject_seed, shuffle_seed=1
    ).batch


def moved(geometry):
    """Weights some way off the start, where ratios are clipped."""
    rng = np.random.default_rng(1)
    step = lambda x: x + np.float32(0.01) * rng.standard_normal(x.shape, np.float32)  # noqa: E731
    return jax.tree.map(step, learner(geometry).params)


def of_jax(c, batch, params, *, fresh, numbers):
    made, (micro,), (denominator,) = learner(c.model), batch.minibatches, batch.denominators
    grads, sums = jax.tree.map(jnp.zeros_like, params), []
    for m in micro:
        grads, more = in_jax.accumulate_gradient(
            params, grads, made.placement.put_rows(vars(m)), numbers, fresh,
            np.float32(TEMPERATURE), graph=made.graph, dtype=made.dtype, remat=False,
        )  # fmt: skip
        sums.append(more)
    return means(sums, hf.flat_weights(grads), denominator)


def of_torch(c, batch, params, *, fresh, numbers, temperature=TEMPERATURE, remat=False):
    (micro,), (denominator,) = batch.minibatches, batch.denominators
    model = Decoder(Geometry.from_config(c.model))
    model.load(export_weights(params))
    how = (numbers, fresh, temperature)
    sums = [in_torch.accumulate_gradient(model, m, *how, remat=remat) for m in micro]
    return means(sums, {name: x.grad for name, x in model.named_parameters()}, denominator)


def means(sums, grads, denominator):
    loss, k3 = (sum(float(s[name]) for s in sums) / denominator for name in ("loss", "k3"))
    num_clipped = sum(int(s["clipped_T"].sum()) for s in sums)
    return Step(loss, k3, num_clipped, {n: np.asarray(g) / denominator for n, g in grads.items()})


def deviations(got, want):
    """Relative: of the loss; the largest of a parameter's gradient by norm, and by element."""
    assert got.grads.keys() == want.grads.keys()
    pairs = [(got.grads[n] - w, w) for n, w in want.grads.items()]
    return (
        abs(got.loss - want.loss) / abs(want.loss),
        max(np.linalg.norm(d) / np.linalg.norm(w) for d, w in pairs),
        max(np.abs(d).max() / np.abs(w).max() for d, w in pairs),
    )


def assert_same(got, want, loss=1e-6):
    assert np.all(np.array(deviations(got, want)) < (loss, 1e-5, 1e-5)), deviations(got, want)
    np.testing.assert_allclose(got.k3, want.k3, rtol=1e-5, atol=1e-8)
    assert got.num_clipped == want.num_clipped


def from_start_to_later(geometry):
    """Log-ratios of the sampled tokens under the weights that are `moved`."""
    scorer = JaxScorer(learner(geometry).graph, settings(geometry), jnp.float32)
    scorer.load_weights(moved(geometry), 3)
    later = scorer.logprobs(rollout(geometry)).logp_dense_BT
    return (later - scored("jax", geometry).logp_dense_BT)[rollout(geometry).response_mask_BT]


def test_no_value_is_near_a_bound_where_a_correction_or_a_clip_jumps():
    """Rounding decides nothing: log-probs differ by 3e-6 here, of 385 tokens none is within 1e-4.

    So on every machine the same tokens are kept, dropped, accepted and clipped. m2po keeps squares
    until their mean reaches log(cap)**2, the one at the bound is 1e-5 away in the mean; errors of
    3e-6 in log-ratios of 0.03 are 2e-7 in it.
    """
    tokens, c = rollout(QWEN), settings(correction="jackpot")
    mask_BT = tokens.response_mask_BT
    dense = scored("jax", QWEN).logp_dense_BT
    assert np.abs(dense - scored("torch", QWEN).logp_dense_BT)[mask_BT].max() < 1e-5
    ratio_BT = np.where(mask_BT, dense - tokens.logp_sparse_BT, 0).astype(np.float64)
    bounds = np.log([LOW, CAP])
    of_rows = ratio_BT.sum(1) / mask_BT.sum(1)
    uniform = noise.position_uniform(
        noise.fold_in(c.rollout.seed, 0, loop.REJECT),
        np.array([p.prompt_id for p in tokens.prompts], np.uint32),
        tokens.sample_B.astype(np.uint32), mask_BT.shape[1],
    )  # fmt: skip
    accepted = np.log(uniform) - np.minimum(ratio_BT - bounds[0], 0)
    qwen, llama = from_start_to_later(QWEN), from_start_to_later(LLAMA)
    for values, edges in (
        (ratio_BT[mask_BT], bounds), (of_rows, bounds), (accepted[mask_BT], [0]),
        (qwen, np.log([0.8, 1.28])), (llama, np.log([0.8, 1.28])),
    ):  # fmt: skip
        assert np.abs(np.subtract.outer(values, edges)).min() > 1e-4
    squares = np.sort(ratio_BT[mask_BT] ** 2)
    means = np.cumsum(squares) / np.arange(1, squares.size + 1)
    assert np.abs(means - bounds[1] ** 2).min() > 5e-6


@pytest.mark.parametrize("name", CORRECTIONS)
def test_loss_and_every_gradient(name):
    c, own = settings(correction=name), 5e-6 if name == "sequence_tis" else 1e-6
    batch, ours = pack("jax", c), pack("torch", c)
    start, later = learner(QWEN).params, moved(QWEN)
    first = of_jax(c, batch, start, **FRESH)
    assert_same(of_torch(c, batch, start, **FRESH), first)
    assert_same(of_torch(c, ours, start, **FRESH), first, own)
    assert first.num_clipped == 0 and len(batch.minibatches[0]) > 3

    second = of_jax(c, batch, later, **LATER)
    assert_same(of_torch(c, ours, later, **LATER, remat=True), second, own)
    assert second.num_clipped > 10 and second.k3 > 0.01
    if name != "none":
        plain = of_torch(c, pack("torch", settings(correction="none")), start, **FRESH)
        assert min(deviations(plain, first)) > 1e-2


def test_the_llama_geometry():
    c = settings(LLAMA)
    batch = pack("torch", c)
    for params, how in ((learner(LLAMA).params, FRESH), (moved(LLAMA), LATER)):
        assert_same(of_torch(c, batch, params, **how), of_jax(c, batch, params, **how))


@pytest.mark.parametrize("rows", [1, 9, 36])
def test_the_split_into_micro_batches_changes_nothing(rows):
    c = settings(rows=rows)
    batch, whole = pack("torch", c), pack("jax", settings())
    num_rows = sum(m.loss_mask_BT.any(1).sum() for m in whole.minibatches[0])
    assert len(batch.minibatches[0]) == -(-num_rows // rows)
    want = of_jax(settings(), whole, moved(QWEN), **LATER)
    assert_same(of_torch(c, batch, moved(QWEN), **LATER), want)


def sequence_mean(batch):
    """Each row's mean, then the mean over rows: tokens of short rows weigh more."""
    (micro,), (denominator,) = batch.minibatches, batch.denominators
    mean = denominator / sum(m.loss_mask_BT.any(1).sum() for m in micro)
    lengths = [np.maximum(m.loss_mask_BT.sum(1, keepdims=True), 1) for m in micro]
    micro = [
        dataclasses.replace(m, advantage_BT=m.advantage_BT * np.float32(mean / n))
        for m, n in zip(micro, lengths, strict=True)
    ]
    return dataclasses.replace(batch, minibatches=[micro])


def one_more_token():
    """A rollout with a mask that counts the first padding token of one row as sampled."""
    tokens = rollout(QWEN)
    row = int(np.argmin(tokens.total_len_B))
    mask_BT = tokens.response_mask_BT.copy()
    mask_BT[row, tokens.total_len_B[row]] = True
    return dataclasses.replace(tokens, response_mask_BT=mask_BT)


FAULTS = {
    "none": lambda c: (pack("torch", c), {}),
    "sequence mean": lambda c: (sequence_mean(pack("torch", c)), {}),
    "no temperature": lambda c: (pack("torch", c), {"temperature": 1.0}),
    "clip range swapped": lambda c: (pack("torch", c), {"numbers": (0.28, 0.2, 0.1, 0.0)}),
    "padding unmasked": lambda c: (pack("torch", c, one_more_token()), {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    """In loss and gradients, a hundred times over the tolerance."""
    c = settings()
    want = of_jax(c, pack("jax", c), moved(QWEN), **LATER)
    batch, changed = FAULTS[fault](c)
    got = of_torch(c, batch, moved(QWEN), **LATER | changed)
    if fault == "none":
        assert_same(got, want)
    else:
        assert np.all(np.array(deviations(got, want)) > (1e-4, 1e-3, 1e-3)), deviations(got, want)


def test_one_optimizer_step():
    """The learner's own update against torch's, from the same start to the weights after it.

    A first step of Adam moves each weight by rate g / (|g| + 1e-8): by the sign of g. So weights
    agree within 1e-3 of the rate where |g| is above 1e-4 of its parameter's largest; an element
    below may be mere rounding (1e-5), and its sign, too: two rates apart at most.
    """
    c = settings(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5)
    in_flax = in_jax.Learner(learner(QWEN).graph, learner(QWEN).params, c, jnp.float32)
    record, rate = in_flax.update(pack("jax", c)).values, 3e-3 / c.learner.warmup_steps
    model, batch = Decoder(Geometry.from_config(QWEN)), pack("torch", c)
    model.load(export_weights(learner(QWEN).params))
    start = {name: x.detach().numpy().copy() for name, x in model.named_parameters()}
    losses = [
        in_torch.accumulate_gradient(model, m, FRESH["numbers"], True, TEMPERATURE)["loss"]
        for m in batch.minibatches[0]
    ]
    grads = {name: x.grad.abs().numpy() for name, x in model.named_parameters()}
    step = in_torch.make_optimizer(c.learner, model.parameters())
    norm = step(batch.denominators[0])
    np.testing.assert_allclose(norm, record["grpo/grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(
        float(sum(losses)) / batch.denominators[0], record["grpo/loss"], rtol=1e-6
    )
    after = hf.flat_weights(in_flax.params)
    for name, x in model.named_parameters():
        difference = np.abs(x.detach().numpy() - np.asarray(after[name]))
        clear = grads[name] > 1e-4 * grads[name].max()
        assert clear.mean() > 0.99 and difference[clear].max() < 1e-3 * rate, name
        assert difference.max() < 2 * rate and np.abs(start[name] - after[name]).min() > 0.1 * rate
        assert x.grad is None


def six_steps(backend, c):
    """Weights after six steps on gradients of which some are clipped and some are not."""
    rng = np.random.default_rng(0)
    w = [rng.standard_normal(shape, np.float32) for shape in ((5,), (4, 3))]
    many = [[np.float32(2**n / 8) * rng.standard_normal(x.shape, np.float32) for x in w]
            for n in (0, 3, 1, 5, 2, 0)]  # fmt: skip
    if backend == "jax":
        optimizer = in_jax.make_optimizer(c)
        state, update = optimizer.init(w), jax.jit(optimizer.update)
        for grads in many:
            updates, state = update(grads, state, w)
            w = optax.apply_updates(w, updates)
        return np.concatenate([np.ravel(x) for x in w])
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(x)) for x in w])
    step = in_torch.make_optimizer(c, model.parameters())
    for grads in many:
        for x, g in zip(model, grads, strict=True):
            x.grad = torch.tensor(8 * g)
        norm = step(8.0)
        assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in grads)), rel=1e-6)
    return np.concatenate([x.detach().numpy().ravel() for x in model])


ADAMW = LearnerConfig(learning_rate=0.02, warmup_steps=3, weight_decay=0.1, max_grad_norm=1.0)


@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 9])
def test_adamw_with_warm_up_and_clipping(warmup_steps):
    c = dataclasses.replace(ADAMW, warmup_steps=warmup_steps)
    np.testing.assert_allclose(six_steps("torch", c), six_steps("jax", c), rtol=0, atol=1e-6)


@pytest.mark.parametrize("setting", [
    {"max_grad_norm": 2.0}, {"warmup_steps": 4}, {"weight_decay": 0.09}, {"beta1": 0.89},
    {"beta2": 0.98}, {"learning_rate": 0.0199},
])  # fmt: skip
def test_another_setting_of_adamw_is_seen(setting):
    other = six_steps("torch", dataclasses.replace(ADAMW, **setting))
    assert np.abs(other - six_steps("torch", ADAMW)).max() > 1e-4
