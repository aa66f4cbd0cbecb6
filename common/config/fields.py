"""A setting with its help text, choices and bounds, and the check that all of them get."""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import field
from typing import Any

from common.errors import UserError

COUNT = "[1, 1000000000]"
COUNT_OR_NONE = "[0, 1000000000]"
ROWS = "[1, 1048576]"
WIDTH = "[1, 1048576]"
TOKENS = "[1, 16777216]"
TOKENS_OR_NONE = "[0, 16777216]"
SEED = "[0, 2147483647]"
RATE = "[0, 1]"


def check(ok: bool, message: str) -> None:
    """Raise UserError with `message` unless `ok` is true."""
    if not ok:
        raise UserError(message)


def setting(
    default: Any, doc: str, *, choices: tuple[Any, ...] | None = None, within: str = ""
) -> Any:
    """A dataclass field with its help text, which `sparrow help config` shows.

    choices: the values that are allowed. within: the interval of a number, or of each number of a
    tuple; "[" and "]" include the end beside them, "(" and ")" exclude it. Every number has
    choices or an interval, outside of which it would overflow, underflow or mean nothing.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "within": within})


def check_within(name: str, value: Any, within: str, whole: bool = False) -> None:
    """Raise UserError unless the number, or each of a tuple, is in the interval; NaN never is."""
    low, high = (float(x) for x in within[1:-1].split(","))
    for x in value if isinstance(value, tuple | list) else (value,):
        kind = numbers.Integral if whole else numbers.Real
        check(
            isinstance(x, kind) and not isinstance(x, bool),
            f"{name}={_short(value)}: expected {'whole numbers' if whole else 'numbers'}",
        )
        above = x >= low if within[0] == "[" else x > low
        below = x <= high if within[-1] == "]" else x < high
        check(
            bool(above and below),
            f"{name}={_short(value)}: expected {_interval(low, high, within)}",
        )


def _short(value: Any) -> str:
    """A value shortened for an error message of one line."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of over 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _interval(low: float, high: float, within: str) -> str:
    """The interval in words: "at least 1 and at most 65536" for "[1, 65536]"."""
    first = f"at least {low:.10g}" if within[0] == "[" else f"more than {low:.10g}"
    return f"{first} and {'at most' if within[-1] == ']' else 'less than'} {high:.10g}"


class Checked:
    """Mixin: refuses values outside a field's choices or interval; subclasses add `validate`."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            check(
                choices is None or value in choices,
                f"{f.name}={_short(value)}: expected one of {choices}",
            )
            if f.metadata.get("within"):
                whole = "int" in str(f.type)
                check_within(f.name, value, f.metadata["within"], whole)
        self.validate()

    def validate(self) -> None:
        """Checks of values that depend on each other."""
