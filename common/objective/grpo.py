"""GRPO: advantages of a group, and the policy loss with its gradient as a float64 oracle.

arXiv 2606.08446, section on the RL recipe (GRPO, clip-higher, token-level TIS); baselines: GRPO
(arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), ReMax (2310.10505).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from common.config import GrpoConfig

STD_EPS = 1e-6
LOG_RATIO_LIMIT = 20.0
"""Log-ratio past which the losses follow the tangent of exp: 5e8, still finite when squared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """advantage_B: float32 [B], never NaN. use_B: bool [B], False = not in loss or denominator.

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

    A NaN reward is missing: the row is not used and is left out of mean and std. Groups with no or
    one valid reward, or with all rewards equal, get exactly 0 (for `greedy` only if divides_by_std,
    which needs a spread). overlong, for rows with finished_B False: `keep` their reward, `mask` (as
    if the reward were missing), `zero` (reward 0 instead).
    Raises ValueError for unequal lengths, infinite rewards, an absent greedy_reward_B / finished_B.
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


def _check_rows(rewards_B, group_B, config, greedy_reward_B, finished_B):
    """finished_B and greedy_B as full arrays; ValueError if one that is needed is absent."""
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


class PolicyLoss(NamedTuple):
    """Sums over the unmasked tokens; the token-mean loss of a minibatch is loss_sum / num_tokens.

    Other aggregations scale each token and divide by another number (common/objective/batching.py).
    """

    loss_sum: float
    num_tokens: float
    num_clipped_low: int
    num_clipped_high: int
    num_clipped_dual: int
    kl_sum: float

    @property
    def clip_fraction(self) -> float:
        clipped = self.num_clipped_low + self.num_clipped_high + self.num_clipped_dual
        return clipped / max(self.num_tokens, 1.0)


def policy_loss(
    logp_BT: np.ndarray,
    logp_old_BT: np.ndarray,
    advantage_BT: np.ndarray,
    weight_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    dual_clip: float = 0.0,
    logp_ref_BT: np.ndarray | None = None,
    scale_BT: np.ndarray | float = 1.0,
) -> PolicyLoss:
    """Float64 oracle of the objective (arXiv 2606.08446, RL recipe), as a loss to minimise.

        rho      = e(logp - logp_old),          e(x) = exp(x), for x > 20 its tangent at 20
        gain     = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
                   and, where A < 0 and dual_clip = c > 1, at least c A          (arXiv 1912.09729)
        loss_sum = sum_t scale_t (- w_t gain_t + kl_coef k3_t)
        k3       = e(logp_ref - logp) - (logp_ref - logp) - 1           (estimates KL(theta || ref))

    The importance weight w (sparse to dense, a constant) belongs to the policy term alone: a token
    that a correction drops still feels the KL term. num_tokens counts every unmasked token,
    dropped or not. A token is clipped where the min takes the clipped branch (A > 0 above,
    A < 0 below), or where dual_clip holds it. advantage and scale broadcast from [B, 1]. The
    tangent keeps every value and gradient finite in float32, where exp overflows at 88.7. Raises
    ValueError if kl_coef > 0 without logp_ref_BT.
    """
    rho, _, low, high, dual, advantage, mask = _ratio_terms(
        logp_BT, logp_old_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip
    )
    weight = np.where(mask, np.asarray(weight_BT, np.float64), 0.0)
    gain = np.minimum(rho * advantage, np.clip(rho, 1 - clip_low, 1 + clip_high) * advantage)
    gain = np.where(dual, dual_clip * advantage, gain)
    k3 = _k3(logp_BT, logp_ref_BT, mask, kl_coef)
    loss = np.asarray(scale_BT, np.float64) * (kl_coef * k3 - weight * gain)
    return PolicyLoss(
        loss_sum=float(loss.sum()),
        num_tokens=float(mask.sum()),
        num_clipped_low=int(low.sum()),
        num_clipped_high=int(high.sum()),
        num_clipped_dual=int(dual.sum()),
        kl_sum=float(k3.sum()),
    )


def policy_loss_grad(
    logp_BT: np.ndarray,
    logp_old_BT: np.ndarray,
    advantage_BT: np.ndarray,
    weight_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    dual_clip: float = 0.0,
    logp_ref_BT: np.ndarray | None = None,
    scale_BT: np.ndarray | float = 1.0,
) -> np.ndarray:
    """d loss_sum / d logp, float64 [B, T].

    scale (-w rho' A [not clipped] + kl_coef (1 - e'(logp_ref - logp))),  0 outside the mask;
    rho' = e'(logp - logp_old), e'(x) = exp(min(x, 20))
    """
    _, slope, low, high, dual, advantage, mask = _ratio_terms(
        logp_BT, logp_old_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip
    )
    weight = np.where(mask, np.asarray(weight_BT, np.float64), 0.0)
    grad = -weight * np.where(low | high | dual, 0.0, slope * advantage)
    if kl_coef:
        _k3(logp_BT, logp_ref_BT, mask, kl_coef)
        log_ref_ratio = np.where(mask, np.float64(logp_ref_BT) - np.float64(logp_BT), 0.0)
        grad = grad - kl_coef * np.expm1(np.minimum(log_ref_ratio, LOG_RATIO_LIMIT))
    return np.asarray(scale_BT, np.float64) * grad


def _ratio_terms(logp_BT, logp_old_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip):
    """rho and its derivative, where it is clipped low, high and by dual_clip, A, mask."""
    mask = np.asarray(mask_BT, bool)
    log_ratio = np.where(mask, np.float64(logp_BT) - np.float64(logp_old_BT), 0.0)
    advantage = np.where(mask, np.asarray(advantage_BT, np.float64), 0.0)
    slope = np.exp(np.minimum(log_ratio, LOG_RATIO_LIMIT))
    rho = slope * (1 + np.maximum(log_ratio - LOG_RATIO_LIMIT, 0.0))
    clipped_low = (advantage < 0) & (rho < 1 - clip_low)
    clipped_high = (advantage > 0) & (rho > 1 + clip_high)
    clipped_dual = (advantage < 0) & (rho > dual_clip) & (dual_clip > 0)
    return rho, slope, clipped_low, clipped_high, clipped_dual, advantage, mask


def _k3(logp_BT, logp_ref_BT, mask, kl_coef) -> np.ndarray:
    if logp_ref_BT is None:
        if kl_coef:
            raise ValueError(
                f"{kl_coef=} without logp_ref_BT: expected log-probs of the reference policy"
            )
        return np.zeros(mask.shape)
    d = np.where(mask, np.float64(logp_ref_BT) - np.float64(logp_BT), 0.0)
    past = np.exp(LOG_RATIO_LIMIT) * np.maximum(d - LOG_RATIO_LIMIT, 0.0)
    return np.expm1(np.minimum(d, LOG_RATIO_LIMIT)) + past - d
