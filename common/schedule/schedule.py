"""Schedules: how many pages a query may read at which position; file format and presets.

A schedule is a JSON file that also says how it was found:

    {"format": "sparrow-schedule-1", "name": "my-0.86", "page_size": 16, "bin_tokens": 64,
     "bins": [{"start": 0, "end": 64, "k": 4}, {"start": 64, "end": 128, "k": "dense"}],
     "provenance": {"model": "...", "tau": 0.86, ...}}

k counts top-scoring pages beyond the three reserved ones; the last bin holds beyond its end.
common/schedule/schedule_search.py finds a schedule in a profile (common/schedule/profile_file.py).
Source: arXiv 2606.08446, section 4.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.records.json_checks import integer, keys, read
from common.schedule import presets

FORMAT = "sparrow-schedule-1"
DENSE = 2**20
"""Budget that stands for 'every page'; written as "dense" in files."""
NUM_RESERVED = 3
"""Pages read whatever the budget: the first and the last two."""


def token_bins(positions: np.ndarray, bin_tokens: int) -> np.ndarray:
    """Length bin of the tokens at 0-based `positions`: that of the query that made each of them.

        bin(t) = (t - 1) // bin_tokens

    Token t is sampled by the query at t - 1, under the budget of its position. So bin b holds the
    tokens of the queries at b w ... b w + w - 1. Token 0 is given, not sampled; it is in bin 0.
    """
    if bin_tokens < 1:
        raise ValueError(f"{bin_tokens=}: expected at least 1")
    return np.maximum(np.asarray(positions) - 1, 0) // bin_tokens


def budget_at(positions: np.ndarray, budgets: np.ndarray, bin_tokens: int) -> np.ndarray:
    """Budget of the query at each 0-based position; the last budget holds beyond its bin.

        k(t) = budgets[min(t // bin_tokens, len(budgets) - 1)]

    This is the only lookup on the host. `budget_at` in decode.py of sparrow_jax and sparrow_torch
    is the same lookup in their decode programs; tests/torch/test_budget_lookup.py compares all.
    """
    return budgets[np.minimum(positions // bin_tokens, len(budgets) - 1).astype(np.int64)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Budget (number of top-k pages) as a function of the query's position: see `budget_at`.

    page_size, bin_tokens: tokens. budgets: pages, 0 <= k <= DENSE. provenance: JSON-serialisable
    record of where it comes from (model, tau, quantile, statistic, method, profile bins, versions).
    sized_for: budget that engines make room for beside those in use, so that a schedule that
    changes from step to step needs no new program; not part of a file.
    Raises ValueError for anything else: `parse` and `resolve` check what users give.
    Source: arXiv 2606.08446, section 4.
    """

    page_size: int
    bin_tokens: int
    budgets: tuple[int, ...]
    name: str = ""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    sized_for: int = 0

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "page_size", integer(self.page_size, "page_size", 1, error=ValueError))
        set_field(self, "bin_tokens", integer(self.bin_tokens, "bin_tokens", 1, error=ValueError))
        budgets = [
            integer(k, f"budgets[{i}]", 0, DENSE, error=ValueError)
            for i, k in enumerate(self.budgets)
        ]
        set_field(self, "budgets", tuple(budgets))
        if not budgets:
            raise ValueError("budgets=(): expected at least one bin")

    @property
    def is_dense(self) -> bool:
        """True if every bin reads every page."""
        return min(self.budgets) == DENSE

    def budget(self, position: int) -> int:
        """k of the query at 0-based `position` (>= 0)."""
        position = integer(position, "position", 0, error=ValueError)
        return int(self.budgets_at(np.array(position)))

    def budgets_at(self, positions: np.ndarray) -> np.ndarray:
        """`budget` for an integer array of positions of any shape; int32 of the same shape."""
        positions = np.asarray(positions)
        if positions.size and (positions.dtype.kind not in "iu" or positions.min() < 0):
            raise ValueError(f"{positions.dtype=}: expected non-negative integer positions")
        return budget_at(positions, np.asarray(self.budgets, np.int32), self.bin_tokens)

    def share_of_pages(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Pages read over pages cached, summed over queries that see `lengths` tokens (>= 1) each.

            sum_i min(n_i, k_i + 3) / sum_i n_i,   n_i = ceil(length_i / page_size)

        The query that sees `length` tokens stands at position length - 1. Dense = 1.
        """
        lengths = np.asarray(lengths)
        if lengths.size == 0 or lengths.min() < 1:
            raise ValueError(f"{lengths=}: expected at least one length, all at least 1")
        pages = -(-lengths.astype(np.int64) // self.page_size)
        read = np.minimum(pages, self.budgets_at(lengths - 1) + np.int64(NUM_RESERVED))
        return float(read.sum() / pages.sum())

    def describe(self) -> str:
        """One line for people: name, page size, each budget and the length from which it holds."""
        steps, last = [], None
        for i, k in enumerate(self.budgets):
            if k != last:
                steps.append(f"{written(k)} from {i * self.bin_tokens}")
            last = k
        return f"{self.name or 'schedule'} (pages of {self.page_size}): k = " + ", ".join(steps)

    def to_json(self) -> dict[str, Any]:
        """The content of a schedule file, as plain JSON types."""
        width = self.bin_tokens
        bins = [
            {"start": i * width, "end": (i + 1) * width, "k": written(k)}
            for i, k in enumerate(self.budgets)
        ]
        return {
            "format": FORMAT,
            "name": self.name,
            "page_size": self.page_size,
            "bin_tokens": width,
            "bins": bins,
            "provenance": dict(self.provenance),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file in one step: readers see the old file or the new, never a part."""
        path = Path(path)
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as f:
            try:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
                os.chmod(f.name, 0o644)
                os.replace(f.name, path)
            except OSError:
                os.unlink(f.name)
                raise


def written(k: int) -> int | str:
    """A budget as schedule files and messages show it: "dense" in place of every page."""
    return "dense" if k == DENSE else k


def parse(data: Mapping[str, Any], where: str = "schedule") -> Schedule:
    """A Schedule from the content of a schedule file; `where` starts the error messages.

    Raises UserError: unknown or missing keys, another format, holes, overlaps or wrong order of
    bins, budgets that are not non-negative integers or "dense".
    """
    if data.get("format") != FORMAT:
        raise UserError(f"{where}: format={data.get('format')!r}, expected {FORMAT!r}")
    keys(data, ("format", "page_size", "bin_tokens", "bins"), where, ("name", "provenance"))
    width = integer(data["bin_tokens"], f"{where}: bin_tokens", 1)
    if not isinstance(data["bins"], list) or not data["bins"]:
        raise UserError(f"{where}: bins={data['bins']!r}, expected a list with at least one bin")
    if not isinstance(data.get("name", ""), str) or not isinstance(
        data.get("provenance", {}), dict
    ):
        raise UserError(f"{where}: name must be a string and provenance an object")
    budgets = []
    for i, entry in enumerate(data["bins"]):
        keys(entry, ("start", "end", "k"), f"{where}: bins[{i}]")
        start = integer(entry["start"], f"{where}: bins[{i}].start", 0)
        end = integer(entry["end"], f"{where}: bins[{i}].end", 0)
        if (start, end) != (i * width, (i + 1) * width):
            raise UserError(
                f"{where}: bins[{i}] covers {start}..{end}, expected {i * width}.."
                f"{(i + 1) * width} (bins must be sorted and touch, without hole or overlap)"
            )
        k = entry["k"]
        budgets.append(DENSE if k == "dense" else integer(k, f"{where}: bins[{i}].k", 0, DENSE))
    return Schedule(
        page_size=integer(data["page_size"], f"{where}: page_size", 1),
        bin_tokens=width,
        budgets=tuple(budgets),
        name=data.get("name", ""),
        provenance=data.get("provenance", {}),
    )


def load(path: str | os.PathLike[str], *, page_size: int) -> Schedule:
    """Read a schedule file made for `page_size`; UserError, one line, if it does not fit."""
    path = Path(path)
    schedule = parse(read(path, FORMAT), str(path))
    _check_page_size(schedule, str(path), page_size)
    return schedule


def _check_page_size(schedule: Schedule, where: str, page_size: int) -> None:
    if schedule.page_size != page_size:
        raise UserError(
            f"{where}: made for page_size={schedule.page_size}, got page_size={page_size}; "
            f"set rollout.page_size={schedule.page_size} or profile again"
        )


def fixed(k: int, *, page_size: int, bin_tokens: int) -> Schedule:
    """The same budget k at every position; UserError for k outside [0, DENSE]."""
    k = integer(k, "k", 0, DENSE)
    return Schedule(page_size=page_size, bin_tokens=bin_tokens, budgets=(k,), name=f"k={k}")


def resolve(text: str, *, page_size: int, bin_tokens: int) -> Schedule | None:
    """The schedule that a configuration names; None = dense.

    text: "dense", "k=8" (fixed budget), a published name ("qwen3-1.7b-0.86"), or a JSON file.
    bin_tokens is used for "k=8" only: presets and files bring their own bins.
    Raises UserError for unknown names (nearest preset offered), another page size, bad files.
    """
    if text == "dense":
        return None
    if match := re.fullmatch(r"k=(.*)", text):
        if not re.fullmatch(r"\d{1,7}", match[1], re.ASCII):
            raise UserError(f"schedule={text!r}: expected k=<non-negative integer>, e.g. k=8")
        return fixed(int(match[1]), page_size=page_size, bin_tokens=bin_tokens)
    if text in presets.PUBLISHED:
        schedule = Schedule(
            page_size=presets.PAGE_SIZE,
            bin_tokens=presets.BIN_TOKENS,
            budgets=presets.PUBLISHED[text],
            name=text,
            provenance={
                "model": text.rpartition("-")[0],
                "tau": float(text.rpartition("-")[2]),
                "quantile": 0.05,
                "statistic": "p5 of the acceptance rate, from top-20 log-probs",
                "method": "published: arXiv 2606.08446, section 4",
            },
        )
        _check_page_size(schedule, text, page_size)
        return schedule
    if not Path(text).is_file():
        near = difflib.get_close_matches(text.lower(), [*presets.PUBLISHED, "dense"], 1, 0.0)
        raise UserError(
            f"schedule={text!r}: no such file and no published name; nearest name: {near[0]!r}"
        )
    return load(text, page_size=page_size)
