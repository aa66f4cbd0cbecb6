"""Samples one token per row with the portable noise, and gives its log-prob."""

from __future__ import annotations

import torch

from common.rollout import noise
from kernels_triton.reference import log_softmax


def sample(
    logits_BV, key_B, position_B, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [B] and their log-probs float32 [B] under the distribution sampled from.

    token = argmax_v logits_v / temperature - log(-log u_v) (Gumbel-max), where u is a pure function
    of the row's key and the position. top_p < 1 keeps the smallest set of tokens that has at
    least the probability top_p (ties: the lower id) and renormalizes, also for the log-prob.
    temperature 0 takes the argmax, with its log-prob at temperature 1.
    """
    logits_BV, greedy = logits_BV.float(), temperature == 0
    if not greedy:
        logits_BV = logits_BV / temperature
    if top_p < 1 and not greedy:
        logits_BV = nucleus_only(logits_BV, top_p)
    logp_BV = log_softmax(logits_BV)
    score_BV = logp_BV
    if not greedy:
        arange_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
        bits_BV = noise.token_bits(key_B, position_B.long(), arange_V)
        score_BV = logp_BV - torch.log(-torch.log(noise.uniform(bits_BV)))
    token_B = score_BV.argmax(-1)
    return token_B, logp_BV.gather(-1, token_B[:, None])[:, 0]


def fused_sample(
    logits_BV, key_B, position_B, temperature: float, top_p: float, *, nucleus=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `sample`, by a Triton kernel that makes noise, argmax and log-prob in one pass.

    The kernel does not subtract the log-sum-exp from its scores, so a token differs from that of
    `sample` where rounding decides between two scores. nucleus: nucleus_only, or a compiled form.
    """
    from kernels_triton.sample_tokens import sample_tokens

    if top_p < 1 and temperature != 0:
        logits_BV = (nucleus or nucleus_only)(logits_BV.float() / temperature, top_p)
        temperature = 1.0
    return sample_tokens(logits_BV, key_B, position_B, temperature)


def nucleus_only(logits_BV, top_p) -> torch.Tensor:
    """The logits, with -inf for the tokens that top-p drops."""
    return torch.where(_nucleus(logits_BV, top_p), logits_BV, -torch.inf)


def _nucleus(logits_BV, top_p) -> torch.Tensor:
    """Mask [B, V] of the tokens that have less than top_p of probability strictly before them."""
    order = torch.argsort(-logits_BV, dim=-1, stable=True)
    ranked = logits_BV.softmax(-1).gather(-1, order)
    kept = ranked.cumsum(-1) - ranked < top_p
    return torch.zeros_like(kept).scatter(-1, order, kept)
