"""GRPO: advantages of a group of samples of one prompt.

arXiv 2606.08446, section on the RL recipe (GRPO, clip-higher, token-level TIS); baselines: GRPO
(arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), ReMax (2310.10505).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.config import GrpoConfig

STD_EPS = 1e-6
LOG_RATIO_LIMIT = 20.0
"""Log ratio above which the losses follow the tangent of exp; exp(20) = 5e8 is finite squared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of the rows of a rollout.

    advantage_B: float32 [B], never NaN. use_B: bool [B], False = in neither loss nor denominator.
    A row of a group without signal has advantage 0 and use_B True: its tokens count in the
    token-mean, as in the paper's loss.
    """

    advantage_B: np.ndarray
    use_B: np.ndarray


def advantages(
    rewards_B: np.ndarray,
    group_B: np.ndarray,
    *,
    config: GrpoConfig,
    greedy_reward_B: np.ndarray | None = None,
    finished_B: np.ndarray | None = None,
) -> Advantages:
    """Advantage of each row from the rewards of its group.

        group_mean      A_i = r_i - mean(r)              mean over the valid rows of the group
        leave_one_out   A_i = r_i - mean(r without r_i)  = (r_i - mean(r)) n / (n - 1)
        greedy          A_i = r_i - greedy_reward_i      (ReMax; no group is needed)
        divides_by_std  A_i / (std(r) + 1e-6)            std with n - 1; group_mean alone unless
                                                         normalize_std says otherwise

    A NaN reward is missing: the row is not used and is left out of mean and std. A group with no or
    one valid reward, or with all rewards equal, gets exactly 0 (with `greedy` only if
    divides_by_std, which needs a spread). overlong says what happens to rows with finished_B False:
    `keep` their reward, `mask` them as if it were missing, or `zero` it.
    Raises ValueError for unequal lengths, infinite rewards, and where greedy_reward_B or finished_B
    is needed and absent.
    """
    rewards_B = np.array(rewards_B, np.float64)
    finished_B, greedy_B = _check_rows(rewards_B, group_B, config, greedy_reward_B, finished_B)
    if config.overlong == "mask":
        rewards_B[~finished_B] = np.nan
    elif config.overlong == "zero":
        rewards_B[~finished_B & ~np.isnan(rewards_B)] = 0.0
    if config.baseline == "greedy":
        rewards_B[np.isnan(greedy_B)] = np.nan
    use_B = ~np.isnan(rewards_B)
    advantage_B = np.zeros(len(rewards_B))
    group_ids, index_B = np.unique(np.asarray(group_B), return_inverse=True)
    for g in range(len(group_ids)):
        rows = np.flatnonzero((index_B == g) & use_B)
        advantage_B[rows] = _group_advantage(rewards_B[rows], greedy_B[rows], config)
    return Advantages(advantage_B=advantage_B.astype(np.float32), use_B=use_B)


def _check_rows(
    rewards_B: np.ndarray,
    group_B: np.ndarray,
    config: GrpoConfig,
    greedy_reward_B: np.ndarray | None,
    finished_B: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(finished_B, greedy_reward_B) as arrays [B]; ValueError as `advantages` describes."""
    num_rows = len(rewards_B)
    if np.isinf(rewards_B).any():
        raise ValueError(
            f"rewards_B has {np.isinf(rewards_B).sum()} infinite values: expected finite or NaN"
        )
    if config.baseline == "greedy" and greedy_reward_B is None:
        raise ValueError(
            "greedy_reward_B=None: baseline 'greedy' needs the reward of a greedy response per row"
        )
    if config.overlong != "keep" and finished_B is None:
        raise ValueError(
            f"finished_B=None: overlong={config.overlong!r} needs to know which rows were cut"
        )
    finished_B = np.ones(num_rows, bool) if finished_B is None else np.asarray(finished_B, bool)
    greedy_B = (
        np.zeros(num_rows) if greedy_reward_B is None else np.asarray(greedy_reward_B, np.float64)
    )
    for name, value in (
        ("group_B", group_B),
        ("finished_B", finished_B),
        ("greedy_reward_B", greedy_B),
    ):
        if len(value) != num_rows:
            raise ValueError(f"len({name})={len(value)}: expected {num_rows}, one per reward")
    return finished_B, greedy_B


def _group_advantage(rewards: np.ndarray, greedy: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """Advantages of the valid rows of one group."""
    n = len(rewards)
    spread = n >= 2 and rewards.max() > rewards.min()
    if config.baseline == "greedy" and not config.divides_by_std:
        return rewards - greedy
    if not spread:
        return np.zeros(n)
    if config.baseline == "greedy":
        advantage = rewards - greedy
    else:
        advantage = rewards - rewards.mean()
        if config.baseline == "leave_one_out":
            advantage = advantage * n / (n - 1)
    return advantage / (rewards.std(ddof=1) + STD_EPS) if config.divides_by_std else advantage
