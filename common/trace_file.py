"""The file of a trace: arrays by name in a compressed .npz, written one by one, and its meta data.

meta                     JSON: format, backend, versions, device, dtype, settings, checksums
tokens/*                 what was forced: tokens [B, T], prompt_len, total_len, logp of the actor
stream/NAME/*            what was sampled: NAME = greedy, dense, sparse; tokens and logp [B, T]
forward/*  score/*  replay/*  decode/*  grpo/*  grad/*  step/*        see common/trace.py
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common.errors import UserError

FORMAT = "sparrow-trace-1"
_BROKEN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
IDENTITY = {"model_checksum": "weights", "prompts_checksum": "prompts", "settings": "settings"}
"""Meta data that two traces must share to be comparable, and what each is."""
_META = ("backend", "dtype", "device", *IDENTITY)


def differ(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> str:
    """What to do about two meta data that differ in a key of IDENTITY."""
    if key != "settings":
        return f"record both on the same {'model' if key.startswith('model') else 'prompts'}"
    x, y = a[key], b[key]
    names = sorted(name for name in {*x, *y} if x.get(name) != y.get(name))
    return f"record both with the same {', '.join(names)}"


class TraceWriter:
    """`with TraceWriter(out) as trace`: the file appears whole at the end, or not at all."""

    def __init__(self, out: Path):
        self._out, self._temporary = out, out.with_name(f".{out.name}.tmp")

    def __enter__(self) -> TraceWriter:
        self._zip = zipfile.ZipFile(self._temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6)
        return self

    def put(self, name: str, array: Any) -> None:
        """Add one array."""
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)

    def put_all(self, stage: str, arrays: Mapping[str, Any]) -> None:
        """Add arrays under stage/name."""
        for name, array in arrays.items():
            self.put(f"{stage}/{name}", array)

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Add the meta data: what a trace without it holds is not complete."""
        text = json.dumps({"format": FORMAT, **meta}, allow_nan=False)
        self.put("meta", np.frombuffer(text.encode(), np.uint8))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._zip.close()
        if error is None:
            os.replace(self._temporary, self._out)
        else:
            self._temporary.unlink(missing_ok=True)


class Trace(Mapping[str, np.ndarray]):
    """A trace as it lies on disk: arrays by name, read when they are asked for; `meta`."""

    def __init__(self, path: str | Path):
        """UserError, one line, for what is no complete trace."""
        self.path = Path(path)
        try:
            with np.load(self.path, allow_pickle=False) as file:
                self._names = tuple(file.files)
                self.meta = json.loads(bytes(file["meta"]))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `sparrow trace` writes one") from None
        except _BROKEN as error:
            raise UserError(f"{path}: is no trace, or damaged; record or copy it anew") from error
        known = isinstance(self.meta, dict) and self.meta.get("format") == FORMAT
        missing = [key for key in _META if known and key not in self.meta]
        if not known or missing:
            what = f"has no {missing[0]}" if missing else f"expected format {FORMAT}"
            raise UserError(f"{path}: {what}; record it anew with this version of sparrow")

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                array = file[name]
        except KeyError:
            raise UserError(f"{self.path}: has no {name}; record it anew") from None
        except _BROKEN as error:
            raise UserError(f"{self.path}: {name} is damaged; copy it anew") from error
        if array.dtype.kind not in "iuf" and name != "step/checksum":
            raise UserError(f"{self.path}: {name} holds no numbers; record it anew")
        return array

    @property
    def bin_tokens(self) -> int:
        """mismatch.bin_tokens of its configuration."""
        try:
            found = self.meta["config"]["mismatch"]["bin_tokens"]
            if type(found) is int and found > 0:
                return found
        except (KeyError, TypeError):
            pass
        raise UserError(f"{self.path}: has no mismatch.bin_tokens; record it anew")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def stage(self, prefix: str) -> dict[str, np.ndarray]:
        """All arrays under prefix/, by the rest of their names."""
        names = [name for name in self if name.startswith(prefix + "/")]
        return {name[len(prefix) + 1 :]: self[name] for name in names}


def checksum(arrays: Any) -> str:
    """sha256 of (name, array) pairs: names, shapes and float32 or integer contents."""
    digest = hashlib.sha256()
    for name, array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.data)
    return digest.hexdigest()
