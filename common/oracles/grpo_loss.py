"""The clipped and corrected policy loss of GRPO with its gradient, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.objective.grpo import LOG_RATIO_LIMIT


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
    """Returns the loss of the objective in arXiv 2606.08446 (RL recipe), which is minimised.

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
    """Returns d loss_sum / d logp, float64 [B, T].

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


def _ratio_terms(
    logp_BT, logp_old_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip
) -> tuple[np.ndarray, ...]:
    """Returns rho, its derivative, what is clipped low, high and by dual_clip, A, and the mask."""
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
