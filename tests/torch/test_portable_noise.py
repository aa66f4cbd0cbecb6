"""Portable noise: both engines draw the same tokens, 12,288 of 12,288, in float32 on CPU.

Eight cases, {dense, sparse} x {T = 0.6, 1} x {top-p = 0.9, 1}, of 64 rows x 24 tokens: 1,536 each.

When would a token differ? The best two perturbed log-probs lie within g of each other with
probability (1 - sum_v p_v^2) g for small g: the difference of two Gumbel variables is logistic, of
density p_v (1 - p_v) where v just wins. Here that is 0.75 g. Log-probs of the two backends differ
by 2.6e-6 on average (4.1e-5 at most), a gap by some 3.7e-6, and in one of two cases it shrinks: one
token in 700,000 flips, 0.02 in these 12,288. The closest two here are 6.6e-4 apart. Pages are
chosen as surely: 0.01 flips expected in 15,616 choices, the closest scores 1.2e-4 apart.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from common import noise
from common.config import ModelConfig, RolloutConfig
from common.types import Prompt
from kernels_triton.ops import REFERENCE
from sparrow_jax.backend import export_weights
from sparrow_jax.engine import Engine as JaxEngine
from sparrow_jax.model import Decoder
from sparrow_torch.engine import Engine as TorchEngine
from tests.torch.test_engine import PAGE, SPARSE

pytestmark = pytest.mark.usefixtures("quick_compilation")

G = ModelConfig(
    vocab_size=512, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4,
    num_kv_heads=2, head_dim=8, rope_theta=1e4, qk_gain=2.0, tie_embeddings=False,
)  # fmt: skip
LENGTHS = (1, 3, 4, 5, 8, 13, 16, 24)
SAMPLES, RESPONSE, SEED = 8, 24, 6
CASES = [*itertools.product((None, SPARSE), (0.6, 1.0), (0.9, 1.0))]
NAMES = [f"{'sparse' if s else 'dense'}-T{t}-p{p}" for s, t, p in CASES]


@functools.cache
def weights():
    """Graph and parameters with a head that makes tokens matter: mean p 0.4 (T = 0.6) and 0.1."""
    graph, params = nnx.split(Decoder(G, np.random.default_rng(0)))
    params["head_VD"][...] *= 2.5
    return graph, params


@functools.cache
def engine(backend, num_slots=64):
    config = RolloutConfig(
        page_size=PAGE, max_prompt_tokens=24, max_response_tokens=RESPONSE, num_slots=num_slots,
        decode_chunk=8, prefill_chunk=24, num_dense_layers=1, ignore_eos=True,
        cache_pages=1 + 72 * 12,  # of one size, so that JAX compiles prefill once
    )  # fmt: skip
    graph, params = weights()
    if backend == "jax":
        made = JaxEngine(graph, G, config, (), jnp.float32)
        made.load_weights(params, 0)
    else:
        made = TorchEngine(G, config, (), torch.float32, ops=REFERENCE, device="cpu")
        made.load_weights(export_weights(params), 0)
    return made


def generate(made, case, num_samples=SAMPLES, seed=SEED, prompts=range(8)):
    schedule, temperature, top_p = case
    drawn = [np.random.default_rng(i).integers(0, G.vocab_size, n) for i, n in enumerate(LENGTHS)]
    return made.generate(
        [
            Prompt(prompt_id=100 + i, task="x", answer={}, tokens=drawn[i].astype(np.int32))
            for i in prompts
        ],
        num_samples=num_samples, seed=seed, schedule=schedule, temperature=temperature, top_p=top_p,
    )  # fmt: skip


@functools.cache
def rollout(backend, case):
    return generate(engine(backend), case)


@functools.cache
def in_numpy(case):
    """The torch engine's rollout, and of each token drawn in it, from the same logits in float64:

    numpy's token minus the engine's, the gap of the best two, and 1 - sum_v p_v^2; [24, 64].
    """
    programs, facts = engine("torch").open(), []
    drawn_by = programs.sample

    def recorded(logits_BV, key_B, position_B, temperature, top_p):
        token_B, logp_B = drawn_by(logits_BV, key_B, position_B, temperature, top_p)
        logits = logits_BV.double().numpy() / temperature
        key, position = [k.numpy() for k in key_B], position_B.numpy()
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        order = np.argsort(-p, axis=1, kind="stable")
        ranked = np.take_along_axis(p, order, 1)
        ranked[np.cumsum(ranked, 1) - ranked >= top_p] = 0
        np.put_along_axis(p, order, ranked / ranked.sum(1, keepdims=True), 1)
        bits = noise.token_bits(key, position, np.arange(G.vocab_size))
        with np.errstate(divide="ignore"):
            score = np.log(p) - np.log(-np.log(np.float64(noise.uniform(bits))))
        second, best = np.partition(score, -2, axis=1)[:, -2:].T
        facts.append((score.argmax(1) - token_B.numpy(), best - second, 1 - (p * p).sum(1)))
        return token_B, logp_B

    programs.sample = recorded
    try:
        return generate(engine("torch"), case), *map(np.array, zip(*facts, strict=True))
    finally:
        programs.sample = drawn_by


def deviation(case):
    mask = rollout("jax", case).response_mask_BT
    a, b = (f.logp_sparse_BT[mask] for f in (rollout("jax", case), in_numpy(case)[0]))
    return np.abs(a - b)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_same_tokens(case):
    want, (got, off, *_) = rollout("jax", case), in_numpy(case)
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    assert not off.any()  # and numpy's: the third of the three
    assert got.response_mask_BT.sum() == off.size == 1536
    assert deviation(case).max() < 1e-4
    assert len(np.unique(got.tokens_BT[got.response_mask_BT])) > 300


def test_it_was_no_luck():
    """12,288 tokens, no tie closer than backends differ, and as many near ones as there must be."""
    _, _, gaps, densities = map(np.array, zip(*map(in_numpy, CASES), strict=True))
    assert gaps.size == 12_288
    largest = max(deviation(case).max() for case in CASES)
    assert gaps.min() > 5e-4 > 5 * largest
    expected = 0.01 * densities.mean()
    assert 0.7 * expected < (gaps < 0.01).mean() < 1.3 * expected


def test_mode_temperature_and_top_p_each_make_a_difference():
    tokens = [rollout("jax", case).tokens_BT for case in CASES]
    for a, b in itertools.combinations(tokens, 2):
        assert (a != b).mean() > 0.02


@pytest.mark.parametrize("num_slots", [1, 7])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_batches_of_1_and_7_and_64(backend, num_slots):
    """Rows stay what they are among 64, dense one by one, sparse in slots refilled three times."""
    case, num_samples, prompts = {1: (CASES[3], 1, (2, 7)), 7: (CASES[6], 3, range(8))}[num_slots]
    got = generate(engine(backend, num_slots), case, num_samples, prompts=prompts)
    whole = rollout(backend, case) if backend == "jax" else in_numpy(case)[0]
    rows = np.array([p.prompt_id - 100 for p in got.prompts]) * SAMPLES + got.sample_B
    np.testing.assert_array_equal(got.tokens_BT, whole.tokens_BT[rows, : got.tokens_BT.shape[1]])


FAULTS = {
    "none": ("row_key", lambda key, *x: key(*x)),
    "sample and prompt swapped": ("row_key", lambda key, seed, p, s: key(seed, s, p)),
    "the next position": ("token_bits", lambda bits, key, t, v: bits(key, t + 1, v)),
    "the other word of two": ("token_bits", lambda bits, key, t, v: bits(key, t, v ^ 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_noise_is_seen(fault, monkeypatch):
    name, faulty = FAULTS[fault]
    monkeypatch.setattr(noise, name, functools.partial(faulty, getattr(noise, name)))
    got, want = generate(engine("torch"), CASES[3]), rollout("jax", CASES[3])
    differ = got.tokens_BT != want.tokens_BT
    assert not differ.any() if fault == "none" else differ.mean() > 0.4


def test_another_seed_draws_other_tokens():
    mask = rollout("jax", CASES[3]).response_mask_BT
    for backend in ("jax", "torch"):
        other = generate(engine(backend), CASES[3], seed=SEED + 1)
        assert (other.tokens_BT != rollout("jax", CASES[3]).tokens_BT)[mask].mean() > 0.7
