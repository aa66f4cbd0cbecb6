"""Checksums of the files that a run depends on, to notice when their content has changed.

Weights get CRC-32, as checkpoints do: a model may have hundreds of GB, and the sum has to catch
mistakes, not attacks. All other files get SHA-256.
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
    """CRC-32 of the bytes of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            stopping.check()
            crc = zlib.crc32(chunk, crc)
    return crc


def file_sum(path: Path) -> str:
    """The checksum of a file: 'crc32:...' of weights, 'sha256:...' of other files."""
    if path.suffix == WEIGHTS:
        return f"crc32:{crc32(path):08x}"
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def sums(model_path: str, task_files: Iterable[Path]) -> dict[str, str]:
    """Checksums by path of the files of the task and of the start model, if there is one."""
    files = {str(p): p for p in task_files}
    if model_path:
        for pattern in _MODEL_FILES:
            files |= {str(p): p for p in Path(model_path).glob(pattern)}
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(file_sum, files.values()))
    return dict(sorted(zip(files, found, strict=True)))


def first_change(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file that is new, missing or changed, and how, in words; None if there is none."""
    for name in sorted({*before, *now}):
        if name not in before:
            return f"{name}: was not there"
        if name not in now:
            return f"{name}: is gone, which was there"
        if before[name] != now[name]:
            return f"{name}: is not what it was"
    return None
