"""config.json of a Hugging Face model directory: a decoder's geometry, in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import ModelConfig
from common.errors import UserError

_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_PLAIN |= {"quantization_config": None, "partial_rotary_factor": 1}
_CARRIED_KEYS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def read_geometry(path: str | Path) -> ModelConfig:
    """Geometry from config.json: Qwen3ForCausalLM (QK norm) or LlamaForCausalLM (none).

    What Llama's config may leave out gets Llama's defaults: num_key_value_heads = heads,
    head_dim = hidden_size / heads, rope_theta = 10000. UserError for a missing or ill-typed key and
    for what our decoder does not compute: scaled RoPE, biases, sliding windows, other activations,
    quantized weights, other architectures.
    """
    where = Path(path) / "config.json"
    if not where.is_file():
        raise UserError(f"{where}: no such file; expected a Hugging Face model directory")
    config = read_object(where)
    architecture = _architecture(config, where)
    if architecture == "LlamaForCausalLM":
        config = _with_llama_defaults(config)
    fields = {ours: _number(config, key, where, int) for ours, key in _SIZES.items()}
    _refuse_unsupported(config, architecture, where)
    fields["rope_theta"] = _number(_flat_rope(config), "rope_theta", where, float)
    fields["norm_eps"] = _number(config, "rms_norm_eps", where, float)
    fields["qk_norm"] = architecture == "Qwen3ForCausalLM"
    fields["tie_embeddings"] = tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(f"{where}: tie_word_embeddings={tied!r}, expected true or false")
    try:
        return ModelConfig(path=str(path), **fields)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def entries(geometry: ModelConfig, dtype: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json."""
    architecture = "Qwen3ForCausalLM" if geometry.qk_norm else "LlamaForCausalLM"
    config: dict[str, Any] = {"max_position_embeddings": 32768}
    config |= {"bos_token_id": None, "eos_token_id": None}
    source = Path(geometry.path) / "config.json"
    if geometry.path and source.is_file():
        carried = read_object(source)
        config |= {key: carried[key] for key in _CARRIED_KEYS if key in carried}
    config |= extra or {}
    config |= {key: getattr(geometry, ours) for ours, key in _SIZES.items()}
    config |= {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "rms_norm_eps": geometry.norm_eps,
        "rope_theta": geometry.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": geometry.tie_embeddings,
        "torch_dtype": dtype,
    }
    if geometry.qk_norm:
        return config | {"use_sliding_window": False, "sliding_window": None}
    return config | {"mlp_bias": False}


def _architecture(config: Mapping[str, Any], where: Path) -> str:
    found = config.get("architectures")
    if not found:
        found = [a for a, t in _MODEL_TYPES.items() if t == config.get("model_type")]
    if found not in ([a] for a in _MODEL_TYPES):
        raise UserError(
            f"{where}: architectures={found!r} is not supported; "
            f"expected one of {', '.join(_MODEL_TYPES)}"
        )
    return found[0]


def _with_llama_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's own defaults for what its older configs leave out or set to null."""
    config = {key: value for key, value in config.items() if value is not None}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    defaults = {"rope_theta": 10000.0, "num_key_value_heads": heads}
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        defaults["head_dim"] = hidden // heads
    return defaults | config


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, where: Path) -> None:
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise UserError(f"{where}: {key}={config[key]!r} is not supported; expected {plain!r}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        known = isinstance(rope, dict) and not any(isinstance(v, dict) for v in rope.values())
        kind = rope.get("rope_type", rope.get("type", "default")) if known else None
        if kind != "default" or rope.get("partial_rotary_factor", 1) not in (1, None):
            raise UserError(f"{where}: {key}={rope!r} is not supported; expected plain RoPE")
    if architecture == "Qwen3ForCausalLM" and _slides(config):
        raise UserError(
            f"{where}: some layers use a sliding window, which is not supported; "
            "expected use_sliding_window=false and full attention in all layers"
        )


def _slides(config: Mapping[str, Any]) -> bool:
    """True if a layer of a Qwen3 model reads only a window."""
    types = config.get("layer_types")
    if types:
        return any(kind != "full_attention" for kind in types)
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return False
    full = config.get("max_window_layers", 28)
    return not isinstance(full, int) or full < config["num_hidden_layers"]


def _flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the entries of rope_parameters, where transformers 5 keeps rope_theta."""
    return {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _number(config: Mapping[str, Any], key: str, where: Path, kind: type) -> Any:
    """A required positive number."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{where}: key {key} is missing; expected a number")
    allowed = (int, float) if kind is float else int
    ok = isinstance(value, allowed) and not isinstance(value, bool)
    if not ok or not 0 < value < math.inf:
        raise UserError(f"{where}: {key}={value!r}, expected a positive {kind.__name__}")
    return kind(value)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no JSON ({error}); copy it anew") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
