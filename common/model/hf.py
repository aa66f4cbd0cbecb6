"""Reads and writes the weights of Hugging Face model directories; config.json: hf_config.py.

Hugging Face stores a linear layer as [out, in], one tensor per layer. Ours is [in, out], with the
heads as an axis of their own and all layers stacked:

    model.layers.0.self_attn.q_proj.weight [N H, D]  --transpose, reshape-->  q_LDNH[0] [D, N, H]
    model.layers.1.self_attn.q_proj.weight [N H, D]  --transpose, reshape-->  q_LDNH[1] [D, N, H]

Both sides pair RoPE dimension i with i + H / 2, so no other permutation is needed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from common.errors import UserError, one_line
from common.model import hf_config
from common.model.geometry import Geometry, param_shapes
from common.records.run_dir import atomic_write_text

_TENSORS = {
    "embed_VD": "model.embed_tokens.weight",
    "head_VD": "lm_head.weight",
    "final_norm_D": "model.norm.weight",
    "attn_norm_LD": "input_layernorm",
    "mlp_norm_LD": "post_attention_layernorm",
    "q_LDNH": "self_attn.q_proj",
    "k_LDKH": "self_attn.k_proj",
    "v_LDKH": "self_attn.v_proj",
    "o_LNHD": "self_attn.o_proj",
    "gate_LDF": "mlp.gate_proj",
    "up_LDF": "mlp.up_proj",
    "down_LFD": "mlp.down_proj",
    "q_norm_LH": "self_attn.q_norm",
    "k_norm_LH": "self_attn.k_norm",
}
_READ_DTYPES = ("F32", "F16", "BF16")
_BLOCK = 2**20
"""Number of values that are checked at a time, to need little memory."""
_WRITE_DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
Weights = Iterator[tuple[str, np.ndarray]]
_CARRIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def load(path: str | Path, dtype: Any = np.float32) -> tuple[Geometry, Weights]:
    """Geometry, and an iterator over (name, weight in `dtype`) that reads each file when needed.

    Names are ours ("layers.q_LDNH"). Reads float32, float16 and bfloat16 tensors from
    model.safetensors, or from the shards that model.safetensors.index.json lists. One stacked
    parameter and one tensor are in host memory at a time.
    Raises: UserError before any weight is read if a tensor is missing, is not part of the model, or
    has another shape or type, and if a file is damaged; while reading, if a value is not finite.
    """
    path = Path(path)
    geometry = hf_config.read_geometry(path)
    tensors = _open_tensors(path)
    slots = list(_slots(geometry))
    _check_tensors(path, tensors, slots, geometry)
    groups = itertools.groupby(slots, key=lambda slot: slot.param)
    return geometry, (
        (name, _read_param(path, tensors, list(group), dtype)) for name, group in groups
    )


def stack(tensors: Mapping[str, np.ndarray], geometry: Geometry) -> Weights:
    """Weights by our names (see `load`) from arrays by Hugging Face's names."""
    groups = itertools.groupby(_slots(geometry), key=lambda slot: slot.param)
    return (
        (name, _stacked(list(group), tensors.__getitem__, np.float32)) for name, group in groups
    )


def save(
    path: str | Path,
    geometry: Geometry,
    params: Mapping[str, Any],
    dtype: str = "float32",
    extra: Mapping[str, Any] | None = None,
    *,
    source: str = "",
) -> None:
    """Write config.json and model.safetensors, which transformers and vLLM open as they are.

    params: arrays by name ("layers.q_LDNH"). extra: more entries of config.json (eos_token_id).
    source: the directory that the model was loaded from; its special tokens, context length and
    tokenizer files are copied. Each file is replaced as a whole, and config.json comes last, so a
    directory with a config.json holds the weights that belong to it.
    Raises: ValueError for an unknown dtype or a parameter of another shape than the geometry's.
    """
    if dtype not in _WRITE_DTYPES:
        raise ValueError(f"{dtype=}: expected one of {tuple(_WRITE_DTYPES)}")
    slots = list(_slots(geometry))
    _check_params(params, slots)
    entries = hf_config.entries(geometry, dtype, extra, source)
    config = json.dumps(entries, indent=2, ensure_ascii=True) + "\n"
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _carry_files(source, path)
        old = path / "config.json"
        if old.is_file() and old.read_bytes() != config.encode():
            old.unlink()
        _write_tensors(path / "model.safetensors", params, slots, dtype)
        atomic_write_text(path / "config.json", config)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another") from error


class _Slot(NamedTuple):
    """One tensor of the directory, and the parameter and layer of ours that it fills."""

    param: str
    layer: int | None
    tensor: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]


def _slots(geometry: Geometry) -> Iterator[_Slot]:
    """Every tensor of a model; those of one parameter follow each other."""
    for name, shape in param_shapes(geometry).items():
        own = name.removeprefix("layers.")
        if own == name:
            yield _Slot(name, None, _TENSORS[own], shape, shape)
            continue
        for layer in range(geometry.num_layers):
            tensor = f"model.layers.{layer}.{_TENSORS[own]}.weight"
            yield _Slot(name, layer, tensor, shape[1:], _hf_shape(own, shape[1:]))


def _hf_shape(param: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a layer's tensor in the file: [out, in]; a vector keeps its shape.

    Only the output projection o [N, H, D] has two input axes.
    """
    if len(shape) == 1:
        return shape
    split = 2 if param == "o_LNHD" else 1
    return (math.prod(shape[split:]), math.prod(shape[:split]))


def _read_param(
    path: Path, tensors: Mapping[str, Any], slots: list[_Slot], dtype: Any
) -> np.ndarray:
    return _stacked(slots, lambda name: _read_tensor(path, tensors[name], name, dtype), dtype)


def _read_tensor(path: Path, file: Any, name: str, dtype: Any) -> np.ndarray:
    """One tensor in `dtype`.

    Raises: UserError if it holds a NaN or an infinity, or if a value overflows `dtype`.
    """
    try:
        x = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: tensor {name} cannot be read ({error}); copy it again") from error
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(dtype, copy=False)
        flat = x.reshape(-1)
        blocks = range(0, len(flat), _BLOCK)
        # A NaN or an infinity makes the sum not finite, and summing is several times faster than
        # testing every value; only suspect blocks are tested.
        suspect = [b for b in blocks if not np.isfinite(flat[b : b + _BLOCK].sum(dtype=np.float32))]
    for begin in suspect:
        finite = np.isfinite(flat[begin : begin + _BLOCK])
        if not finite.all():
            at = np.unravel_index(begin + int(np.argmin(finite)), x.shape)
            raise UserError(
                f"{path}: tensor {name} holds {x[at]} at {[int(i) for i in at]}: values that are "
                "not finite; the weights are damaged, copy them again or take an earlier checkpoint"
            )
    return x


def _stacked(slots: list[_Slot], read: Callable[[str], np.ndarray], dtype: Any) -> np.ndarray:
    """One parameter: its only tensor, or the tensors of all layers, transposed and stacked."""
    first = slots[0]
    if first.layer is None:
        return read(first.tensor).astype(dtype)
    stack = np.empty((len(slots), *first.shape), dtype)
    for slot in slots:
        stack[slot.layer] = read(slot.tensor).T.reshape(slot.shape)
    return stack


def _write_tensors(path: Path, params: Mapping[str, Any], slots: list[_Slot], dtype: str) -> None:
    """Write a safetensors file tensor by tensor: length of the header, JSON header, data."""
    label, numpy_dtype = _WRITE_DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        begin, end = end, end + math.prod(slot.shape) * np.dtype(numpy_dtype).itemsize
        header[slot.tensor] = {"dtype": label, "shape": slot.hf_shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, group in itertools.groupby(slots, key=lambda slot: slot.param):
            value = np.asarray(params[name])
            for slot in group:
                x = value if slot.layer is None else value[slot.layer]
                if slot.layer is not None:
                    x = x.reshape(slot.hf_shape[::-1]).T
                file.write(np.ascontiguousarray(x, numpy_dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _open_tensors(path: Path) -> dict[str, Any]:
    """For each tensor name, the opened (memory-mapped) file that holds it."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        opened = _open_file(single)
        return dict.fromkeys(opened.keys(), opened)
    if not index.is_file():
        raise UserError(
            f"{path}: holds neither {single.name} nor {index.name}; "
            "expected a model saved by save_pretrained"
        )
    weight_map = _weight_map(index)
    tensors: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        opened = _open_file(path / file)
        for name in opened.keys():
            if weight_map.get(name, file) != file or name in tensors:
                raise UserError(
                    f"{path / file}: holds tensor {_named(name)}, which {index.name} says is in "
                    f"{weight_map.get(name)}; expected each tensor once, copy the model again"
                )
            tensors[name] = opened
    for name, file in weight_map.items():
        if name not in tensors:
            raise UserError(
                f"{path / file}: tensor {_named(name)} is missing, which {index.name} "
                "says is there; copy the model again"
            )
    return tensors


def _named(tensor: str) -> str:
    """A tensor name that was read from a file, in ASCII and cut to a bounded length."""
    return ascii(tensor)[1:-1][:200]


def _weight_map(index: Path) -> dict[str, str]:
    """For each tensor name, the name of its file, which lies beside the index."""
    weight_map = hf_config.read_object(index).get("weight_map")
    ok = isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())
    if not ok or not weight_map:
        raise UserError(f"{index}: has no weight_map; expected tensor names and their files")
    for name, file in weight_map.items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}", file):
            raise UserError(
                f"{index}: {file[:200]!a} as file of tensor {name[:200]!a}; "
                "expected the plain name of a file beside the index"
            )
    return weight_map


def _open_file(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file}: no such file; the index of the model lists it, copy it here")
    try:
        return safe_open(file, "np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged ({one_line(error)[:200]}); copy it again") from error


def _check_tensors(
    path: Path, tensors: Mapping[str, Any], slots: list[_Slot], geometry: Geometry
) -> None:
    for slot in slots:
        if slot.tensor not in tensors:
            raise UserError(
                f"{path}: tensor {slot.tensor} {list(slot.hf_shape)} is missing; "
                "config.json says that the model has it"
            )
        found = tensors[slot.tensor].get_slice(slot.tensor)
        if tuple(found.get_shape()) != slot.hf_shape:
            raise UserError(
                f"{path}: tensor {slot.tensor} expected shape {list(slot.hf_shape)} by "
                f"config.json, found {list(found.get_shape())}"
            )
        if found.get_dtype() not in _READ_DTYPES:
            raise UserError(
                f"{path}: tensor {slot.tensor} expected one of the types "
                f"{', '.join(_READ_DTYPES)}, found {found.get_dtype()}"
            )
    if geometry.tie_embeddings and _TENSORS["head_VD"] in tensors:
        _check_tied_head(path, tensors)
    unknown = sorted(set(tensors) - {slot.tensor for slot in slots})
    unknown = [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]
    if geometry.tie_embeddings:
        unknown = [name for name in unknown if name != _TENSORS["head_VD"]]
    if unknown:
        raise UserError(
            f"{path}: tensor {_named(unknown[0])} is not part of the model that "
            f"config.json describes ({geometry.num_layers} layers); check config.json"
        )


def _check_tied_head(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raise UserError unless the head in a tied model's file is a copy of the embedding.

    The two are compared in blocks, to need little memory.
    """
    embed, head = (_TENSORS[name] for name in ("embed_VD", "head_VD"))
    a, b = (tensors[name].get_slice(name) for name in (embed, head))
    rows, width = a.get_shape()
    same = b.get_shape() == [rows, width] and b.get_dtype() in _READ_DTYPES
    step = max(1, _BLOCK // width)
    for begin in range(0, rows if same else 0, step):
        block = slice(begin, min(rows, begin + step))
        same = same and np.array_equal(a[block], b[block], equal_nan=True)
    if not same:
        raise UserError(
            f"{path}: config.json says tie_word_embeddings=true, but {head} is not a copy of "
            f"{embed}; set tie_word_embeddings to false to use it, or delete the tensor"
        )


def _check_params(params: Mapping[str, Any], slots: list[_Slot]) -> None:
    layers = 1 + max(slot.layer or 0 for slot in slots)
    for slot in slots:
        expected = slot.shape if slot.layer is None else (layers, *slot.shape)
        found = np.shape(params[slot.param]) if slot.param in params else None
        if found != expected:
            raise ValueError(
                f"params[{slot.param!r}] expected shape {expected} by the geometry, got {found}"
            )


def _carry_files(source: str, path: Path) -> None:
    if not source or Path(source).resolve() == path.resolve():
        return
    for name in _CARRIED_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, path / name)
