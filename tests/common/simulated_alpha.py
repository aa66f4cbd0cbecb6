"""Processes that the controller is tried on: alpha of rows whose true 5th percentile is prescribed.

A share HARD of the tokens has alpha ~ Beta(a, 1), the others 1, so that the share under t is
HARD t^a, and a percentile of p5 needs a = log(0.05 / HARD) / log(p5). The share of hard tokens
differs from sequence to sequence (gamma, coefficient of variation SPREAD): tokens of one sequence
depend on each other.
"""

import numpy as np

from common.config import Config, MismatchConfig, RolloutConfig
from common.mismatch.controller import Controller
from common.schedule.schedule import DENSE, Schedule

HARD, SPREAD = 0.25, 0.3
TAU, MARGIN, WIDTH = 0.86, 0.02, 64
BUDGETS = (4, 8, 12, 16, 24, 32)


def config_of(num_bins=4, **mismatch):
    context = num_bins * WIDTH
    settings = {"tau": TAU, "bin_tokens": WIDTH, "budgets": BUDGETS, "controller": True}
    settings |= {"controller_margin": MARGIN, "min_tokens": 100}
    return Config(
        rollout=RolloutConfig(
            max_prompt_tokens=WIDTH, max_response_tokens=context - WIDTH, schedule="k=16"
        ),
        mismatch=MismatchConfig(**{**settings, **mismatch}),
    )


def start_of(*budgets):
    return Schedule(page_size=16, bin_tokens=WIDTH, budgets=budgets, name="start")


def p5_of(k, difficulty=1.0):
    """True percentile at budget k: 0.65 at 4, 0.77 at 8, 0.82, 0.85, 0.88, 0.90 at 32; dense 1."""
    return 1.0 if k >= DENSE else max(1 - difficulty * 0.35 * (4 / k) ** 0.6, 0.05)


def draw(p5, rng, rows=8, tokens=WIDTH):
    """alpha [rows, tokens]; p5 = 1 gives 1 everywhere."""
    hard = HARD * rng.gamma(1 / SPREAD**2, SPREAD**2, (rows, 1))
    a = np.log(0.05 / HARD) / np.log(min(p5, 1 - 1e-9))
    alpha = rng.random((rows, tokens)) ** (1 / a)
    return np.where(rng.random((rows, tokens)) < hard, alpha, 1.0)


def simulate(truth, *, steps, seed=0, num_bins=4, start=(16,), rows=8, between=None, **mismatch):
    """Budgets and true percentiles of every step, both [steps, bins], and the controller.

    truth(k, bin, step) -> true percentile. between(controller) -> the controller to go on with.
    """
    controller = Controller(config_of(num_bins, **mismatch), start_of(*start))
    rng = np.random.default_rng(seed)
    budgets, truths = [], []
    for step in range(steps):
        now = controller.schedule.budgets
        true = [truth(k, b, step) for b, k in enumerate(now)]
        alpha = np.concatenate([draw(p, rng, rows) for p in true], 1)
        show(controller, alpha)
        budgets.append(now)
        truths.append(true)
        if between:
            controller = between(controller)
    return np.array(budgets), np.array(truths), controller


def show(controller, alpha, mask=None):
    """An update by alpha of queries: each row is of another prompt, its token 0 has no query."""
    mask = np.ones(alpha.shape, bool) if mask is None else mask
    alpha, mask = (np.pad(x, ((0, 0), (1, 0))) for x in (alpha, mask))
    return controller.update(alpha, mask, np.arange(len(alpha)))


def num_changes(budgets):
    """Changes of a budget from step to step, by bin."""
    return (np.diff(budgets, axis=0) != 0).sum(0)
