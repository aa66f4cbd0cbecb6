"""Reads and writes config.json of a Hugging Face model directory, as a decoder's geometry.

transformers reads the file, because it knows each family's defaults and every spelling of RoPE.
The form that `entries` writes leaves nothing to a default, so our own directories are read without
transformers, and without the seconds that its import takes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import ModelConfig
from common.errors import UserError, one_line
from common.model.geometry import Geometry
from common.records import json_checks

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
_REQUIRED = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size",
             "num_attention_heads")  # fmt: skip
_LIMITS = {
    "vocab_size": 2**24,
    "num_hidden_layers": 2**10,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
}
"""Far above the sizes of every known model; a larger number means that the file is damaged."""
_PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_PLAIN |= {"quantization_config": None, "partial_rotary_factor": 1}
_SLIDING = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_READ = {*_LIMITS, *_PLAIN, *_SLIDING, *_ROPE, "rms_norm_eps", "tie_word_embeddings"}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_geometry(path: str | Path) -> Geometry:
    """Geometry from config.json: Qwen3ForCausalLM (QK norm) or LlamaForCausalLM (no QK norm).

    A key that the file leaves out takes the default that transformers has for the family.
    Raises: UserError for a missing size, a value of another type or out of range, and for anything
    that our decoder does not compute: scaled RoPE, biases, sliding windows, other activations,
    quantized weights, other architectures.
    """
    where = Path(path) / "config.json"
    config, architecture = _read(where)
    fields: dict[str, Any] = {o: _size(config, key, where) for o, key in _SIZES.items()}
    fields["rope_theta"] = _number(config, "rope_theta", where, 1, 1e15)
    fields["norm_eps"] = _number(config, "rms_norm_eps", where, 0, 1)
    fields["qk_norm"] = architecture == "Qwen3ForCausalLM"
    fields["tie_embeddings"] = config["tie_word_embeddings"]
    try:
        return Geometry.from_config(ModelConfig(**fields))  # the ranges of our settings hold here
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def read_context(path: str | Path) -> int:
    """Context length of the model in tokens: max_position_embeddings."""
    where = Path(path) / "config.json"
    return _size(_read(where)[0], "max_position_embeddings", where)


def check_context(path: str, tokens: int, what: str) -> None:
    """Raise UserError if sequences of `tokens` tokens are longer than the model's context.

    An empty path means a model from scratch, which takes the context of its run. what: the settings
    that determine the length, for the message.
    """
    if path and tokens > (limit := read_context(path)):
        raise UserError(
            f"{what}: {tokens} tokens, but the context of {path} is {limit} "
            "(max_position_embeddings in config.json); lower them or take another model"
        )


def entries(
    geometry: Geometry, dtype: str, extra: Mapping[str, Any] | None, source: str = ""
) -> dict[str, Any]:
    """The entries of config.json; special tokens and context length come from `source`, if given.

    source: the directory that the model was loaded from. extra: more entries, which replace those
    of the source.
    """
    architecture = "Qwen3ForCausalLM" if geometry.qk_norm else "LlamaForCausalLM"
    config: dict[str, Any] = {"max_position_embeddings": 32768}
    file = Path(source) / "config.json"
    if source and file.is_file():
        config["max_position_embeddings"] = read_context(source)
        carried = read_object(file)
        config |= {key: carried[key] for key in _TOKEN_KEYS if key in carried}
    else:
        config |= {"bos_token_id": None, "eos_token_id": None}
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


def _read(where: Path) -> tuple[dict[str, Any], str]:
    """(content of config.json with defaults filled in and rope_theta at its top, architecture)."""
    config = read_object(where)
    architecture = _architecture(config, where)
    _check_values(config, where)
    if not _says_all(config):
        config = _by_transformers(config, _MODEL_TYPES[architecture], where)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UserError(
            f"{where}: some layers use a sliding window, which is not supported; "
            "expected use_sliding_window=false and full attention in all layers"
        )
    return config, architecture


def _check_values(config: Mapping[str, Any], where: Path) -> None:
    """Raise UserError for values that must not reach transformers.

    It would take minutes over some, end in a traceback for others, and accept the rest.
    """
    for key in _REQUIRED:
        if config.get(key) is None:
            raise UserError(f"{where}: key {key} is missing; expected a number")
    for key in _LIMITS:
        if config.get(key) is not None:
            _size(config, key, where)
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise UserError(
                f"{where}: {key}={_show(config[key])} is not supported; expected {plain!r}"
            )
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(f"{where}: tie_word_embeddings={_show(tied)}, expected true or false")
    for key in ("rope_scaling", "rope_parameters"):
        if not _plain_rope(config.get(key)):
            raise UserError(
                f"{where}: {key}={_show(config[key])} is not supported; expected plain RoPE"
            )


def _says_all(config: Mapping[str, Any]) -> bool:
    """True if the file has exactly the form that `entries` writes: nothing is left to a default."""
    qk_norm = config.get("model_type") == "qwen3"
    form = entries(Geometry.from_config(ModelConfig(qk_norm=qk_norm)), "float32", None)
    keys = form.keys() - set(_TOKEN_KEYS)
    return (
        config.keys() - set(_TOKEN_KEYS) == keys
        and all((config[key] is None) == (form[key] is None) for key in keys)
        and config.get("use_sliding_window", False) is False
    )


def _by_transformers(config: Mapping[str, Any], model_type: str, where: Path) -> dict[str, Any]:
    """The entries that we need, as transformers' configuration class of the family reads them."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise UserError(
            f"{where}: is read by transformers, which is not installed; "
            "run: pip install 'sparrow-rl[data]'"
        ) from None
    try:
        given = {key: _one_rope(config[key]) for key in _READ & config.keys()}
        read = vars(type(AutoConfig.for_model(model_type)).from_dict(given))
    except Exception as error:
        reason = one_line(error)[:200]
        raise UserError(f"{where}: transformers cannot read it ({reason})") from error
    theta = (read.get("rope_parameters") or {}).get("rope_theta")
    return {key: read[key] for key in _READ if key in read} | {"rope_theta": theta}


def _one_rope(value: Any) -> Any:
    """A copy of a RoPE entry; an entry per type of layer becomes one if all types have the same.

    Our families have one type of layer and do not read the nested form: transformers would take
    its default base instead.
    """
    value = copy.deepcopy(value)
    parts = list(value.values()) if isinstance(value, dict) else []
    nested = bool(parts) and all(isinstance(p, dict) and p == parts[0] for p in parts)
    return parts[0] if nested else value


def _plain_rope(value: Any) -> bool:
    """True if rope_scaling or rope_parameters ask for RoPE without scaling."""
    rope = _one_rope(value) or {}
    return (
        isinstance(rope, dict)
        and not any(isinstance(part, dict) for part in rope.values())
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope.get("partial_rotary_factor", 1) in (1, None)
    )


def _architecture(config: Mapping[str, Any], where: Path) -> str:
    """The architecture. Raises: UserError unless it is known and agrees with `model_type`."""
    found, model_type = config.get("architectures"), config.get("model_type")
    if not found:
        found = [a for a, t in _MODEL_TYPES.items() if t == model_type]
    if found not in ([a] for a in _MODEL_TYPES):
        raise UserError(
            f"{where}: architectures={_show(found)} is not supported; "
            f"expected one of {', '.join(_MODEL_TYPES)}"
        )
    if model_type not in (None, _MODEL_TYPES[found[0]]):
        raise UserError(
            f"{where}: model_type={_show(model_type)} does not go with architectures={found}; "
            f"expected {_MODEL_TYPES[found[0]]!r}"
        )
    return found[0]


def _size(config: Mapping[str, Any], key: str, where: Path) -> int:
    value, high = config.get(key), _LIMITS[key]
    if type(value) is not int or not 1 <= value <= high:
        raise UserError(f"{where}: {key}={_show(value)}, expected a positive int, at most {high}")
    return value


def _number(config: Mapping[str, Any], key: str, where: Path, low: float, high: float) -> float:
    value = config.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low < value <= high:
        raise UserError(
            f"{where}: {key}={_show(value)}, expected a number over {low:g}, at most {high:g}"
        )
    return float(value)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: UserError if the file holds no JSON object."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a Hugging Face model directory")
    return json_checks.read_object(path)
