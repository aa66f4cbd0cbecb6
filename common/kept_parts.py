"""Finished parts of long work, kept beside its output until that is written: it can be resumed."""

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

from common.run_dir import atomic_write_text


class KeptParts:
    """`with KeptParts(out, key) as parts`: arrays by name in OUT.parts/, gone after success.

    key: JSON-serialisable, all that the parts depend on. Parts of another key are thrown away, with
    a word to the user. A part is there whole or not at all.
    """

    def __init__(self, out: Path, key: Any):
        self._folder = out.with_name(out.name + ".parts")
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> KeptParts:
        mark = self._folder / "key"
        if self._folder.exists() and not (mark.is_file() and mark.read_text() == self._key):
            print(f"{self._folder}: holds parts of other work (settings or input differ); dropped")
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(mark, self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            shutil.rmtree(self._folder)

    def get(self, name: str) -> Mapping[str, np.ndarray] | None:
        """The arrays that were put under that name; None if there are none, or a damaged file."""
        try:
            with np.load(self._folder / f"{name}.npz", allow_pickle=False) as arrays:
                return dict(arrays)
        except (OSError, ValueError, EOFError):
            return None

    def put(self, name: str, **arrays: Any) -> None:
        """Keep arrays under a name."""
        temporary = self._folder / f".{name}.tmp"
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, self._folder / f"{name}.npz")


def weights_stamp(path: str) -> Any:
    """What tells one state of a model directory from another: size and time of its weights."""
    files = sorted(Path(path).glob("*.safetensors")) if path else []
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
