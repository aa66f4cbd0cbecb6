"""The stage decode of a trace: given tokens run through the paged cache step by step.

Every step is one call of the model's `extend` under the schedule, with the kernels that rollouts
use. The trace holds the log-sum-exp of each head, the pages that each KV head of a sparse layer
read, the gap between the worst chosen and the best other page, and, at some steps, all scores.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from common.rollout.budgets import plan_budgets
from common.rollout.page_pool import pages_for
from common.schedule.schedule import NUM_RESERVED, Schedule

SCORES_EVERY = 16
"""Steps between two records of all page scores; the gap is recorded at every step."""


class Step(NamedTuple):
    """Result of one decode step in all layers (L); pages and scores of the sparse layers only.

    lse_LBN: log-sum-exp. pages_LBKJ: physical pages, 0 = unused. scores_LBKP: of all pages.
    """

    lse_LBN: np.ndarray
    pages_LBKJ: np.ndarray
    scores_LBKP: np.ndarray


class Cache(Protocol):
    """A paged cache of B rows with the pages table_BP, and the programs that extend it."""

    def prefill(self, tokens_BT: np.ndarray, start_B: np.ndarray, num_new_B: np.ndarray) -> None:
        """Dense pass over the next num_new_B tokens of each row."""
        ...

    def step(
        self, token_B: np.ndarray, start_B: np.ndarray, num_new_B: np.ndarray, k_B: np.ndarray
    ) -> Step:
        """Decode step over one token per row; rows with num_new 0 are idle. k_B: their budgets."""
        ...


def tables(rows: int, tokens: int, page: int) -> np.ndarray:
    """Page table int32 [B, P]; row b has the pages from 1 + b P on, and page 0 stays unused."""
    P = pages_for(tokens, page)
    return (1 + np.arange(rows * P, dtype=np.int32)).reshape(rows, P)


def run(
    cache: Cache, tokens_BT: np.ndarray, prompt_len_B: np.ndarray, total_len_B: np.ndarray, *,
    schedule: Schedule, chunk: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Arrays of T decode steps by name; a row that has ended holds NaN, and -1 for pages.

    lse [L, B, T, N], and of the sparse layers: pages int16 [L, B, T, K, J] (logical, rising),
    page_gap [L, B, T, K], page_scores [L, B, T / SCORES_EVERY, K, P].
    """
    C, T = schedule.page_size, tokens_BT.shape[1]
    prompts = int(prompt_len_B.max())
    for start in range(0, prompts, chunk):
        piece = np.zeros((len(tokens_BT), chunk), np.int32)
        part = tokens_BT[:, start : start + chunk]
        piece[:, : part.shape[1]] = part
        count = np.clip(prompt_len_B - start, 0, chunk)
        cache.prefill(piece, np.full(len(piece), start, np.int32), count.astype(np.int32))
    budget_T = np.minimum(schedule.budgets_at(np.arange(T)), pages_for(T, C))
    steps = []
    for r in range(int((total_len_B - prompt_len_B).max())):
        start_B = np.minimum(prompt_len_B + r, T - 1).astype(np.int32)
        active_B = prompt_len_B + r < total_len_B
        k_B = budget_T[start_B].astype(np.int32)
        token_B = tokens_BT[np.arange(len(tokens_BT)), start_B].astype(np.int32)
        step = cache.step(token_B, start_B, active_B.astype(np.int32), k_B)
        steps.append(_facts(step, start_B // C + 1, k_B, active_B))
    lse, pages, gap, scores = (list(x) for x in zip(*steps, strict=True))
    return {
        "lse": np.stack(lse, 2),
        "pages": np.stack(pages, 2).astype(np.int16),
        "page_gap": np.stack(gap, 2),
        "page_scores": np.stack(scores[::SCORES_EVERY], 2),
    }


def _facts(
    step: Step, num_pages_B: np.ndarray, k_B: np.ndarray, active_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(lse, logical pages, gap, scores) of one step, void in rows that have ended.

    Page -1 is unused, page -2 belongs to another row.
    """
    P, J = step.scores_LBKP.shape[-1], step.pages_LBKJ.shape[-1]
    count_B = np.where(active_B, np.minimum(k_B + NUM_RESERVED, num_pages_B), 0)
    used_BJ = np.arange(J) < count_B[:, None]
    logical = step.pages_LBKJ - 1 - P * np.arange(len(active_B))[:, None, None]
    logical = np.where((logical < 0) | (logical >= P), -2, logical)
    pages = np.where(used_BJ[:, None], logical, -1)
    chosen = np.zeros((*pages.shape[:-1], P + 1), bool)
    np.put_along_axis(chosen, np.where(pages < 0, P, pages), True, -1)
    page = np.arange(P)
    candidate_BP = (page >= 1) & (page < num_pages_B[:, None] - 2) & active_B[:, None]
    scores, chosen, candidate = step.scores_LBKP, chosen[..., :P], candidate_BP[:, None]
    worst = np.where(chosen & candidate, scores, np.inf).min(-1)
    best = np.where(~chosen & candidate, scores, -np.inf).max(-1)
    lse = np.where(active_B[:, None], step.lse_LBN, np.nan)
    is_page = (page < num_pages_B[:, None]) & active_B[:, None]
    return lse, pages, worst - best, np.where(is_page[:, None], scores, np.nan)


def plan(schedule: Schedule, table_width: int) -> int:
    """Width of the list of selected pages, the same as in the engine."""
    return plan_budgets(schedule, table_width).max_selected
