"""A schedule as a decode program takes it: one table of budgets, one width of the page list.

The lookup in that table, budgets[min(position // bin_tokens, last)], runs inside the programs:
`budget_at` in decode.py of sparrow_jax and sparrow_torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.schedule.schedule import NUM_RESERVED, Schedule

BUDGET_BINS = 32
"""The table of budgets is padded to a multiple of this length."""


class BudgetPlan(NamedTuple):
    """A schedule in the form that a decode program takes; see Decoding in device.py."""

    budgets: np.ndarray
    bin_tokens: int
    max_selected: int


def plan_budgets(schedule: Schedule | None, table_width: int) -> BudgetPlan:
    """Budgets by bin, and the width of the list of selected pages; a dense schedule has width 0.

    A width is a compiled program. A schedule has the same width whatever its budgets are, up to its
    `sized_for`; with a dense bin the width is table_width, the number of pages of a sequence.
    """
    if schedule is None or schedule.is_dense:
        return BudgetPlan(budgets=np.zeros(1, np.int32), bin_tokens=1, max_selected=0)
    budgets = np.minimum(np.array(schedule.budgets, np.int32), table_width)
    # The last budget holds beyond its bin, so padding with it gives all schedules one shape.
    budgets = np.pad(budgets, (0, -len(budgets) % BUDGET_BINS), mode="edge")
    wanted = max(int(budgets.max()), schedule.sized_for) + NUM_RESERVED
    width = min(table_width, -(-wanted // 16) * 16)
    return BudgetPlan(budgets=budgets, bin_tokens=schedule.bin_tokens, max_selected=width)
