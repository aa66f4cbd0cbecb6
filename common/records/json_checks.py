"""Checks of values from files: each failure is a UserError of one line."""

from __future__ import annotations

import difflib
import json
import operator
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError

BROKEN = (
    OSError, ValueError, LookupError, TypeError, EOFError, AttributeError, MemoryError,
    OverflowError, RuntimeError, SyntaxError, struct.error, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What zipfile, numpy and json raise for damaged files; RuntimeError includes RecursionError."""
LARGEST = 2**31 - 1
"""Upper limit of integers without one of their own; int32 arrays can hold it."""


def integer(
    value: Any,
    what: str,
    low: int,
    high: int | None = None,
    *,
    error: type[ValueError] = UserError,
) -> int:
    """`value` as an int; bools, floats and numbers outside [low, high] raise `error`.

    what: name of the value in the message. high: None stands for LARGEST. error: UserError, or
    ValueError for a value that our own code passes.
    """
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if high is None and isinstance(value, int) and value > LARGEST:
        limit = f"at most {LARGEST}"
    message = f"{what}={value!r}: expected an integer {limit}"
    if isinstance(value, bool | np.bool_):
        raise error(message)
    try:
        number = operator.index(value)
    except TypeError:
        raise error(message) from None
    if not low <= number <= (LARGEST if high is None else high):
        raise error(message)
    return number


def parse_integer(text: str, what: str, low: int, high: int) -> int:
    """The integer in [low, high] that `text` states in plain digits; else raises UserError."""
    digits = text.strip()
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise UserError(f"{what}={text[:40]}: expected an integer in [{low}, {high}]")
    return integer(int(digits), what, low, high)


def number(value: Any, what: str, low: float, high: float) -> float:
    """`value` as a float; bools, NaN and numbers outside [low, high] raise UserError."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not low <= value <= high:
        raise UserError(f"{what}={value!r}: expected a number in [{low:g}, {high:g}]")
    return float(value)


def keys(data: Any, expected: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise UserError unless `data` is a dict with all `expected` keys, others being `optional`."""
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(data).__name__}")
    for key in data:
        if key not in (*expected, *optional):
            near = difflib.get_close_matches(key, [*expected, *optional], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(expected)}"
            raise UserError(f"{where}: unknown key {key!r}; {hint}")
    for key in expected:
        if key not in data:
            raise UserError(f"{where}: key {key!r} is missing")


def read(path: Path, form: str) -> dict[str, Any]:
    """The JSON object in a file; raises UserError unless its "format" is `form`."""
    data = read_object(path)
    if data.get("format") != form:
        raise UserError(f"{path}: format={data.get('format')!r}, expected {form!r}")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises UserError, naming the file, if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise UserError(f"{path}: not a JSON file ({error})") from None
    except RecursionError:
        raise UserError(f"{path}: not a usable JSON file (nested too deeply)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data
