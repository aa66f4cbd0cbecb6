"""What decoding costs in bytes: terms of one step, the batch that fits, predicted tokens a second.

One decode step reads the weights once and, of every row, keys and values (KV) and landmarks. For a
row with n cached tokens, whose query sees n + 1 in p = ceil((n + 1) / C) pages of C tokens, with
w = 2 K H kv_bytes the KV of one token in one layer and l = K H landmark_bytes a landmark:

    dense rollout        w (n + 1)                          in each of the L layers
    sparse rollout       w (n + 1)                          in the first num_dense_layers
                         w C min(p, 3)                      reserved pages   } in each of the
                         w C (min(p, k(n) + 3) - min(p, 3)) selected pages   } other layers
                         l p                                landmarks        }

    weights              weight_bytes x (all but the embedding table, of which a row is read)

k(n) is the schedule's. Weights are counted as read once, whatever the batch; activations, page
tables and what kernels read twice are left out: the result is what bytes allow, a bound. The
paper's own model is in common/cost/eflops.py. Source: arXiv 2606.08446, sections 2 and 5.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from common.cost.chips import Chip
from common.cost.lengths import Lengths
from common.errors import UserError
from common.model.geometry import Geometry, layer_shapes, param_shapes
from common.rollout.page_pool import pages_for
from common.schedule.schedule import DENSE, NUM_RESERVED, Schedule

MEMORY_SHARE = 0.8
"""Of a chip's memory for weights and cache; the rest is activations, graphs, fragments."""
LANDMARK_BYTES = 2
"""At least: the mean key of a float8 page is kept in bfloat16."""


def token_bytes(g: Geometry, kv_bytes: int = 2) -> int:
    """Keys and values of one token in all layers."""
    return g.num_layers * 2 * g.num_kv_heads * g.head_dim * kv_bytes


def landmark_bytes(g: Geometry, kv_bytes: int = 2) -> int:
    """Landmarks of one page in one layer."""
    return g.num_kv_heads * g.head_dim * max(kv_bytes, LANDMARK_BYTES)


def layer_weights(g: Geometry) -> int:
    """Numbers in the matrices of all layers: what a token is multiplied with, without the head."""
    return sum(math.prod(s) for name, s in layer_shapes(g).items() if "norm" not in name)


def step_weights(g: Geometry) -> int:
    """Numbers that a step reads: the layers' matrices and the head (tied or not)."""
    return layer_weights(g) + g.vocab_size * g.hidden_size


def num_parameters(g: Geometry) -> int:
    """All numbers that are kept in memory."""
    return sum(math.prod(shape) for shape in param_shapes(g).values())


def row_terms(
    geometry: Geometry,
    schedule: Schedule | None,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
) -> dict[str, np.ndarray]:
    """Bytes that one decode step reads of each row, by term; see the module's formulas.

    lengths: integers >= 0 of any shape, cached tokens of a row. schedule None = dense: then
    kv_sparse_layers is all KV of the layers that a schedule would thin out. Each term has the shape
    of lengths; float64. ValueError for other lengths.
    """
    lengths = np.asarray(lengths)
    if lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
        raise ValueError(f"{lengths.dtype=}: expected integer lengths, none below 0")
    first = min(num_dense_layers, geometry.num_layers)
    rest = geometry.num_layers - first
    token = token_bytes(geometry, kv_bytes) / geometry.num_layers
    seen = lengths.astype(np.float64) + 1
    terms = {"kv_dense_layers": first * token * seen}
    if schedule is None or schedule.is_dense:
        zero = np.zeros_like(seen)
        return terms | {
            "kv_sparse_layers": rest * token * seen, "reserved_pages": zero, "landmarks": zero
        }  # fmt: skip
    pages = np.ceil(seen / schedule.page_size)
    read = np.minimum(pages, schedule.budgets_at(lengths) + float(NUM_RESERVED))
    reserved = np.minimum(pages, NUM_RESERVED)
    page = schedule.page_size * token
    return terms | {
        "kv_sparse_layers": rest * page * (read - reserved),
        "reserved_pages": rest * page * reserved,
        "landmarks": rest * landmark_bytes(geometry, kv_bytes) * pages,
    }


def row_bytes(
    geometry: Geometry,
    schedule: Schedule | None,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
) -> np.ndarray:
    """KV and landmarks that one decode step reads of each row, in bytes; shape of lengths."""
    options = {"num_dense_layers": num_dense_layers, "kv_bytes": kv_bytes}
    return np.sum([*row_terms(geometry, schedule, lengths, **options).values()], axis=0)


def step_bytes(
    geometry: Geometry,
    schedule: Schedule | None,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
    weight_bytes: int = 2,
) -> dict[str, float]:
    """Terms, in bytes, of one decode step over rows of these cached lengths; they sum to the step.

    weights, kv_dense_layers, kv_sparse_layers, reserved_pages, landmarks: see the module.
    """
    options = {"num_dense_layers": num_dense_layers, "kv_bytes": kv_bytes}
    terms = row_terms(geometry, schedule, lengths, **options)
    weights = float(weight_bytes * step_weights(geometry))
    return {"weights": weights} | {name: float(x.sum()) for name, x in terms.items()}


def decode_speedup(
    geometry: Geometry,
    schedule: Schedule,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
    weight_bytes: int = 2,
) -> float:
    """Bytes of a dense step over those of a sparse step, the same rows in both."""
    options = {
        "num_dense_layers": num_dense_layers, "kv_bytes": kv_bytes, "weight_bytes": weight_bytes
    }  # fmt: skip
    dense = step_bytes(geometry, None, lengths, **options)
    sparse = step_bytes(geometry, schedule, lengths, **options)
    return sum(dense.values()) / sum(sparse.values())


def same_tokens(schedule: Schedule, page_size: int) -> Schedule:
    """The schedule that selects as many tokens in pages of another size, rounded up.

        k' = ceil(k C / C')

    The three reserved pages come on top in either size: larger pages read more of them.
    """
    if page_size == schedule.page_size:
        return schedule
    budgets = [
        k if k == DENSE else pages_for(k * schedule.page_size, page_size) for k in schedule.budgets
    ]
    return dataclasses.replace(schedule, page_size=page_size, budgets=tuple(budgets), provenance={})


def whole_step_speedup(rollout_speedup: float, train_share: float) -> float:
    """Of an RL step of which a dense rollout takes all but train_share (Amdahl's law).

        1 / (train_share + (1 - train_share) / rollout_speedup)

    arXiv 2606.08446 measured 2.21x and 1.97x at 1.7B, so train_share was 0.10.
    """
    return 1 / (train_share + (1 - train_share) / rollout_speedup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a prediction is about, besides model, schedule and lengths.

    samples: of one prompt, which is prefilled once and whose full pages are shared. reserve: a row
    takes the pages of the longest response when it is admitted (our engines), else as it grows
    (vLLM). batch: rows decoded at once; 0 = as many as fit.
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
    """Memory left for the cache: memory_share x the chip's, less all weights."""
    return setting.memory_share * setting.chip.memory_bytes - setting.weight_bytes * num_parameters(
        g
    )


def row_memory(g: Geometry, lengths: Lengths, page_size: int, setting: Setting) -> float:
    """Mean cache of a row in flight: pages of KV and landmarks, in all layers.

    Of the prompt's full pages a row holds its share, 1 / samples.
    """
    page = page_size * token_bytes(g, setting.kv_bytes)
    page += g.num_layers * landmark_bytes(g, setting.kv_bytes)
    cached = lengths.cached[-1:] if setting.reserve else lengths.cached
    weights = lengths.weights[-1:] if setting.reserve else lengths.weights
    pages = np.average(pages_for(cached + 1, page_size), weights=weights)
    shared = (1 - 1 / setting.samples) * (lengths.prompt // page_size)
    return float(page * (pages - shared))


def batch_that_fits(g: Geometry, lengths: Lengths, page_size: int, setting: Setting) -> int:
    """Rows decoded at once; UserError if not even one fits, or setting.batch does not."""
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
    """Seconds of a decode step by term, and tokens a second, at the chip's peaks.

        weights     max(bytes / bandwidth, 2 numbers batch / FLOP/s)
        KV          bytes x max(1 / bandwidth, 2 (N / K) / kv_bytes / FLOP/s)
        landmarks   bytes / bandwidth
        prefill     batch / (mean response x samples) prompts a step, each
                    (2 P_layers L_in + 2 L N H L_in^2) / FLOP/s

    Rows are in flight at all the lengths that `lengths` weighs: slots are refilled as rows end.
    Returns {"seconds": {term: s}, "bytes": {term: bytes}, "step_seconds", "tokens_per_second"}.
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
