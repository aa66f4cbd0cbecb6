"""Cost of decoding by formula: bytes of one decode step, and eFLOPs of a whole rollout.

**Bytes of a step.** One decode step reads the weights once and, of every row, keys and values (KV)
and landmarks. For a row with n cached tokens, its query sees n + 1 tokens in p = ceil((n + 1) / C)
pages of C tokens. With w = 2 K H kv_bytes, the KV of one token in one layer, and
l = K H landmark_bytes, one landmark in one layer:

    dense rollout        w (n + 1)                          in each of the L layers
    sparse rollout       w (n + 1)                          in the first num_dense_layers
                         w C min(p, 3)                      reserved pages   } in each of the
                         w C (min(p, k(n) + 3) - min(p, 3)) selected pages   } other layers
                         l p                                landmarks        }

    weights              weight_bytes x (all but the embedding table, of which a row is read)

k(n) is the budget of the schedule. Weights count as read once, whatever the batch. Activations,
page tables and what kernels read twice are left out, so the result is a lower bound on the bytes.
Source: arXiv 2606.08446, sections 2 and 5.

**eFLOPs of a rollout**, the paper's own model: operations, and bytes priced in operations. N
samples of one prompt, P parameters, L_in prompt tokens, L_out response tokens each, D = 2 L K H
numbers of KV per token (keys and values, all layers), r query heads per KV head, I operations that
the chip does while it moves one byte, 2 bytes a number. At response token t a query sees
c(t) = L_in + t + 1/2 tokens, so that sum c = L_in L_out + L_out^2 / 2.

    parameters          2 N P L_out

    dense attention     2 r N D sum c                 = r N D (2 L_in + L_out) L_out
    dense memory        2 I D (L_in L_out + N L_out^2 / 2)          the samples share the prompt

    sparse attention    2 r N D sum_t b(t),   b(t) = min(c(t), k(L_in + t) C)
    sparse memory       2 I N D sum_t b(t)            each sample selects its own pages

    scoring             2 N (D / 2) sum c / C         = N D (2 L_in + L_out) L_out / (2 C)
    scoring memory      2 I (D / 2) (L_in L_out + N L_out^2 / 2) / C
                                                      = I D (L_in L_out + N L_out^2 / 2) / C

With one budget B = k C that no response outgrows, sum b = B L_out: the paper's terms. The terms of
scoring are derived here and differ from what the paper prints: the paper leaves out the page
divisor in places, has r in one of two terms and counts the landmarks of a prompt twice. A landmark
is the mean of a page's keys, D / 2 numbers per C tokens in all layers, and is multiplied with the
mean query of its group, so r is no factor. As in the paper, the weights read per step, the two
dense layers and the reserved pages are not counted; the bytes of a step above include them.
Source: arXiv 2606.08446, section 5, after Kinetics, arXiv 2506.05333.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from common.model.geometry import Geometry, layer_shapes, param_shapes
from common.rollout.page_pool import pages_for
from common.schedule.schedule import DENSE, NUM_RESERVED, Schedule

LANDMARK_BYTES = 2
"""Fewest bytes of a number in a landmark: the mean key of a float8 page is kept in bfloat16."""


def token_bytes(g: Geometry, kv_bytes: int = 2) -> int:
    """Returns the bytes of the keys and values of one token in all layers."""
    return g.num_layers * 2 * g.num_kv_heads * g.head_dim * kv_bytes


def landmark_bytes(g: Geometry, kv_bytes: int = 2) -> int:
    """Returns the bytes of the landmarks of one page in one layer."""
    return g.num_kv_heads * g.head_dim * max(kv_bytes, LANDMARK_BYTES)


def layer_weights(g: Geometry) -> int:
    """Returns how many numbers the matrices of all layers hold, without the language-model head."""
    return sum(math.prod(s) for name, s in layer_shapes(g).items() if "norm" not in name)


def step_weights(g: Geometry) -> int:
    """Returns how many weights a step reads: the matrices of all layers and the head."""
    return layer_weights(g) + g.vocab_size * g.hidden_size


def num_parameters(g: Geometry) -> int:
    """Returns how many parameters the model holds in memory."""
    return sum(math.prod(shape) for shape in param_shapes(g).values())


def row_terms(
    geometry: Geometry,
    schedule: Schedule | None,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
) -> dict[str, np.ndarray]:
    """Returns the bytes that one decode step reads of each row, by term of the module's formulas.

    lengths: integers >= 0 of any shape, the number of cached tokens of each row. schedule None
    means dense: kv_sparse_layers is then all KV of the layers that a schedule would make sparse.
    Each term is float64 in the shape of lengths. Raises ValueError for other lengths.
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


def step_bytes(
    geometry: Geometry,
    schedule: Schedule | None,
    lengths: np.ndarray,
    *,
    num_dense_layers: int = 2,
    kv_bytes: int = 2,
    weight_bytes: int = 2,
) -> dict[str, float]:
    """Returns the bytes of one decode step over rows of these cached lengths, by term.

    The terms are weights, kv_dense_layers, kv_sparse_layers, reserved_pages and landmarks, as in
    the formulas of the module; their sum is the whole step.
    """
    options = {"num_dense_layers": num_dense_layers, "kv_bytes": kv_bytes}
    terms = row_terms(geometry, schedule, lengths, **options)
    weights = float(weight_bytes * step_weights(geometry))
    return {"weights": weights} | {name: float(x.sum()) for name, x in terms.items()}


def same_tokens(schedule: Schedule, page_size: int) -> Schedule:
    """Returns the schedule that selects as many tokens in pages of another size, rounded up.

        k' = ceil(k C / C')

    The three reserved pages come on top in either size, so larger pages read more tokens of them.
    """
    if page_size == schedule.page_size:
        return schedule
    budgets = [
        k if k == DENSE else pages_for(k * schedule.page_size, page_size) for k in schedule.budgets
    ]
    return dataclasses.replace(schedule, page_size=page_size, budgets=tuple(budgets), provenance={})


def eflops(
    g: Geometry,
    schedule: Schedule | None,
    *,
    prompt: int,
    response: int,
    samples: int,
    intensity: float,
) -> dict[str, float]:
    """Returns the eFLOPs of one prompt's rollout by term of the module's formulas.

    schedule None means dense. prompt >= 0 and response >= 1 are numbers of tokens; intensity is in
    FLOP per byte (Chip.intensity). The terms are parameters, attention, attention_memory, scoring
    and scoring_memory; their sum is the whole cost.
    """
    D = token_bytes(g, kv_bytes=1)
    r = g.num_heads / g.num_kv_heads
    shared = prompt * response + samples * response**2 / 2
    positions = prompt + np.arange(response)
    seen = positions + 0.5
    terms = {"parameters": 2.0 * samples * num_parameters(g) * response}
    if schedule is None or schedule.is_dense:
        return terms | {
            "attention": 2 * r * samples * D * float(seen.sum()),
            "attention_memory": 2 * intensity * D * shared,
            "scoring": 0.0,
            "scoring_memory": 0.0,
        }
    C = schedule.page_size
    selected = float(np.minimum(seen, schedule.budgets_at(positions) * float(C)).sum())
    return terms | {
        "attention": 2 * r * samples * D * selected,
        "attention_memory": 2 * intensity * samples * D * selected,
        "scoring": samples * D * float(seen.sum()) / C,
        "scoring_memory": intensity * D * shared / C,
    }


def eflops_speedup(
    g: Geometry,
    schedule: Schedule,
    *,
    prompt: int,
    response: int,
    samples: int,
    intensity: float,
) -> float:
    """Returns the eFLOPs of a dense rollout divided by those of a sparse one."""
    options = {
        "prompt": prompt, "response": response, "samples": samples, "intensity": intensity
    }  # fmt: skip
    dense, sparse = (sum(eflops(g, s, **options).values()) for s in (None, schedule))
    return dense / sparse
