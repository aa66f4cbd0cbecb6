"""Model directories of Hugging Face: layouts against hand-placed tensors, refusals, writes."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from common import oracles
from common.errors import UserError
from common.model.hf_config import read_geometry
from sparrow_jax import hf
from sparrow_jax.model import Decoder

V, L, D, F, N, K, H = 11, 2, 8, 10, 4, 2, 6
CONFIG = {
    "vocab_size": V,
    "num_hidden_layers": L,
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
SHAPES = {  # of one layer, [out, in] as torch.nn.Linear keeps them
    "input_layernorm": (D,),
    "post_attention_layernorm": (D,),
    "self_attn.q_proj": (N * H, D),
    "self_attn.k_proj": (K * H, D),
    "self_attn.v_proj": (K * H, D),
    "self_attn.o_proj": (D, N * H),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
    "self_attn.q_norm": (H,),
    "self_attn.k_norm": (H,),
}
FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def hf_model(family, tied):
    """config.json and tensors as transformers would save them, with random values."""
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(L):
        for name, shape in SHAPES.items():
            if family == "qwen3" or name not in ("self_attn.q_norm", "self_attn.k_norm"):
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
    rng = np.random.default_rng(0)
    tensors = {name: np.float32(rng.normal(size=s)) for name, s in shapes.items()}
    config = CONFIG | {"architectures": [FAMILIES[family]], "tie_word_embeddings": tied}
    return config, tensors


def write(path, config, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def write_shards(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: x for name, x in tensors.items() if weight_map[name] == file}
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def our_weights(tensors):
    """The oracle's stacked layout, placed head by head: heads lie one after the other in a row."""
    w = {"embed_VD": tensors["model.embed_tokens.weight"]}
    w["final_norm_D"] = tensors["model.norm.weight"]
    if "lm_head.weight" in tensors:
        w["head_VD"] = tensors["lm_head.weight"]

    def layers(name):
        return [tensors[f"model.layers.{i}.{name}.weight"] for i in range(L)]

    w["attn_norm_LD"] = np.array(layers("input_layernorm"))
    w["mlp_norm_LD"] = np.array(layers("post_attention_layernorm"))
    for ours, name in (("gate_LDF", "gate"), ("up_LDF", "up"), ("down_LFD", "down")):
        w[ours] = np.array([x.T for x in layers(f"mlp.{name}_proj")])
    for ours, name, heads in (("q_LDNH", "q", N), ("k_LDKH", "k", K), ("v_LDKH", "v", K)):
        w[ours] = np.zeros((L, D, heads, H), np.float32)
        for i, x in enumerate(layers(f"self_attn.{name}_proj")):
            for n in range(heads):
                w[ours][i, :, n, :] = x[n * H : (n + 1) * H].T
    w["o_LNHD"] = np.zeros((L, N, H, D), np.float32)
    for i, x in enumerate(layers("self_attn.o_proj")):
        for n in range(N):
            w["o_LNHD"][i, n] = x[:, n * H : (n + 1) * H].T
    if "model.layers.0.self_attn.q_norm.weight" in tensors:
        w |= {f"{a}_norm_LH": np.array(layers(f"self_attn.{a}_norm")) for a in "qk"}
    return w


def flat(params):
    pure = nnx.to_pure_dict(params)
    layers = pure.pop("layers")
    return {name: np.asarray(x) for name, x in {**pure, **layers}.items()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.fixture(params=[(f, t) for f in FAMILIES for t in (True, False)], ids=str)
def model(request):
    return hf_model(*request.param)


@pytest.mark.parametrize("writer", [write, write_shards])
def test_load_places_every_weight(tmp_path, model, writer):
    config, tensors = model
    geometry, params = hf.load(writer(tmp_path / "m", config, tensors))
    assert_equal(flat(params), our_weights(tensors))
    assert geometry.qk_norm == ("Qwen3" in config["architectures"][0])
    assert geometry.tie_embeddings == config["tie_word_embeddings"]
    assert (geometry.rope_theta, geometry.norm_eps) == (5000.0, 1e-5)


@pytest.mark.parametrize("family, tied", [("qwen3", False), ("llama", True)])
def test_loaded_decoder_agrees_with_the_float64_oracle(tmp_path, family, tied):
    config, tensors = hf_model(family, tied)
    geometry, params = hf.load(write(tmp_path / "m", config, tensors))
    graph, fresh = nnx.split(nnx.eval_shape(lambda: Decoder(geometry)))
    assert jax.tree.structure(fresh) == jax.tree.structure(params)
    tokens = np.random.default_rng(1).integers(0, V, 19)
    decoder = nnx.merge(graph, params)
    got = decoder.hidden(jnp.array(tokens[None]), dtype=jnp.float32) @ decoder.head(jnp.float32).T
    want = oracles.decoder_forward(our_weights(tensors), geometry, tokens)
    np.testing.assert_allclose(got[0], want, atol=2e-4, rtol=1e-4)
    assert np.abs(want).max() > 1


def test_import_export_import_is_bit_equal_and_gives_the_tensors_back(tmp_path, model):
    config, tensors = model
    geometry, params = hf.load(write(tmp_path / "a", config, tensors))
    hf.save(tmp_path / "b", geometry, params)
    assert_equal(load_file(tmp_path / "b" / "model.safetensors"), tensors)
    again, params_again = hf.load(tmp_path / "b")
    assert_equal(flat(params_again), flat(params))
    assert (again.qk_norm, again.tie_embeddings, again.head_dim) == (
        geometry.qk_norm, geometry.tie_embeddings, H,
    )  # fmt: skip
    hf.save(tmp_path / "c", again, nnx.to_pure_dict(params_again))  # a pure dict serves as well
    names = ("config.json", "model.safetensors")
    assert all(
        (tmp_path / "b" / n).read_bytes() == (tmp_path / "c" / n).read_bytes() for n in names
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly_and_written_back_in_bfloat16(tmp_path, dtype):
    config, tensors = hf_model("qwen3", False)
    half = {name: x.astype(dtype) for name, x in tensors.items()}
    geometry, params = hf.load(write(tmp_path / "a", config, half))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert_equal(flat(params), our_weights({n: x.astype(np.float32) for n, x in half.items()}))
    hf.save(tmp_path / "b", geometry, params, dtype="bfloat16")
    assert_equal(
        load_bf16(tmp_path / "b"), {n: x.astype(ml_dtypes.bfloat16) for n, x in half.items()}
    )
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _, narrow = hf.load(tmp_path / "b", jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("bfloat16")}


def load_bf16(path):
    with safe_open(path / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_geometry_defaults(tmp_path):
    config, _ = hf_model("llama", False)
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings"):
        del config[key]
    config |= {"hidden_size": 24, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    g = read_geometry(tmp_path)
    # head_dim = 24 / 4 heads; Llama's rope_theta
    assert (g.head_dim, g.num_kv_heads, g.rope_theta, g.tie_embeddings) == (6, N, 1e4, False)
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_geometry(tmp_path).rope_theta == 7e5


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": L, "sliding_window": 4096},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * L},
        {"rope_scaling": {"type": "default"}},
        {"architectures": None, "model_type": "qwen3"},
    ],
)
def test_harmless_entries_are_accepted(tmp_path, change):
    config, tensors = hf_model("qwen3", True)
    assert hf.load(write(tmp_path / "m", config | change, tensors))[0].qk_norm


@pytest.mark.parametrize(
    "change, words",
    [
        ({"architectures": ["GemmaForCausalLM"]}, "Gemma.*Qwen3ForCausalLM, LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling=.*linear"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_parameters=.*llama3",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}},
            "rope_parameters=",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        (
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64},
            "sliding window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"head_dim": None}, "transformers cannot read it.*head_dim"),
        ({"rms_norm_eps": None}, "transformers cannot read it.*rms_norm_eps"),
        ({"rope_theta": None}, "rope_theta=None, expected a number over 1"),
        ({"hidden_size": "6"}, "hidden_size='6', expected a positive int"),
        ({"hidden_size": 6.0}, "hidden_size=6.0, expected a positive int"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"num_key_value_heads": 3}, "num_heads=4: expected a multiple of num_kv_heads=3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ],
)
def test_config_is_refused_in_one_line(tmp_path, change, words):
    config, _ = hf_model("qwen3", True)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=f"config.json: .*{words}") as error:
        hf.load(tmp_path)
    assert "\n" not in str(error.value)


def test_unreadable_config_is_refused(tmp_path):
    cases = {None: "no such file", "{": "not a JSON file", "[1]": "expected a JSON object"}
    for text, words in cases.items():
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=f"config.json: {words}"):
            hf.load(tmp_path)


Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "tensor, value, words",
    [
        (Q1, None, rf"{Q1} \[24, 8\] is missing"),
        ("lm_head.weight", None, r"lm_head.weight \[11, 8\] is missing"),
        (Q1, (D, N * H), rf"{Q1} expected shape \[24, 8\] by config.json, found \[8, 24\]"),
        ("model.embed_tokens.weight", (V + 1, D), r"expected shape \[11, 8\].*found \[12, 8\]"),
        ("model.layers.2.mlp.up_proj.weight", (F, D), r"layers.2.mlp.up_proj.weight is not part"),
        ("model.layers.0.self_attn.q_proj.bias", (N * H,), "q_proj.bias is not part"),
    ],
)
@pytest.mark.parametrize("writer", [write, write_shards])
def test_wrong_tensors_are_named(tmp_path, tensor, value, words, writer):
    config, tensors = hf_model("qwen3", False)
    tensors.pop(tensor, None)
    if value:
        tensors[tensor] = np.zeros(value, np.float32)
    with pytest.raises(UserError, match=f"tensor {words}|tensor .*{words}"):
        hf.load(writer(tmp_path / "m", config, tensors))


def test_unexpected_type_is_named_and_a_copied_head_is_not_minded(tmp_path):
    config, tensors = hf_model("qwen3", True)
    spare = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    hf.load(write(tmp_path / "m", config, tensors | spare))
    write(tmp_path / "m", config, tensors | {Q1: tensors[Q1].astype(np.int8)})
    with pytest.raises(UserError, match=f"tensor {Q1} expected one of the types F32.*found I8"):
        hf.load(tmp_path / "m")


def test_damaged_or_missing_files_are_named(tmp_path):
    config, tensors = hf_model("qwen3", True)
    file = write(tmp_path / "m", config, tensors) / "model.safetensors"
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    longer = (header + 8).to_bytes(8, "little") + data[8:]
    no_json = data[:8] + b"?" + data[9:]
    for broken in (b"", data[:5], data[:100], data[:-1], data + b"x", longer, no_json):
        file.write_bytes(broken)
        with pytest.raises(UserError, match="model.safetensors: damaged"):
            hf.load(tmp_path / "m")
    file.unlink()
    with pytest.raises(UserError, match="holds neither model.safetensors nor"):
        hf.load(tmp_path / "m")
    shards = write_shards(tmp_path / "s", config, tensors)
    (shards / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match="model-1.safetensors: no such file"):
        hf.load(shards)
    for index in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        (shards / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match="has no weight_map"):
            hf.load(shards)


def test_saving_again_is_all_or_nothing(tmp_path, monkeypatch):
    config, tensors = hf_model("qwen3", True)
    geometry, params = hf.load(write(tmp_path / "a", config, tensors))
    hf.save(tmp_path / "b", geometry, params)
    other = jax.tree.map(lambda x: x + 1, params)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hf.save(tmp_path / "b", geometry, other)
    assert_equal(flat(hf.load(tmp_path / "b")[1]), flat(params))
    hf.save(tmp_path / "b", geometry, other)
    assert_equal(flat(hf.load(tmp_path / "b")[1]), flat(other))
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_new_weights_never_meet_the_config_of_others(tmp_path, monkeypatch):
    config, tensors = hf_model("qwen3", True)
    geometry, params = hf.load(write(tmp_path / "a", config, tensors))
    faster, _ = hf.load(write(tmp_path / "a", config | {"rope_theta": 10.0}, tensors))
    hf.save(tmp_path / "b", geometry, params)
    monkeypatch.setattr("common.model.hf.atomic_write_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hf.save(tmp_path / "b", faster, params)
    with pytest.raises(UserError, match="config.json: no such file"):
        hf.load(tmp_path / "b")


def interrupt(*_):
    raise KeyboardInterrupt


def test_special_tokens_and_tokenizer_go_along(tmp_path):
    config, tensors = hf_model("llama", True)
    config |= {"eos_token_id": [3, 4], "max_position_embeddings": 77}
    geometry, params = hf.load(write(tmp_path / "a", config, tensors))
    (tmp_path / "a" / "tokenizer.json").write_text("words")
    hf.save(tmp_path / "b", geometry, params, extra={"bos_token_id": 9}, source=str(tmp_path / "a"))
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    keys = ("eos_token_id", "bos_token_id", "max_position_embeddings")
    assert [saved[key] for key in keys] == [[3, 4], 9, 77]
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "words"


def test_save_refuses_what_does_not_fit(tmp_path):
    config, tensors = hf_model("llama", False)
    geometry, params = hf.load(write(tmp_path / "a", config, tensors))
    with pytest.raises(ValueError, match="dtype='int8': expected one of"):
        hf.save(tmp_path / "b", geometry, params, dtype="int8")
    pure = nnx.to_pure_dict(params)
    pure["layers"]["o_LNHD"] = pure["layers"]["o_LNHD"][:1]
    with pytest.raises(ValueError, match=r"'layers.o_LNHD'.*\(2, 4, 6, 8\).*got \(1, 4, 6, 8\)"):
        hf.save(tmp_path / "b", geometry, pure)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        hf.save(tmp_path / "file", geometry, params)
    assert not (tmp_path / "b").exists()
