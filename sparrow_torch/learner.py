"""The GRPO loss, its gradients and AdamW in torch, for cross-checks against the learner in Flax.

The functions are those of sparrow_jax/learner.py, with the formula in its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from common.config import LearnerConfig
from common.objective.grpo import LOG_RATIO_LIMIT
from common.types import MicroBatch
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import token_logprobs


def tangent_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x), continued above LOG_RATIO_LIMIT by its tangent, so that nothing overflows."""
    return x.clamp(max=LOG_RATIO_LIMIT).exp() * (1.0 + (x - LOG_RATIO_LIMIT).clamp(min=0.0))


def k3_estimate(delta: torch.Tensor) -> torch.Tensor:
    """e(delta) - delta - 1 with e = tangent_exp; never negative.

    Near 0 it is computed by a series, because the difference could round to a negative number.
    """
    d = delta.clamp(-0.1, 0.1)
    near = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    past = (delta - LOG_RATIO_LIMIT).clamp(min=0.0) * math.exp(LOG_RATIO_LIMIT)
    far = delta.clamp(max=LOG_RATIO_LIMIT).expm1() + past - delta
    return torch.where(delta.abs() < 0.1, near, far)


def policy_loss_sum(
    logp_BT, batch: Mapping[str, torch.Tensor], clip_low, clip_high, kl_coef, dual_clip, fresh: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of a micro-batch, and sums for the log.

    fresh: the weights are those that scored the rollout, so the ratio to them is exactly 1.
    """
    mask, A = batch["loss_mask_BT"], batch["advantage_BT"]
    old = logp_BT.detach() if fresh else batch["logp_old_BT"]
    rho = tangent_exp(torch.where(mask, logp_BT - old, 0.0))
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    is_dual = (A < 0) & (rho > dual_clip) if dual_clip > 0 else torch.zeros_like(mask)
    gain = torch.where(is_dual, dual_clip * A, torch.minimum(rho * A, clipped * A))
    k3 = k3_estimate(torch.where(mask, batch["logp_ref_BT"] - logp_BT, 0.0))
    objective = batch["scale_BT"] * (batch["weight_BT"] * gain - kl_coef * k3)
    loss = -torch.where(mask, objective, 0.0).sum()
    sums = {
        "loss": loss,
        "clipped_T": (mask & (is_dual | (clipped * A < rho * A))).sum(0),
        "k3": torch.where(mask, k3, 0.0).sum(),
    }
    return loss, sums


def accumulate_gradient(
    model: Decoder, batch: MicroBatch, numbers, fresh: bool, temperature: float, *, remat=False
) -> dict[str, torch.Tensor]:
    """Add the gradient of a micro-batch's summed loss to each parameter's .grad.

    Returns the sums of policy_loss_sum. numbers: GrpoConfig.loss_numbers.
    """
    device = model.embed_VD.device
    arrays = {name: torch.as_tensor(x, device=device) for name, x in vars(batch).items()}
    tokens_BT = arrays["tokens_BT"].long()
    logp_BT, _ = token_logprobs(model, tokens_BT, temperature, remat=remat)
    loss, sums = policy_loss_sum(logp_BT, arrays, *numbers, fresh)
    loss.backward()
    return {name: x.detach() for name, x in sums.items()}


def make_optimizer(
    c: LearnerConfig, parameters: Iterable[torch.nn.Parameter]
) -> Callable[[float], float]:
    """AdamW with linear warm-up after clipping by global norm: that of sparrow_jax, in torch.

        g    = .grad / denominator;   g *= min(1, max_grad_norm / ||g||)
        rate = learning_rate * min((1 + n (warmup_steps - 1) / warmup_steps) / warmup_steps, 1)
        w   -= rate * (m_hat / (sqrt(v_hat) + 1e-8) + weight_decay w)        at step n = 0, 1, ...

    Returns step(denominator), which takes one such step from the summed gradients in .grad, clears
    them, and returns the norm of the gradient before clipping.
    """
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        parameters, c.learning_rate, (c.beta1, c.beta2), weight_decay=c.weight_decay
    )
    warmup = max(c.warmup_steps, 1)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup)

    def step(denominator: float) -> float:
        grads = [x.grad for x in parameters if x.grad is not None]
        torch._foreach_div_(grads, denominator)
        norm = float(torch.nn.utils.get_total_norm(grads))
        if norm > c.max_grad_norm:
            torch._foreach_mul_(grads, c.max_grad_norm / norm)
        optimizer.step()
        ramp.step()
        optimizer.zero_grad()
        return norm

    return step
