"""Predicted speed of decoding on a chip: rows in flight, the batch that fits, tokens per second.

A response of R tokens passes through every cached length from prompt to prompt + R - 1, one decode
step at each. An engine that refills its slots therefore has a row with t response tokens in flight
with a probability in proportion to the number of responses that are longer than t:

    weight(t) = P(R > t),   t = 0 .. max R - 1;   sum of the weights = mean R

Predictions take the bytes and operations of common/cost/decode_cost.py at the peaks of the chip, so
they are bounds and not measured times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.cost.chips import Chip
from common.cost.decode_cost import (
    landmark_bytes,
    layer_weights,
    num_parameters,
    row_terms,
    step_weights,
    token_bytes,
)
from common.errors import UserError
from common.model.geometry import Geometry
from common.records import json_checks
from common.rollout.page_pool import pages_for
from common.schedule.schedule import Schedule

MEMORY_SHARE = 0.8
"""Share of the memory of a chip for weights and cache; the rest holds activations and graphs."""
LONGEST = 2**22
"""Longest response in tokens; a longer one is taken for a mistake of the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of the lengths of the rows in flight.

    Every row has `prompt` prompt tokens, and t response tokens with a probability in proportion to
    weights[t], t = 0 .. longest response - 1.
    """

    prompt: int
    weights: np.ndarray

    @property
    def cached(self) -> np.ndarray:
        """Numbers of cached tokens of a row in flight, [longest response], aligned with weights."""
        return self.prompt + np.arange(len(self.weights))

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return len(self.weights)

    @property
    def mean_response(self) -> float:
        """Mean tokens of a response."""
        return float(self.weights.sum())

    @property
    def mean_cached(self) -> float:
        """Mean number of cached tokens over the rows in flight."""
        return float(np.average(self.cached, weights=self.weights))


def fixed_lengths(response: int, prompt: int = 0) -> Lengths:
    """Returns Lengths where every response has `response` tokens."""
    return histogram_lengths([response - 1, response], [1], prompt)


def histogram_lengths(edges: Sequence[int], counts: Sequence[int], prompt: int = 0) -> Lengths:
    """Returns Lengths where counts[i] responses have R tokens, edges[i] < R <= edges[i + 1], spread
    evenly within these edges.
    """
    count = np.asarray(counts, np.float64)
    density = np.zeros(edges[-1] + 1)
    for low, high, number in zip(edges[:-1], edges[1:], count / count.sum(), strict=True):
        density[low + 1 : high + 1] = number / (high - low)
    longer = 1 - np.cumsum(density)[:-1]
    last = 1 + int(np.flatnonzero(density)[-1])
    return Lengths(prompt=prompt, weights=np.maximum(longer[: last - 1], 0))


def read_lengths(text: str, prompt: int = 0) -> Lengths:
    """Returns the Lengths that a command line names: a number of tokens, or a JSON file.

        {"edges": [0, 1024, 4096], "counts": [300, 80]}

    Raises UserError for anything else.
    """
    prompt = json_checks.integer(prompt, "--prompt", 0, LONGEST)
    if text.isascii() and text.isdigit():
        return fixed_lengths(json_checks.parse_integer(text, "--lengths", 1, LONGEST), prompt)
    path = Path(text)
    if not path.is_file():
        raise UserError(
            f"--lengths={text}: neither a file nor a number of tokens; e.g. --lengths=32768"
        )
    return histogram_lengths(*_read_histogram(path), prompt)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Chip and options of a prediction.

    samples: responses to one prompt, which share one prefill and the full pages of the prompt.
    reserve: True if a row takes the pages of the longest response when it is admitted (our
    engines), False if it takes pages as it grows (vLLM). batch: number of rows decoded at once;
    0 means as many as fit.
    """

    chip: Chip
    samples: int = 8
    num_dense_layers: int = 2
    kv_bytes: int = 2
    weight_bytes: int = 2
    memory_share: float = MEMORY_SHARE
    reserve: bool = False
    batch: int = 0


def cache_bytes(g: Geometry, setting: Setting) -> float:
    """Returns the bytes left for the cache: memory_share of the chip's memory less all weights."""
    return setting.memory_share * setting.chip.memory_bytes - setting.weight_bytes * num_parameters(
        g
    )


def row_memory(g: Geometry, lengths: Lengths, page_size: int, setting: Setting) -> float:
    """Returns the mean bytes of cache of a row in flight: pages of KV and landmarks, in all layers.

    The samples of a prompt share its full pages, so each row counts 1 / samples of them.
    """
    page = page_size * token_bytes(g, setting.kv_bytes)
    page += g.num_layers * landmark_bytes(g, setting.kv_bytes)
    cached = lengths.cached[-1:] if setting.reserve else lengths.cached
    weights = lengths.weights[-1:] if setting.reserve else lengths.weights
    pages = np.average(pages_for(cached + 1, page_size), weights=weights)
    shared = (1 - 1 / setting.samples) * (lengths.prompt // page_size)
    return float(page * (pages - shared))


def batch_that_fits(g: Geometry, lengths: Lengths, page_size: int, setting: Setting) -> int:
    """Returns the number of rows decoded at once.

    Raises UserError if not even one row fits, or if setting.batch rows do not fit.
    """
    room = cache_bytes(g, setting)
    row = row_memory(g, lengths, page_size, setting)
    rows = max(0, int(room // row))
    if rows < max(1, setting.batch):
        weights = setting.weight_bytes * num_parameters(g) / 1e9
        raise UserError(
            f"{max(1, setting.batch)} rows do not fit: {setting.memory_share:g} of the memory of "
            f"{setting.chip.name} is {setting.memory_share * setting.chip.memory_bytes / 1e9:.0f} "
            f"GB, the weights take {weights:.1f}, a row {row / 1e9:.2f} GB: {rows} rows; give more "
            "--chips, a smaller --batch or shorter --lengths"
        )
    return setting.batch or rows


def predict(
    g: Geometry, schedule: Schedule | None, lengths: Lengths, batch: int, setting: Setting
) -> dict[str, Any]:
    """Returns the seconds of a decode step by term, and tokens per second, at the chip's peaks.

        weights     max(bytes / bandwidth, 2 numbers batch / FLOP/s)
        KV          bytes x max(1 / bandwidth, 2 (N / K) / kv_bytes / FLOP/s)
        landmarks   bytes / bandwidth
        prefill     batch / (mean response x samples) prompts a step, each
                    (2 P_layers L_in + 2 L N H L_in^2) / FLOP/s

    Slots are refilled as rows end, so rows are in flight at all lengths, weighted by `lengths`.
    The result is {"seconds": {term: s}, "bytes": {term: bytes}, "step_seconds",
    "tokens_per_second"}.
    """
    chip, terms = setting.chip, {"weights": float(setting.weight_bytes * step_weights(g))}
    rows = row_terms(
        g, schedule, lengths.cached, num_dense_layers=setting.num_dense_layers,
        kv_bytes=setting.kv_bytes,
    )  # fmt: skip
    terms |= {n: batch * float(np.average(x, weights=lengths.weights)) for n, x in rows.items()}
    per_byte = 1 / chip.bytes_per_second
    attend = 2 * g.num_heads / g.num_kv_heads / setting.kv_bytes / chip.flops_per_second
    seconds = {name: x * max(per_byte, attend) for name, x in terms.items()}
    seconds["weights"] = max(
        terms["weights"] * per_byte, 2 * step_weights(g) * batch / chip.flops_per_second
    )
    seconds["landmarks"] = terms["landmarks"] * per_byte
    prompts = batch / (lengths.mean_response * setting.samples)
    flops = 2 * layer_weights(g) * lengths.prompt
    flops += 2 * g.num_layers * g.num_heads * g.head_dim * lengths.prompt**2
    seconds["prefill"] = prompts * flops / chip.flops_per_second
    total = sum(seconds.values())
    return {
        "seconds": seconds, "bytes": terms, "step_seconds": total,
        "tokens_per_second": batch / total,
    }  # fmt: skip


def whole_step_speedup(rollout_speedup: float, train_share: float) -> float:
    """Returns the speedup of an RL step that spends train_share of its time outside the rollout.

        1 / (train_share + (1 - train_share) / rollout_speedup)

    This is Amdahl's law. arXiv 2606.08446 measured 2.21x for the rollout and 1.97x for the step at
    1.7B, so its train_share was 0.10.
    """
    return 1 / (train_share + (1 - train_share) / rollout_speedup)
