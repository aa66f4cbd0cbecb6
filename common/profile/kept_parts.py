"""Finished parts of long work, kept beside its output until it is written, to resume the work."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common.errors import UserError
from common.records.json_checks import BROKEN
from common.records.run_dir import atomic_write_text


class KeptParts:
    """`with KeptParts(out, key) as parts`: arrays by name in OUT.parts/, gone after success.

    key: JSON-serialisable, all that the parts depend on. Parts of another key are deleted, and a
    message says so. A part is complete or absent. UserError if something else has the
    folder's name.
    """

    def __init__(self, out: Path, key: Any):
        self._folder = out.with_name(out.name + ".parts")
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> KeptParts:
        mark = self._folder / "key"
        if not mark.is_file() and any(self._others()):
            raise UserError(f"{self._folder}: is in the way; move it, or name another --out")
        if mark.is_file() and mark.read_bytes() != self._key.encode():
            print(f"{self._folder}: holds parts of other work (settings or input differ); dropped")
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(mark, self._key)
        return self

    def _others(self) -> list[Path]:
        """What is there and was not left by a start that was killed before it wrote its key."""
        if not self._folder.is_dir():
            return [self._folder] if self._folder.exists() else []
        return [p for p in self._folder.iterdir() if p.suffix != ".tmp"]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            shutil.rmtree(self._folder)

    def get(self, name: str) -> Mapping[str, np.ndarray] | None:
        """The arrays that were put under that name; None if there are none, or a damaged file."""
        try:
            with open(self._folder / f"{name}.npz", "rb") as file:
                return dict(np.load(file, allow_pickle=False))
        except BROKEN:
            return None

    def put(self, name: str, **arrays: Any) -> None:
        """Keep arrays under a name."""
        temporary = self._folder / f".{name}.tmp"
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, self._folder / f"{name}.npz")


def weights_stamp(path: str) -> Any:
    """Size and modification time of the files of a model directory, which identify its state."""
    names = ("*.safetensors", "config.json")
    files = sorted(f for name in names for f in Path(path).glob(name)) if path else []
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
