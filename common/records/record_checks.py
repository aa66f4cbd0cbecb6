"""Checks of a line of metrics.jsonl, so that damage does not become a wrong number in a report."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, TypeGuard

LARGEST = 2**53
"""Largest whole number that is accepted; a float cannot hold every larger one."""
MOST_BINS = 2**15
_TEXTS = ("alarms", "controller/moves")


def parse(line: bytes, numbers: Collection[str]) -> dict[str, Any]:
    """The record in a line; ValueError says what is wrong, for the caller to translate.

    numbers: names of the keys whose value has to be a number or null.
    """
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict) or not _is_count(record.get("step")):
        raise ValueError("expected an object with an integer 'step', 0 or more")
    for key, value in record.items():
        if not _fits(key, value, numbers):
            raise ValueError(f"{key[:40]!r} has a value that sparrow never writes")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LARGEST


def _fits(key: str, value: Any, numbers: Collection[str]) -> bool:
    if key in _TEXTS:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    if key == "bins":
        return isinstance(value, list) and all(_is_bin(entry) for entry in value)
    if key in numbers:
        return value is None or _is_number(value)
    if isinstance(value, list):
        return all(_fits("", entry, numbers) for entry in value)
    if isinstance(value, dict):
        return all(_fits("", entry, numbers) for entry in value.values())
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) <= LARGEST


def _is_bin(entry: Any) -> bool:
    """True for {"bin": 3, "start": 192, "end": 256, ...}, where start = bin x (end - start)."""
    if not isinstance(entry, dict):
        return False
    number, start, end = (entry.get(key) for key in ("bin", "start", "end"))
    if not (_is_count(number) and _is_count(start) and _is_count(end)) or number > MOST_BINS:
        return False
    if not start < end or start != number * (end - start):
        return False
    k = entry.get("k", 0)
    if not (k == "dense" or _is_count(k)):
        return False
    rest = (value for key, value in entry.items() if key != "k")
    return all(v is None or isinstance(v, bool) or _is_number(v) for v in rest)
