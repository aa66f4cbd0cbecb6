"""The GRPO loss and its gradients in torch: for cross-checks, the learner itself is Flax.

The same function as sparrow_jax/learner.py; its docstring has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.types import MicroBatch
from sparrow_torch.model import Decoder
from sparrow_torch.scorer import token_logprobs


def policy_loss_sum(
    logp_BT, batch: Mapping[str, torch.Tensor], clip_low, clip_high, kl_coef, fresh: bool
):
    """Summed loss of a micro-batch and sums for the log; `fresh` = first minibatch of a rollout."""
    mask, A = batch["loss_mask_BT"], batch["advantage_BT"]
    old = logp_BT.detach() if fresh else batch["logp_old_BT"]
    rho = torch.where(mask, logp_BT - old, 0.0).exp()
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    objective = batch["weight_BT"] * torch.minimum(rho * A, clipped * A)
    delta = torch.where(mask, batch["logp_ref_BT"] - logp_BT, 0.0)
    k3 = delta.exp() - delta - 1
    loss = -torch.where(mask, objective - kl_coef * k3, 0.0).sum()
    sums = {
        "loss": loss,
        "clipped_T": (mask & (clipped * A < rho * A)).sum(0),
        "k3": torch.where(mask, k3, 0.0).sum(),
    }
    return loss, sums


def accumulate_gradient(
    model: Decoder, batch: MicroBatch, numbers, fresh: bool, temperature: float, *, remat=False
):
    """Add the gradient of one micro-batch's summed loss to each parameter's .grad; the sums.

    numbers: (clip_low, clip_high, kl_coef).
    """
    device = model.embed_VD.device
    arrays = {name: torch.as_tensor(x, device=device) for name, x in vars(batch).items()}
    tokens_BT = arrays["tokens_BT"].long()
    logp_BT, _ = token_logprobs(model, tokens_BT, temperature, remat=remat)
    loss, sums = policy_loss_sum(logp_BT, arrays, *numbers, fresh)
    loss.backward()
    return {name: x.detach() for name, x in sums.items()}
