"""The file of a trace: a compressed .npz of arrays by name, written one by one, and meta data.

meta                     JSON: format, backend, versions, device, dtype, settings, checksums
tokens/*                 the given tokens [B, T], prompt_len, total_len, logp of the actor
stream/NAME/*            sampled tokens and logp [B, T], NAME = greedy, dense, sparse
forward/*  score/*  replay/*  decode/*  grpo/*  grad/*  step/*        see common/crosscheck/trace.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import zipfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common.errors import UserError
from common.records.json_checks import BROKEN

FORMAT = "sparrow-trace-1"
_MAX_META_BYTES = 1 << 24
_MAX_RATIO = 1100
"""Deflate compresses by 1032 at most; an entry that claims more has a false size."""
IDENTITY = {"model_checksum": "weights", "prompts_checksum": "prompts", "settings": "settings"}
"""Keys of the meta data that two traces must share to be comparable, with a word for each."""
_META = ("backend", "dtype", "device", *IDENTITY)


def differ(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> str:
    """Advice to the user when the meta data of two traces differ in a key of IDENTITY."""
    if key != "settings":
        return f"record both on the same {'model' if key.startswith('model') else 'prompts'}"
    x, y = a[key], b[key]
    names = sorted(name for name in {*x, *y} if x.get(name) != y.get(name))
    return f"record both with the same {', '.join(names)}"


class TraceWriter:
    """Writes a trace: after `with TraceWriter(out) as trace` the file is complete or absent."""

    def __init__(self, out: Path) -> None:
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
        """Add the meta data; a file without them is not a complete trace."""
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
    """A trace on disk: `meta`, and arrays by name that are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is not a complete trace."""
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as file:
                self._names = tuple(name.removesuffix(".npy") for name in file.namelist())
                self.meta = json.loads(_read_meta(file))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `sparrow trace` writes one") from None
        except BROKEN as error:
            raise UserError(f"{path}: is no trace, or damaged; record or copy it anew") from error
        known = isinstance(self.meta, dict) and self.meta.get("format") == FORMAT
        missing = [key for key in _META if known and key not in self.meta]
        wrong = [k for k in _META if known and not missing and not _fits(k, self.meta[k])]
        if wrong:
            raise UserError(f"{path}: is no trace, or damaged ({wrong[0]}); record or copy it anew")
        if not known or missing:
            what = f"has no {missing[0]}" if missing else f"expected format {FORMAT}"
            raise UserError(f"{path}: {what}; record it anew with this version of sparrow")

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            with self._open(name) as (file, shape, dtype, fortran):
                array = _read_array(file, shape, dtype, fortran)
        except BROKEN as error:
            raise self._refusal(name, error) from error
        if array.dtype.kind not in "iuf" and name != "step/checksum":
            raise UserError(f"{self.path}: {name} holds no numbers; record it anew")
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, without unpacking it: a small file may hold a huge one."""
        try:
            with self._open(name) as (_, shape, _, _):
                return shape
        except BROKEN as error:
            raise self._refusal(name, error) from error

    @contextlib.contextmanager
    def _open(self, name: str) -> Generator[tuple, None, None]:
        with zipfile.ZipFile(self.path) as archive, _open_array(archive, name) as found:
            yield found

    def _refusal(self, name: str, error: BaseException) -> UserError:
        if name not in self._names:
            return UserError(f"{self.path}: has no {name}; record it anew")
        what = f"{name}: {type(error).__name__}"
        return UserError(f"{self.path}: is no trace, or damaged ({what}); record or copy it anew")

    @property
    def bin_tokens(self) -> int:
        """mismatch.bin_tokens of the configuration of the trace."""
        try:
            found = self.meta["config"]["mismatch"]["bin_tokens"]
            if type(found) is int and found > 0:
                return found
        except (KeyError, TypeError):
            pass
        raise UserError(f"{self.path}: has no mismatch.bin_tokens; record it anew")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def stage(self, prefix: str) -> dict[str, np.ndarray]:
        """All arrays with names that begin with prefix/, by the rest of their names."""
        names = [name for name in self if name.startswith(prefix + "/")]
        return {name[len(prefix) + 1 :]: self[name] for name in names}


def _fits(key: str, value: Any) -> bool:
    return isinstance(value, dict if key == "settings" else str)


@contextlib.contextmanager
def _open_array(archive: zipfile.ZipFile, name: str) -> Generator[tuple, None, None]:
    """(file at the data, shape, dtype, Fortran order?); ValueError unless all sizes agree."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name}: compression method {info.compress_type}")
    if info.file_size > _MAX_RATIO * (info.compress_size + 1):
        raise ValueError(f"{name}: {info.compress_size} bytes cannot hold {info.file_size}")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"{name}: format {version}")
        whole = all(type(size) is int and size >= 0 for size in shape)
        data_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or not whole or file.tell() + data_bytes != info.file_size:
            raise ValueError(f"{name}: {shape} of {dtype} are not its {info.file_size} bytes")
        yield file, shape, dtype, fortran


def _read_meta(archive: zipfile.ZipFile) -> bytes:
    with _open_array(archive, "meta") as (file, shape, dtype, fortran):
        if math.prod(shape) * dtype.itemsize > _MAX_META_BYTES:
            raise ValueError(f"meta: {shape} of {dtype} are too many bytes")
        return _read_array(file, shape, dtype, fortran).tobytes()


def _read_array(file: Any, shape: tuple, dtype: np.dtype, fortran: bool) -> np.ndarray:
    """The array; reads to the end of the file, where zipfile compares the checksum."""
    array = np.empty(math.prod(shape), dtype)
    rest = array.view(np.uint8).data if array.nbytes else memoryview(b"")
    while rest:
        count = file.readinto(rest)
        if not count:
            raise EOFError("the file ends before its arrays")
        rest = rest[count:]
    if file.read(1):
        raise ValueError("more data than the shape has")
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def checksum(arrays: Any) -> str:
    """sha256 of (name, array) pairs: names, shapes and float32 or integer contents."""
    digest = hashlib.sha256()
    for name, array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.data)
    return digest.hexdigest()
