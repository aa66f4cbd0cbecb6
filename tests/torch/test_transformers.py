"""Both decoders and both engines against transformers' Qwen3ForCausalLM and LlamaForCausalLM."""

import copy
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from common.config import RolloutConfig
from sparrow_jax import hf as jax_hf
from sparrow_torch import hf as torch_hf
from tests.torch.transformers_models import (
    EOS,
    IN_BLOCKS,
    LAYERS,
    MODELS,
    OURS,
    greedy,
    their_greedy,
    their_model,
    their_states,
    tokens,
    transformers,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMOLLM2 = Path(__file__).resolve().parents[2] / "runs" / "smollm2"
TOLERANCE = 1e-4  # of a float32 logit
both = pytest.mark.parametrize("ours", OURS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(name, dtype): the directory that transformers' save_pretrained wrote."""

    @functools.cache
    def write(name, dtype="float32"):
        path = tmp_path_factory.mktemp("model")
        copy.deepcopy(their_model(name)).to(getattr(torch, dtype)).save_pretrained(path)
        return path

    return write


def first_layers(weights, count):
    """The model with only its first `count` layers: zeros in o and down pass the input on."""
    off = {"layers.o_LNHD", "layers.down_LFD"}
    keep = np.arange(len(weights["layers.down_LFD"])) < count
    return {
        name: x * keep.reshape(-1, *[1] * (x.ndim - 1)) if name in off else x
        for name, x in weights.items()
    }


def close(got, want):
    return np.abs(got - want).max() < TOLERANCE


@both
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_after_every_layer_and_logits(name, ours, folder):
    read, forward, _ = OURS[ours]
    geometry, weights = read(folder(name))
    tokens_BT = tokens(3, 64)
    want_states, want_logits = their_states(their_model(name), tokens_BT)
    assert len(want_states) == LAYERS and want_logits.std() > 1
    for count, want in enumerate(want_states, 1):
        hidden, logits = forward(geometry, first_layers(weights, count), tokens_BT)
        assert np.abs(hidden - want).max() < 1e-5 * np.abs(want).max(), f"layer {count - 1}"
        assert close(logits, want_logits) == (count == LAYERS)


def change(weights, names, act):
    return weights | {name: act(weights[name]) for name in weights if name.endswith(names)}


QUERIES_AND_KEYS = ("q_LDNH", "k_LDKH", "q_norm_LH", "k_norm_LH")


def ten_epsilons(g, weights):
    return dataclasses.replace(g, norm_eps=10 * g.norm_eps), weights


def other_theta(g, weights):
    return dataclasses.replace(g, rope_theta=2 * g.rope_theta), weights


def no_qk_norm(g, weights):
    rest = {name: x for name, x in weights.items() if not name.endswith(QUERIES_AND_KEYS[2:])}
    return dataclasses.replace(g, qk_norm=False), rest


def interleaved_rope(g, weights):
    """Pairs (2 i, 2 i + 1) lie where the halves (i, i + H / 2) are turned."""
    order = np.arange(g.head_dim).reshape(-1, 2).T.ravel()
    return g, change(weights, QUERIES_AND_KEYS, lambda x: x[..., order])


def swapped_halves(g, weights):
    """Turned by the negative angle."""
    return g, change(weights, QUERIES_AND_KEYS, lambda x: np.roll(x, g.head_dim // 2, -1))


def other_grouping(g, weights):
    """Query head n reads KV head n % K in place of n // R."""
    order = np.arange(g.num_heads).reshape(-1, g.num_kv_heads).T.ravel()
    weights = change(weights, "q_LDNH", lambda x: x[:, :, order])
    return g, change(weights, "o_LNHD", lambda x: x[:, order])


FAULTS = [ten_epsilons, other_theta, no_qk_norm, interleaved_rope, swapped_halves, other_grouping]


@both
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, ours, folder):
    name = "qwen3, 4 heads on 2"
    read, forward, _ = OURS[ours]
    tokens_BT = tokens(3, 64)
    _, want = their_states(their_model(name), tokens_BT)
    _, logits = forward(*fault(*read(folder(name))), tokens_BT)
    assert np.abs(logits - want).max() > 100 * TOLERANCE


def engine_config(max_prompt_tokens, max_response_tokens, **settings):
    return RolloutConfig(
        max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens, num_slots=4,
        decode_chunk=8, prefill_chunk=16, **settings,
    )  # fmt: skip


def assert_greedy(engine, model, prompts, limit, stop):
    """Rows of several lengths in one batch of ours, one by one in theirs."""
    for got, prompt in zip(greedy(engine, prompts), prompts, strict=True):
        want, margin = their_greedy(model, prompt, limit, stop)
        assert got == want and margin > 10 * TOLERANCE


# With JAX, a program to compile for each: the other models with -m slow.
@pytest.mark.parametrize(
    "name, ours",
    [
        *((name, "torch") for name in MODELS),
        ("qwen3, 8 heads on 2", "jax"),
        ("llama, 6 heads on 2", "jax"),
        pytest.param("qwen3, 4 heads on 2", "jax", marks=pytest.mark.slow),
        pytest.param("qwen3, 4 heads on 4", "jax", marks=pytest.mark.slow),
        pytest.param("llama, 4 heads on 2", "jax", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(name, ours, folder):
    read, _, engine = OURS[ours]
    prompts = [tokens(1, n, seed=n)[0] for n in (1, 5, 17, 40)]
    sampler = engine(*read(folder(name)), engine_config(40, 24, page_size=4), [EOS])
    assert_greedy(sampler, their_model(name), prompts, 24, EOS)


def test_a_planted_fault_changes_greedy_tokens(folder):
    name = "qwen3, 4 heads on 2"
    read, _, engine = OURS["torch"]
    config = engine_config(40, 24, page_size=4)
    faulty = engine(*other_grouping(*read(folder(name))), config, [EOS])
    prompt = tokens(1, 40)[0]
    assert greedy(faulty, [prompt]) != [their_greedy(their_model(name), prompt, 24, EOS)[0]]


def jax_copy(source, target, dtype):
    geometry, state = jax_hf.load(source)
    jax_hf.save(target, geometry, state, dtype, source=str(source))


def torch_copy(source, target, dtype):
    torch_hf.save(target, torch_hf.load(source, dtype=getattr(torch, dtype)), source=str(source))


EXPORT = {"jax": jax_copy, "torch": torch_copy}


def assert_same_arrays(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], name)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_exported_weights_load_in_transformers_bit_equal(name, dtype, ours, folder, tmp_path):
    source = folder(name, dtype)
    EXPORT[ours](source, tmp_path, dtype)
    auto = transformers.AutoModelForCausalLM
    got, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert "missing_keys" in info and "unexpected_keys" in info and not any(info.values())
    want = auto.from_pretrained(source)
    assert type(got) is type(their_model(name)) and got.dtype == getattr(torch, dtype)
    assert_same_arrays(*({k: x.float() for k, x in m.state_dict().items()} for m in (got, want)))
    assert got.config.to_dict() == want.config.to_dict() | {"_name_or_path": str(tmp_path)}
    ids = torch.tensor(tokens(1, 9)).long()
    assert torch.equal(got(ids).logits, want(ids).logits)

    (geometry, weights), (first, before) = (OURS[ours][0](x) for x in (tmp_path, source))
    assert geometry == first
    assert_same_arrays(weights, before)


def test_sums_in_blocks_are_as_near_float64_as_those_of_torch():
    """Products at a depth of 1,536; by default XLA on a CPU may be three times as far."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((300, 1536), np.float32), rng.standard_normal((1536, 64), np.float32)
    want = np.float64(a) @ np.float64(b)

    def error(got):
        return np.sqrt(np.mean((np.asarray(got) - want) ** 2) / np.mean(want**2))

    default, blocks = (
        error(jax.jit(jnp.matmul, compiler_options=options)(a, b)) for options in ({}, IN_BLOCKS)
    )
    theirs = error(torch.tensor(a) @ torch.tensor(b))
    print(f"relative error: jax {default:.1e}, in blocks {blocks:.1e}, torch {theirs:.1e}")
    assert blocks < 4e-7 and blocks < 2 * theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours, tolerance, options", [("torch", 1e-4, {}), ("jax", 1e-4, IN_BLOCKS), ("jax", 2e-4, {})]
)
def test_smollm2(ours, tolerance, options):
    """128 tokens of text and 16 greedy ones; logits reach 41.

    float32 has not much more to give: transformers is up to 7e-5 off its own float64 logits.
    """
    path = SMOLLM2 / "model"
    assert path.is_dir(), "there is no SmolLM2 to compare with; run: make smollm2"
    text = (SMOLLM2 / "text.txt").read_text(encoding="utf-8")
    ids = np.int32(Tokenizer.from_file(str(path / "tokenizer.json")).encode(text[:1000]).ids[:128])
    model = transformers.LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
    (*_, state), want = their_states(model, ids[None])
    read, forward, engine = OURS[ours]
    geometry, weights = read(path)
    hidden, logits = forward(geometry, weights, ids[None], **options)
    for what, got, wanted in (("logit", logits, want), ("hidden state", hidden, state)):
        largest, size = np.abs(got - wanted).max(), np.abs(wanted).max()
        print(f"{ours} {options}: {what}s up to {size:.0f}, deviations up to {largest:.1e}")
        assert largest < tolerance
    assert np.sqrt(np.mean((logits - want) ** 2)) < 3e-5
    _, faulty = forward(*ten_epsilons(geometry, weights), ids[None])
    assert np.abs(faulty - want).max() > 100 * tolerance

    stop = model.config.eos_token_id
    sampler = engine(geometry, weights, engine_config(128, 16), [stop])
    assert_greedy(sampler, model, [ids, ids[:40]], 16, stop)
