"""Checksums of the files that a run depends on: it is a function of their content, not their names.

Weights are summed with CRC-32, as checkpoints are (a model may have hundreds of GB, and the enemy
is a mistake), all other files with SHA-256.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.records import stopping

WEIGHTS = ".safetensors"
_MODEL_FILES = (f"*{WEIGHTS}", "*.safetensors.index.json", "config.json")
_CHUNK = 2**24


def crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            stopping.check()
            crc = zlib.crc32(chunk, crc)
    return crc


def file_sum(path: Path) -> str:
    """'crc32:...' of weights, 'sha256:...' of other files."""
    if path.suffix == WEIGHTS:
        return f"crc32:{crc32(path):08x}"
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def sums(model_path: str, task_files: Iterable[Path]) -> dict[str, str]:
    """The sum of every file of the start model (none if model_path is "") and of the task."""
    files = {str(p): p for p in task_files}
    if model_path:
        for pattern in _MODEL_FILES:
            files |= {str(p): p for p in Path(model_path).glob(pattern)}
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(file_sum, files.values()))
    return dict(sorted(zip(files, found, strict=True)))


def first_change(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file that is new, gone or other than before, with the word for it; None if none."""
    for name in sorted({*before, *now}):
        if name not in before:
            return f"{name}: was not there"
        if name not in now:
            return f"{name}: is gone, which was there"
        if before[name] != now[name]:
            return f"{name}: is not what it was"
    return None
