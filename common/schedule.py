"""Schedules: how many pages a query may read at which position; file format, presets, search.

A schedule is data with a history. It is written as JSON:

    {"format": "sparrow-schedule-1", "name": "my-0.86", "page_size": 16, "bin_tokens": 64,
     "bins": [{"start": 0, "end": 64, "k": 4}, {"start": 64, "end": 128, "k": "dense"}],
     "provenance": {"model": "...", "tau": 0.86, ...}}

k counts top-scoring pages beyond the three reserved ones; the last bin holds beyond its end.
A profile, from which `search` finds a schedule, is JSON as well (see `load_profile`).
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

from common import presets
from common.json_checks import integer, keys, number, read

FORMAT = "sparrow-schedule-1"
PROFILE_FORMAT = "sparrow-profile-1"
DENSE = 2**20
"""Budget that stands for 'every page'; written as "dense" in files."""
NUM_RESERVED = 3
"""Pages read whatever the budget: the first and the last two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Budget (number of top-k pages) as a function of the query's position.

        k(t) = budgets[min(t // bin_tokens, len(budgets) - 1)],   t = 0-based query position

    page_size, bin_tokens: tokens. budgets: pages, 0 <= k <= DENSE. provenance: JSON-serialisable
    record of where it comes from (model, tau, quantile, statistic, method, profile bins, versions).
    sized_for: budget that engines make room for beside those in use, so that a schedule that
    changes from step to step needs no new program; not part of a file.
    Raises ValueError for anything else. Source: arXiv 2606.08446, section 4.
    """

    page_size: int
    bin_tokens: int
    budgets: tuple[int, ...]
    name: str = ""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    sized_for: int = 0

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "page_size", integer(self.page_size, "page_size", 1))
        set_field(self, "bin_tokens", integer(self.bin_tokens, "bin_tokens", 1))
        budgets = [integer(k, f"budgets[{i}]", 0, DENSE) for i, k in enumerate(self.budgets)]
        set_field(self, "budgets", tuple(budgets))
        if not budgets:
            raise ValueError("budgets=(): expected at least one bin")

    @property
    def is_dense(self) -> bool:
        """True if every bin reads every page."""
        return min(self.budgets) == DENSE

    def budget(self, position: int) -> int:
        """k of the query at 0-based `position` (>= 0)."""
        position = integer(position, "position", 0)
        return self.budgets[min(position // self.bin_tokens, len(self.budgets) - 1)]

    def budgets_at(self, positions: np.ndarray) -> np.ndarray:
        """`budget` for an integer array of positions of any shape; int32 of the same shape."""
        positions = np.asarray(positions)
        if positions.size and (positions.dtype.kind not in "iu" or positions.min() < 0):
            raise ValueError(f"{positions.dtype=}: expected non-negative integer positions")
        bins = np.minimum(positions // self.bin_tokens, len(self.budgets) - 1)
        return np.asarray(self.budgets, np.int32)[bins.astype(np.int64)]

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
                steps.append(f"{_written(k)} from {i * self.bin_tokens}")
            last = k
        return f"{self.name or 'schedule'} (pages of {self.page_size}): k = " + ", ".join(steps)

    def to_json(self) -> dict[str, Any]:
        """The content of a schedule file, as plain JSON types."""
        width = self.bin_tokens
        bins = [
            {"start": i * width, "end": (i + 1) * width, "k": _written(k)}
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
        """Write the JSON file in one step: readers see the old file or the new, never a half."""
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


def _written(k: int) -> int | str:
    return "dense" if k == DENSE else k


def parse(data: Mapping[str, Any], where: str = "schedule") -> Schedule:
    """A Schedule from the content of a schedule file; `where` starts the error messages.

    Raises ValueError: unknown or missing keys, another format, holes, overlaps or wrong order of
    bins, budgets that are not non-negative integers or "dense".
    """
    if data.get("format") != FORMAT:
        raise ValueError(f"{where}: format={data.get('format')!r}, expected {FORMAT!r}")
    keys(data, ("format", "page_size", "bin_tokens", "bins"), where, ("name", "provenance"))
    width = integer(data["bin_tokens"], f"{where}: bin_tokens", 1)
    if not isinstance(data["bins"], list) or not data["bins"]:
        raise ValueError(f"{where}: bins={data['bins']!r}, expected a list with at least one bin")
    if not isinstance(data.get("name", ""), str) or not isinstance(
        data.get("provenance", {}), dict
    ):
        raise ValueError(f"{where}: name must be a string and provenance an object")
    budgets = []
    for i, entry in enumerate(data["bins"]):
        keys(entry, ("start", "end", "k"), f"{where}: bins[{i}]")
        start = integer(entry["start"], f"{where}: bins[{i}].start", 0)
        end = integer(entry["end"], f"{where}: bins[{i}].end", 0)
        if (start, end) != (i * width, (i + 1) * width):
            raise ValueError(
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
    """Read a schedule file made for `page_size`; ValueError, one line, if it does not fit."""
    path = Path(path)
    schedule = parse(read(path, FORMAT), str(path))
    _check_page_size(schedule, str(path), page_size)
    return schedule


def _check_page_size(schedule: Schedule, where: str, page_size: int) -> None:
    if schedule.page_size != page_size:
        raise ValueError(
            f"{where}: made for page_size={schedule.page_size}, got page_size={page_size}; "
            f"set rollout.page_size={schedule.page_size} or profile again"
        )


def fixed(k: int, *, page_size: int, bin_tokens: int) -> Schedule:
    """The same budget k at every position."""
    return Schedule(page_size=page_size, bin_tokens=bin_tokens, budgets=(k,), name=f"k={k}")


def resolve(text: str, *, page_size: int, bin_tokens: int) -> Schedule | None:
    """The schedule that a configuration names; None = dense.

    text: "dense", "k=8" (fixed budget), a published name ("qwen3-1.7b-0.86"), or a JSON file.
    bin_tokens is used for "k=8" only: presets and files bring their own bins.
    Raises ValueError for unknown names (nearest preset offered), another page size, bad files.
    """
    if text == "dense":
        return None
    if match := re.fullmatch(r"k=(.*)", text):
        if not re.fullmatch(r"\d{1,7}", match[1], re.ASCII):
            raise ValueError(f"schedule={text!r}: expected k=<non-negative integer>, e.g. k=8")
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
        raise ValueError(
            f"schedule={text!r}: no such file and no published name; nearest name: {near[0]!r}"
        )
    return load(text, page_size=page_size)


def load_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a profile: statistics of the acceptance rate by budget and length bin.

        {"format": "sparrow-profile-1", "model": "...", "page_size": 16, "bin_tokens": 64,
         "quantiles": [0.01, 0.05], "versions": {...}, "rows": [
          {"k": 4, "bin": 0, "start": 0, "end": 64, "count": 900, "num_sequences": 64,
           "mean": 0.99, "p1": 0.4, "p5": 0.9, "p50": 1.0, "share_above_0_999": 0.8, "p1_low": 0.3,
           "p1_high": 0.5, "p5_low": 0.88, "p5_high": 0.93, "enough": true}, ...]}

    k is "dense" in rows that compare dense with dense. Statistics may be null where enough is
    false. One row per (k, bin). Returns the object as it is; raises ValueError, one line.
    """
    data = read(Path(path), PROFILE_FORMAT)
    check_profile(data, str(path))
    return data


def check_profile(data: Mapping[str, Any], where: str = "profile") -> None:
    """ValueError unless `data` is a profile as `load_profile` describes it."""
    top = ("format", "model", "page_size", "bin_tokens", "quantiles", "rows")
    keys(data, top, where, ("versions", "summary"))
    integer(data["page_size"], f"{where}: page_size", 1)
    width = integer(data["bin_tokens"], f"{where}: bin_tokens", 1)
    if not isinstance(data["quantiles"], list) or not isinstance(data["rows"], list):
        raise ValueError(f"{where}: quantiles and rows must be lists")
    names = [quantile_name(number(q, f"{where}: quantiles", 0, 1)) for q in data["quantiles"]]
    tails = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    values = ["mean", "p50", "share_above_0_999", *tails]
    seen = set()
    for i, row in enumerate(data["rows"]):
        at = f"{where}: rows[{i}]"
        fixed_keys = ("k", "bin", "start", "end", "count", "num_sequences", "enough")
        keys(row, list(dict.fromkeys([*fixed_keys, *values])), at)
        k = row["k"] if row["k"] == "dense" else integer(row["k"], f"{at}.k", 0, DENSE)
        b = integer(row["bin"], f"{at}.bin", 0)
        if (row["start"], row["end"]) != (b * width, (b + 1) * width) or (k, b) in seen:
            raise ValueError(f"{at}: bin {b} of k={k} is stated twice or not {width} tokens wide")
        seen.add((k, b))
        integer(row["count"], f"{at}.count", 0)
        integer(row["num_sequences"], f"{at}.num_sequences", 0)
        if not isinstance(row["enough"], bool):
            raise ValueError(f"{at}.enough={row['enough']!r}: expected true or false")
        for value in values:
            if row["enough"] or row[value] is not None:
                number(row[value], f"{at}.{value}", 0, 1 + 1e-6)


def quantile_name(quantile: float) -> str:
    """0.05 -> "p5", 0.01 -> "p1", 0.005 -> "p0.5"."""
    return f"p{100 * quantile:g}"


def search(
    profile: Mapping[str, Any], *, tau: float, quantile: float, monotone: bool = True
) -> Schedule:
    """Per length bin the smallest measured budget from which on the quantile of alpha meets tau.

        k(bin) = min {k measured : p_q(alpha | k', bin) >= tau for every measured k' >= k}

    and dense if the largest one fails: a small budget that passes by luck, while a larger one does
    not, is no evidence.

    profile: see `load_profile`. quantile: one of the profile's, 0.05 = p5 (the paper's), 0.01 = p1
    (sees rare but decisive tokens). monotone: budgets never fall with length (running maximum).
    A bin without enough tokens at any budget inherits the bin before it, bins before the first
    judged one inherit that; provenance["inherited_bins"] lists them. Raises ValueError if no bin
    can be judged. Source: arXiv 2606.08446, section 4.
    """
    check_profile(profile)
    number(tau, "tau", 0, 1)
    if quantile not in profile["quantiles"]:
        raise ValueError(
            f"{quantile=}: the profile has {profile['quantiles']}; choose one or profile"
        )
    name = quantile_name(quantile)
    judged = _judge(profile["rows"], name, tau)
    if not judged:
        raise ValueError(
            "profile: no bin has enough tokens at any budget; profile more prompts, or longer ones"
        )
    chosen = []
    for b in range(1 + max(row["bin"] for row in profile["rows"])):
        before = chosen[-1] if chosen else judged[min(judged)]
        k, row = judged.get(b, before)
        chosen.append((max(k, before[0]) if monotone and chosen else k, row))
    width = profile["bin_tokens"]
    bins = []
    for b, (k, row) in enumerate(chosen):
        entry = {"start": b * width, "end": (b + 1) * width, "k": _written(k)}
        if b in judged:
            entry |= {"measured_k": row["k"], "count": row["count"], name: row[name]}
            entry |= {"low": row[f"{name}_low"], "high": row[f"{name}_high"]}
        bins.append(entry)
    return Schedule(
        page_size=profile["page_size"],
        bin_tokens=width,
        budgets=tuple(k for k, _ in chosen),
        name=f"{Path(profile['model']).name or 'model'}-{tau:g}",
        provenance={
            "model": profile["model"],
            "tau": tau,
            "quantile": quantile,
            "statistic": f"{name} of the exact acceptance rate",
            "method": "smallest measured budget from which on all meet tau"
            + (", never falling with length" if monotone else ""),
            "measured_budgets": sorted({r["k"] for r in profile["rows"] if r["k"] != "dense"}),
            "inherited_bins": [b for b in range(len(chosen)) if b not in judged],
            "bins": bins,
            "versions": dict(profile.get("versions", {})),
        },
    )


def _judge(
    rows: Sequence[Mapping[str, Any]], name: str, tau: float
) -> dict[int, tuple[int, Mapping[str, Any]]]:
    """bin -> (budget, row it rests on); (DENSE, row of the largest budget) where that fails tau."""
    judged: dict[int, tuple[int, Mapping[str, Any]]] = {}
    settled: set[int] = set()
    sparse = [row for row in rows if row["k"] != "dense" and row["enough"]]
    for row in sorted(sparse, key=lambda row: -row["k"]):
        b = row["bin"]
        if b in settled:
            continue
        if row[name] >= tau:
            judged[b] = (row["k"], row)
        else:
            settled.add(b)
            judged.setdefault(b, (DENSE, row))
    return judged
