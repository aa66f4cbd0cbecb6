"""Damaged model folders: each is refused in one line at once, or read as it should be."""

import dataclasses
import json
import random
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.config import Config, ModelConfig
from common.errors import UserError
from common.model import hf, hf_config
from common.model.geometry import Geometry, param_shapes
from common.setup import check_context

GEOMETRY = Geometry(
    vocab_size=8, num_layers=2, hidden_size=8, intermediate_size=4, num_heads=2, num_kv_heads=1,
    head_dim=4,
)  # fmt: skip
HOSTILE = [
    10**9, 10**4000, -1, 0, 1.5, True, None, "2", "", [], [2], {}, {"a": 1}, float("nan"),
    float("inf"), 1e308, "\ud800",
]  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"


def make(path, **changes):
    """A model of ours, its weights 1, 2, 3... in order."""
    shapes = param_shapes(GEOMETRY)
    params = {name: np.arange(1, 1 + np.prod(s)).reshape(s) for name, s in shapes.items()}
    hf.save(path, GEOMETRY, params)
    edit(path, **changes)
    return path


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def retensor(path, **changes):
    """Replace tensors of model.safetensors; None removes one."""
    file = path / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, file)


def shard(path):
    """Two files and an index, as large models come."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({n: x for n, x in tensors.items() if weight_map[n] == file}, path / file)
    write_index(path, weight_map)
    return weight_map


def write_index(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read(path):
    geometry, weights = hf.load(path)
    return geometry, dict(weights)


def outcome(path):
    """None if the folder reads as the sound one does, else the refusal; at most two seconds."""
    begin = time.perf_counter()
    try:
        geometry, weights = read(path)
        assert {n: x.shape for n, x in weights.items()} == param_shapes(geometry)
        refusal = None
    except UserError as error:
        refusal = str(error)
        assert "\n" not in refusal and len(refusal) < 1000
    assert time.perf_counter() - begin < 2
    return refusal


def refuse(path, words):
    with pytest.raises(UserError, match=words) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_folder_of_ours_needs_no_transformers_and_says_the_same_by_it(tmp_path):
    for qk_norm in (True, False):
        geometry = dataclasses.replace(
            GEOMETRY, qk_norm=qk_norm, tie_embeddings=qk_norm, rope_theta=7e5
        )
        where = tmp_path / "config.json"
        where.write_text(json.dumps(hf_config.entries(geometry, "float32", None)))
        plain = hf_config.read_geometry(tmp_path)
        assert hf_config._says_all(json.loads(where.read_text()))
        edit(tmp_path, another_key=1)  # no longer the form that we write
        assert not hf_config._says_all(json.loads(where.read_text()))
        assert hf_config.read_geometry(tmp_path) == plain
        assert hf_config.read_context(tmp_path) == 32768


def test_without_transformers_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert read(make(tmp_path))[0].num_layers == 2
    edit(tmp_path, another_key=1)
    refuse(tmp_path, r"transformers, which is not installed; run: pip install 'sparrow-rl\[data\]'")


@pytest.mark.parametrize(
    "spelling, theta",
    [
        ({"rope_theta": 5e4}, 5e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_theta": 5e4, "rope_parameters": {"rope_theta": 3e4}}, 3e4),
        ({"rope_theta": 5e4, "rope_scaling": {"type": "default"}}, 5e4),
        ({"rope_theta": 5e4, "rope_scaling": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_theta": 5e4, "rope_parameters": {"full_attention": {"rope_theta": 3e4}}}, 3e4),
        ({}, 1e4),  # the default of transformers
    ],
)
def test_every_spelling_of_rope_is_read(tmp_path, spelling, theta):
    config = json.loads((make(tmp_path) / "config.json").read_text())
    del config["rope_theta"], config["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(config | spelling))
    assert read(tmp_path)[0].rope_theta == theta


def test_a_tied_model_may_bring_a_copy_of_its_embedding_and_no_other_head(tmp_path):
    make(tmp_path)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    retensor(tmp_path, **{"lm_head.weight": embed})
    assert "head_VD" not in read(tmp_path)[1]
    retensor(tmp_path, **{"lm_head.weight": embed + np.eye(8, dtype=np.float32)})
    refuse(tmp_path, "tie_word_embeddings=true, but lm_head.weight is not a copy")
    retensor(tmp_path, **{"lm_head.weight": embed[:7]})
    refuse(tmp_path, "tie_word_embeddings=true, but lm_head.weight is not a copy")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value):
    make(tmp_path)
    up = load_file(tmp_path / "model.safetensors")[UP]
    up[3, 5] = value
    retensor(tmp_path, **{UP: up})
    refuse(tmp_path, rf"tensor {UP} holds {value} at \[3, 5\]: values that are not finite")


def test_a_large_finite_weight_is_none_of_them(tmp_path):
    make(tmp_path)
    retensor(tmp_path, **{UP: np.full((4, 8), 3e38, np.float32)})  # their sum overflows
    assert read(tmp_path)[1]["layers.up_LDF"][1, 0, 0] == np.float32(3e38)


@pytest.mark.parametrize("file", ["../a.safetensors", "/tmp/a.safetensors", "a/b", "..", "", "a\0"])
def test_an_index_leads_nowhere_else(tmp_path, file):
    weight_map = shard(make(tmp_path))
    write_index(tmp_path, weight_map | {UP: file})
    refuse(tmp_path, "expected the plain name of a file beside the index")


def test_an_index_and_its_files_say_the_same(tmp_path):
    weight_map = shard(make(tmp_path))
    assert outcome(tmp_path) is None
    other = {"model-0.safetensors": "model-1.safetensors"}
    other |= {to: file for file, to in other.items()}
    write_index(tmp_path, weight_map | {UP: other[weight_map[UP]]})
    refuse(tmp_path, f"holds tensor {UP}, which model.safetensors.index.json says is in model-")
    write_index(tmp_path, weight_map | {"spare": "model-0.safetensors"})
    refuse(tmp_path, "model-0.safetensors: tensor spare is missing")
    write_index(tmp_path, weight_map | {"spare": "model-2.safetensors"})
    refuse(tmp_path, "model-2.safetensors: no such file")
    del weight_map[UP]  # the index forgot it: two files hold it
    (tmp_path / "model-2.safetensors").write_bytes((tmp_path / "model-1.safetensors").read_bytes())
    write_index(tmp_path, {name: "model-1.safetensors" for name in ()} | weight_map)
    assert outcome(tmp_path) is None  # it is read where it is; model-2 is no part of the model


def test_a_context_over_that_of_the_model_is_refused(tmp_path):
    config = Config(model=ModelConfig(path=str(make(tmp_path, max_position_embeddings=1023))))
    # 512 prompt tokens and 512 of the response are 1,024.
    with pytest.raises(UserError, match="1024 tokens, but the context of .* is 1023"):
        check_context(config)
    edit(tmp_path, max_position_embeddings=1024)
    check_context(config)
    check_context(Config())


def damage_config(path, rng):
    file = path / "config.json"
    config = json.loads(file.read_text())
    keys = [*config, "rope_parameters", "layer_types", "quantization_config", "max_window_layers"]
    for key in rng.sample(keys, rng.choice((1, 1, 2))):
        config[key] = rng.choice(HOSTILE)
    file.write_text(json.dumps(config))


def damage_index(path, rng):
    weight_map = shard(path)
    for name in rng.sample(sorted(weight_map), 2):
        weight_map[name] = rng.choice([*HOSTILE, "../x", "/etc/passwd", "model-1.safetensors", "."])
    write_index(path, weight_map)


def damage_bytes(path, rng):
    """One to three bytes changed, or the file cut: in the config, or the head of the weights."""
    file = path / rng.choice(("config.json", "model.safetensors", "model.safetensors"))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 3))):
        data[rng.randrange(min(len(data), 2500))] = rng.randrange(256)
    file.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)


def damage_header(path, rng):
    """A safetensors header with one hostile entry, its length right."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    entry[rng.choice(sorted(entry))] = rng.choice([*HOSTILE, "F64", "I8", [10**9, 2], [0, 2**63]])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("damage", [damage_config, damage_index, damage_bytes, damage_header])
def test_damaged_folders_are_refused_in_one_line_or_read(tmp_path, damage):
    import transformers  # noqa: F401, its import is no part of the two seconds

    hf_config._by_transformers({}, "qwen3", tmp_path)
    rng = random.Random(15)
    refused = 0
    for i in range(50):
        path = make(tmp_path / str(i))
        damage(path, rng)
        refused += outcome(path) is not None
    assert refused >= 20
