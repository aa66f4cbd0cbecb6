"""Draw a token per row with the portable noise, and its log-prob where it was drawn from."""

from __future__ import annotations

import torch

from common.rollout import noise
from kernels_triton.reference import log_softmax


def sample(logits_BV, key_B, position_B, temperature: float, top_p: float):
    """Token ids int64 [B] and log-probs float32 [B].

    token = argmax_v logits_v / temperature - log(-log u_v), with u a pure function of the row's key
    and the position. top_p < 1 keeps the smallest set of tokens with probability >= top_p (ties by
    lower id) and renormalises; the log-prob is that of the renormalised distribution. temperature 0
    takes the argmax, its log-prob is at temperature 1.
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


def fused_sample(logits_BV, key_B, position_B, temperature: float, top_p: float, *, nucleus=None):
    """The same by a Triton kernel that makes noise, argmax and log-prob in one pass.

    The kernel's scores do not subtract the log-sum-exp: tokens are those of `sample` unless two
    scores are within a rounding of each other. nucleus: nucleus_only, or a compiled form of it.
    """
    from kernels_triton.sample_tokens import sample_tokens

    if top_p < 1 and temperature != 0:
        logits_BV = (nucleus or nucleus_only)(logits_BV.float() / temperature, top_p)
        temperature = 1.0
    return sample_tokens(logits_BV, key_B, position_B, temperature)


def nucleus_only(logits_BV, top_p):
    """-inf for the tokens that top-p drops."""
    return torch.where(_nucleus(logits_BV, top_p), logits_BV, -torch.inf)


def _nucleus(logits_BV, top_p):
    """Tokens kept by top-p: those with less than top_p of probability strictly ahead of them."""
    order = torch.argsort(-logits_BV, dim=-1, stable=True)
    ranked = logits_BV.softmax(-1).gather(-1, order)
    kept = ranked.cumsum(-1) - ranked < top_p
    return torch.zeros_like(kept).scatter(-1, order, kept)
