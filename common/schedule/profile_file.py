"""Profile files: statistics of the acceptance rate by budget and length bin, read and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.records.json_checks import integer, keys, number, read
from common.schedule.schedule import DENSE

PROFILE_FORMAT = "sparrow-profile-1"
_REQUIRED = ("format", "model", "page_size", "bin_tokens", "quantiles", "rows")
_TEXTS, _LISTS = ("source", "interval", "policy"), ("shape", "topk")
_OPTIONAL = ("versions", "summary", "halves", *_TEXTS, *_LISTS)
MAX_BINS = 2**16
_ROW = ("k", "bin", "start", "end", "count", "enough")
_UNITS = ("num_units", "num_sequences")


def load_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a profile: statistics of the acceptance rate by budget and length bin.

        {"format": "sparrow-profile-1", "model": "...", "page_size": 16, "bin_tokens": 64,
         "quantiles": [0.01, 0.05], "versions": {...}, "rows": [
          {"k": 4, "bin": 0, "start": 0, "end": 64, "count": 900, "num_units": 16,
           "mean": 0.99, "p1": 0.4, "p5": 0.9, "p50": 1.0, "share_above_0_999": 0.8, "p1_low": 0.3,
           "p1_high": 0.5, "p5_low": 0.88, "p5_high": 0.93, "enough": true}, ...]}

    k is "dense" in rows that compare dense with dense. Statistics may be null where enough is
    false. One row per (k, bin). num_units: prompts, or blocks of a text; older profiles have
    "num_sequences", and intervals that took samples of one prompt for independent. Optional:
    "halves", two objects {"rows": [...]} of the same kind over two disjoint halves of the prompts
    (common/schedule/schedule_validation.py); "source", "interval", "policy", strings: what was
    measured, how intervals were made, how pages are selected; "shape", "topk", lists; "summary",
    "versions". Returns the object as it is; raises UserError, one line.
    """
    data = read(Path(path), PROFILE_FORMAT)
    check_profile(data, str(path))
    return data


def check_profile(data: Mapping[str, Any], where: str = "profile") -> None:
    """UserError unless `data` is a profile as `load_profile` describes it."""
    keys(data, _REQUIRED, where, _OPTIONAL)
    integer(data["page_size"], f"{where}: page_size", 1)
    width = integer(data["bin_tokens"], f"{where}: bin_tokens", 1)
    if not isinstance(data["model"], str):
        raise UserError(f"{where}: model={data['model']!r}: expected a string")
    if not isinstance(data["quantiles"], list):
        raise UserError(f"{where}: quantiles={data['quantiles']!r}: expected a list")
    for kind, what, names in ((str, "a string", _TEXTS), (list, "a list", _LISTS)):
        for name in names:
            if not isinstance(data.get(name, kind()), kind):
                raise UserError(
                    f"{where}: {name}: expected {what}, got {type(data[name]).__name__}"
                )
    versions = data.get("versions", {})
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise UserError(f"{where}: versions={versions!r}: expected an object of strings")
    names = [quantile_name(number(q, f"{where}: quantiles", 0, 1)) for q in data["quantiles"]]
    _check_rows(data["rows"], names, width, f"{where}: rows")
    halves = data.get("halves")
    if "halves" in data and not (isinstance(halves, list) and len(halves) == 2):
        raise UserError(f'{where}: halves: expected a list of two objects {{"rows": [...]}}')
    for i, half in enumerate(halves or ()):
        keys(half, ("rows",), f"{where}: halves[{i}]")
        _check_rows(half["rows"], names, width, f"{where}: halves[{i}].rows")


def _check_rows(rows: Any, quantiles: Sequence[str], width: int, where: str) -> None:
    """UserError unless `rows` is a list of rows with those quantiles in bins of `width` tokens."""
    if not isinstance(rows, list):
        raise UserError(f"{where}: expected a list, got {type(rows).__name__}")
    tails = [f"{name}{end}" for name in quantiles for end in ("", "_low", "_high")]
    values = ["mean", "p50", "share_above_0_999", *tails]
    seen = set()
    for i, row in enumerate(rows):
        at = f"{where}[{i}]"
        keys(row, list(dict.fromkeys([*_ROW, *values])), at, _UNITS)
        k = row["k"] if row["k"] == "dense" else integer(row["k"], f"{at}.k", 0, DENSE)
        b = integer(row["bin"], f"{at}.bin", 0, MAX_BINS - 1)
        if (row["start"], row["end"]) != (b * width, (b + 1) * width) or (k, b) in seen:
            raise UserError(f"{at}: bin {b} of k={k} is stated twice or not {width} tokens wide")
        seen.add((k, b))
        integer(row["count"], f"{at}.count", 0)
        for name in (name for name in _UNITS if name in row):
            integer(row[name], f"{at}.{name}", 0)
        if not isinstance(row["enough"], bool):
            raise UserError(f"{at}.enough={row['enough']!r}: expected true or false")
        for value in values:
            if row["enough"] or row[value] is not None:
                number(row[value], f"{at}.{value}", 0, 1 + 1e-6)


def quantile_name(quantile: float) -> str:
    """0.05 -> "p5", 0.01 -> "p1", 0.005 -> "p0.5"."""
    return f"p{100 * quantile:g}"
