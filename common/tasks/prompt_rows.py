"""Rows of .jsonl and .parquet files in verl's columns, read and checked one by one.

    {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}],
     "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {...}}

Further columns are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.tasks.chat import check_unicode, require

SUFFIXES = (".jsonl", ".parquet")
_COLUMNS = ("data_source", "prompt", "reward_model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A checked row. where: file and line, for errors; truth: reward_model.ground_truth."""

    where: str
    source: str
    messages: list[dict[str, str]]
    truth: Any


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order; UserError names the first bad one."""
    read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
    for where, row in read(path):
        try:
            yield _checked(where, row)
        except RecursionError:
            raise UserError(f"{where}: nested too deeply") from None


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # ValueError: 5,000 digits
                raise UserError(f"{where}: not a JSON object ({error})") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    require("pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        columns = [c for c in _COLUMNS if c in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable parquet file ({message})") from None


def _checked(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for column in _COLUMNS:
        if row.get(column) is None:
            raise UserError(f"{where}: column {column!r} is missing")
    source, messages, model = (row[column] for column in _COLUMNS)
    if not isinstance(source, str):
        raise UserError(f"{where}: data_source={str(source)[:80]!r}, expected a string")
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise UserError(f"{where}: column 'reward_model.ground_truth' is missing")
    if not isinstance(messages, list):
        kind = type(messages).__name__
        raise UserError(f"{where}: prompt is a {kind}, expected a list of chat messages")
    for message in messages:
        parts = [message.get(k) for k in ("role", "content")] if isinstance(message, dict) else [0]
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"{where}: prompt: each message needs 'role' and 'content' as text")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: empty prompt")
    try:
        check_unicode(json.dumps([source, messages, model], ensure_ascii=False, default=str))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return Row(where=where, source=source, messages=messages, truth=model["ground_truth"])
