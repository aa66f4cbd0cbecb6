"""The paper's cost of one prompt's rollout in eFLOPs: operations, and bytes priced in operations.

N samples of one prompt, P parameters, L_in prompt tokens, L_out response tokens each, D = 2 L K H
numbers of KV per token (keys and values, all layers), r = query heads per KV head, C tokens per
page, I = operations that the chip does while it moves one byte; 2 bytes a number. At response token
t a query sees c(t) = L_in + t + 1/2 tokens, so that sum c = L_in L_out + L_out^2 / 2.

    parameters          2 N P L_out

    dense attention     2 r N D sum c                 = r N D (2 L_in + L_out) L_out
    dense memory        2 I D (L_in L_out + N L_out^2 / 2)          the samples share the prompt

    sparse attention    2 r N D sum_t b(t),   b(t) = min(c(t), k(L_in + t) C)
    sparse memory       2 I N D sum_t b(t)            each sample selects its own pages

    scoring             2 N (D / 2) sum c / C         = N D (2 L_in + L_out) L_out / (2 C)
    scoring memory      2 I (D / 2) (L_in L_out + N L_out^2 / 2) / C
                                                      = I D (L_in L_out + N L_out^2 / 2) / C

With one budget B = k C that no response outgrows, sum b = B L_out: the paper's terms. Scoring is
derived here and is not what the paper prints: it leaves out the page divisor in places, has r in
one of two terms and counts a prompt's landmarks twice. A landmark is the mean of a page's keys,
D / 2 numbers per C tokens in all layers, and is multiplied with the mean query of its group, so r
is no factor. As in the paper, neither the weights read per step nor the two dense layers nor the
reserved pages are counted; common/cost/decode_cost.py has them.

Source: arXiv 2606.08446, section 5, after Kinetics, arXiv 2506.05333.
"""

from __future__ import annotations

import numpy as np

from common.cost.decode_cost import num_parameters, token_bytes
from common.model.geometry import Geometry
from common.schedule.schedule import Schedule


def eflops(
    g: Geometry,
    schedule: Schedule | None,
    *,
    prompt: int,
    response: int,
    samples: int,
    intensity: float,
) -> dict[str, float]:
    """Terms of the module's formulas; schedule None = dense.

    prompt >= 0, response >= 1: tokens; intensity: FLOP per byte (Chip.intensity). Returns
    parameters, attention, attention_memory, scoring, scoring_memory; they sum to the cost.
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


def speedup(
    g: Geometry,
    schedule: Schedule,
    *,
    prompt: int,
    response: int,
    samples: int,
    intensity: float,
) -> float:
    """eFLOPs of a dense rollout over those of a sparse one."""
    options = {
        "prompt": prompt, "response": response, "samples": samples, "intensity": intensity
    }  # fmt: skip
    dense, sparse = (sum(eflops(g, s, **options).values()) for s in (None, schedule))
    return dense / sparse
