"""The lookup position -> budget: the host's, JAX's and torch's, on hand-worked numbers."""

import jax
import numpy as np
import pytest
import torch

from common.rollout.budgets import plan_budgets
from common.schedule import schedule
from common.schedule.schedule import DENSE, Schedule
from sparrow_jax import decode as in_jax
from sparrow_torch import decode as in_torch

WIDTH = 50  # pages of a sequence


def on_the_host(positions, budgets, bin_tokens):
    return schedule.budget_at(positions, budgets, bin_tokens)


def in_a_jax_program(positions, budgets, bin_tokens):
    return np.asarray(jax.jit(in_jax.budget_at)(positions, budgets, np.int32(bin_tokens)))


def in_a_torch_step(positions, budgets, bin_tokens):
    tensors = torch.from_numpy(positions), torch.from_numpy(budgets)
    return in_torch.budget_at(*tensors, bin_tokens).numpy()


@pytest.mark.parametrize("lookup", [on_the_host, in_a_jax_program, in_a_torch_step])
def test_bins_of_64_tokens_by_hand(lookup):
    """Positions 0 to 63 read 4 pages, 64 to 127 read 8, from 128 on every page.

    The decode programs see the budgets as plan_budgets prepares them: cut to the 50 pages that a
    sequence can have, the last one repeated, so that a budget holds beyond the end of its bin.
    """
    positions = np.array([0, 1, 63, 64, 127, 128, 191, 192, 64 * 32, 10**9], np.int32)
    plan = plan_budgets(Schedule(page_size=16, bin_tokens=64, budgets=(4, 8, DENSE)), WIDTH)
    found = lookup(positions, plan.budgets, plan.bin_tokens)
    assert found.tolist() == [4, 4, 4, 8, 8, 50, 50, 50, 50, 50]
    assert found.dtype == np.int32
    found = lookup(positions, np.array([4, 8, DENSE], np.int32), 64)  # without the preparation
    assert found.tolist() == [4, 4, 4, 8, 8, *[DENSE] * 5]


@pytest.mark.parametrize("lookup", [on_the_host, in_a_jax_program, in_a_torch_step])
def test_one_token_bins_and_a_falling_budget_by_hand(lookup):
    positions = np.array([0, 1, 2, 3, 4], np.int32)
    assert lookup(positions, np.array([3, 0, 7], np.int32), 1).tolist() == [3, 0, 7, 7, 7]
    assert lookup(positions, np.array([5], np.int32), 1).tolist() == [5] * 5
