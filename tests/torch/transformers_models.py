"""Small random models by transformers, and one way to run each of our backends on them.

OURS has three functions of each backend: read(path) gives geometry and weights by name,
forward(geometry, weights, tokens) final hidden states and logits, engine(...) a loaded engine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from common.model import hf
from common.types import Prompt
from kernels_triton.ops import REFERENCE
from sparrow_jax import hf as jax_hf
from sparrow_jax.engine import Engine as JaxEngine
from sparrow_jax.model import Decoder as JaxDecoder
from sparrow_torch.engine import Engine as TorchEngine
from sparrow_torch.model import Decoder as TorchDecoder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB, LAYERS, EOS = 50, 3, 7


def describe(family, hidden, heads, kv_heads, head_dim, tied, theta, eps):
    return family, {
        "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "hidden_size": hidden,
        "intermediate_size": 40, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "tie_word_embeddings": tied, "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": 128, "eos_token_id": EOS, "pad_token_id": 0,
    }  # fmt: skip


MODELS = {
    "qwen3, 4 heads on 2": describe("Qwen3", 24, 4, 2, 16, True, 1e6, 1e-6),
    "qwen3, 8 heads on 2": describe("Qwen3", 32, 8, 2, 8, False, 1e4, 1e-5),
    "qwen3, 4 heads on 4": describe("Qwen3", 32, 4, 4, 8, True, 5e5, 1e-5),
    "llama, 4 heads on 2": describe("Llama", 32, 4, 2, 8, False, 1e4, 1e-5),
    "llama, 6 heads on 2": describe("Llama", 24, 6, 2, 8, True, 1e5, 1e-6),
}


@functools.cache
def their_model(name):
    """Random weights that tell apart what could be confused: no norm is 1, no two heads alike.

    Embeddings as small as those of real models, so that epsilon counts; logits of several units.
    """
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(list(MODELS).index(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            x = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                x = (1 + 0.3 * x) * (20 if key == "model.norm.weight" else 1)
            else:
                x *= 0.02 if "embed" in key or "head" in key else weight.shape[1] ** -0.5
            weight.copy_(x)
    return model.eval()


def tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(8, VOCAB, (rows, length)).astype(np.int32)


@torch.no_grad()
def their_states(model, tokens_BT):
    """Hidden states after 1, 2, ... layers, each through the last norm, and logits."""
    out = model(torch.tensor(tokens_BT).long(), output_hidden_states=True, use_cache=False)
    inner = [model.model.norm(x) for x in out.hidden_states[1:-1]]
    return [x.numpy() for x in (*inner, out.hidden_states[-1])], out.logits.numpy()


def their_greedy(model, prompt, limit, stop):
    """The tokens after one prompt, and the smallest lead of a logit over the next best."""
    ids = torch.tensor(prompt).long()[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit,
        eos_token_id=stop, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


def greedy(engine, prompts):
    """The tokens after each prompt, all prompts in one call."""
    batch = [
        Prompt(prompt_id=i, task="x", answer={}, tokens=np.int32(x)) for i, x in enumerate(prompts)
    ]
    rollout = engine.generate(batch, num_samples=1, seed=0, schedule=None, temperature=0.0)
    return [rollout.response(b).tolist() for b in range(len(prompts))]


def jax_parts(geometry, weights):
    graph, state = nnx.split(nnx.eval_shape(lambda: JaxDecoder(geometry)))
    nested = {tuple(name.split(".")): jnp.asarray(x) for name, x in weights.items()}
    nnx.replace_by_pure_dict(state, nnx.traversals.unflatten_mapping(nested))
    return graph, state


# By default XLA on a CPU adds up a product term after term (YNNPACK): three times as far from
# float64 as in blocks, which is how torch and XLA's other library (Eigen) do it.
IN_BLOCKS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def jax_program(**options):
    @functools.partial(jax.jit, static_argnums=0, compiler_options=options)
    def run(graph, state, tokens_BT):
        model = nnx.merge(graph, state)
        hidden = model.hidden(tokens_BT, dtype=jnp.float32)
        return hidden, hidden @ model.head(jnp.float32).T

    return run


def jax_forward(geometry, weights, tokens_BT, **options):
    found = jax_program(**options)(*jax_parts(geometry, weights), tokens_BT)
    return [np.asarray(x) for x in found]


def jax_read(path):
    geometry, state = jax_hf.load(path)
    return geometry, {name: np.asarray(x) for name, x in jax_hf.flat_weights(state).items()}


def jax_engine(geometry, weights, config, stop):
    graph, state = jax_parts(geometry, weights)
    engine = JaxEngine(graph, geometry, config, stop, jnp.float32)
    engine.load_weights(state, 0)
    return engine


@torch.no_grad()
def torch_forward(geometry, weights, tokens_BT):
    model = TorchDecoder(geometry)
    model.load(weights)
    hidden = model.hidden(torch.tensor(tokens_BT).long())
    return hidden.numpy(), model.logits(hidden).numpy()


def torch_read(path):
    geometry, weights = hf.load(path)
    return geometry, dict(weights)


def torch_engine(geometry, weights, config, stop):
    engine = TorchEngine(geometry, config, stop, torch.float32, ops=REFERENCE, device="cpu")
    engine.load_weights(weights, 0)
    return engine


OURS = {
    "jax": (jax_read, jax_forward, jax_engine),
    "torch": (torch_read, torch_forward, torch_engine),
}
