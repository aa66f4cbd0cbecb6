"""Lengths of responses, and those of the rows that are in flight while such responses are decoded.

A response of R tokens passes through every cached length from prompt to prompt + R - 1, one step
each. In an engine that refills its slots, a row looked at in any step therefore has t response
tokens behind it with a probability in proportion to the responses that are longer than t:

    weight(t) = P(R > t),   t = 0 .. max R - 1;   sum of the weights = mean R
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.records import json_checks

LONGEST = 2**22
"""Tokens; longer responses are taken for a mistake."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompt tokens, and weights [max R] of rows in flight with t = 0, 1, ... response tokens."""

    prompt: int
    weights: np.ndarray

    @property
    def cached(self) -> np.ndarray:
        """Cached tokens of a row in flight, [max R], by weight."""
        return self.prompt + np.arange(len(self.weights))

    @property
    def longest_response(self) -> int:
        return len(self.weights)

    @property
    def mean_response(self) -> float:
        return float(self.weights.sum())

    @property
    def mean_cached(self) -> float:
        """Of the rows in flight."""
        return float(np.average(self.cached, weights=self.weights))


def fixed(response: int, prompt: int = 0) -> Lengths:
    """All responses of `response` tokens."""
    return histogram([response - 1, response], [1], prompt)


def histogram(edges: Sequence[int], counts: Sequence[int], prompt: int = 0) -> Lengths:
    """counts[i] responses have edges[i] < R <= edges[i + 1] tokens, evenly within."""
    count = np.asarray(counts, np.float64)
    density = np.zeros(edges[-1] + 1)
    for low, high, number in zip(edges[:-1], edges[1:], count / count.sum(), strict=True):
        density[low + 1 : high + 1] = number / (high - low)
    longer = 1 - np.cumsum(density)[:-1]
    last = 1 + int(np.flatnonzero(density)[-1])
    return Lengths(prompt=prompt, weights=np.maximum(longer[: last - 1], 0))


def read(text: str, prompt: int = 0) -> Lengths:
    """From the command line: a number of tokens, or a JSON file.

        {"edges": [0, 1024, 4096], "counts": [300, 80]}

    UserError for anything else.
    """
    prompt = json_checks.integer(prompt, "--prompt", 0, LONGEST)
    if text.isascii() and text.isdigit():
        return fixed(json_checks.written(text, "--lengths", 1, LONGEST), prompt)
    path = Path(text)
    if not path.is_file():
        raise UserError(
            f"--lengths={text}: no such file, and no number of tokens; e.g. --lengths=32768"
        )
    return histogram(*_read_histogram(path), prompt)


def _read_histogram(path: Path) -> tuple[list[int], list[int]]:
    data = json_checks.read_object(path)
    json_checks.keys(data, ("edges", "counts"), str(path))
    for key in ("edges", "counts"):
        if not isinstance(data[key], list):
            raise UserError(f"{path}: {key} must be a list of integers")
    edges = [
        json_checks.integer(x, f"{path}: edges[{i}]", 0, LONGEST)
        for i, x in enumerate(data["edges"])
    ]
    counts = [
        json_checks.integer(x, f"{path}: counts[{i}]", 0) for i, x in enumerate(data["counts"])
    ]
    if len(edges) != len(counts) + 1 or edges != sorted(set(edges)):
        raise UserError(
            f"{path}: {len(edges)} edges and {len(counts)} counts; expected rising edges, one more "
            "than counts"
        )
    if not sum(counts):
        raise UserError(f"{path}: all counts are 0; expected at least one response")
    return edges, counts
