"""Samples one token per row with the portable noise, and gives its log-prob."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from common.rollout import noise


def sample(
    logits_BV, key_B, position_B, temperature, top_p, *, greedy: bool, nucleus: bool
) -> tuple[jax.Array, jax.Array]:
    """Token ids int32 [B] and their log-probs float32 [B] under the distribution sampled from.

    token = argmax_v logits_v / temperature - log(-log u_v) (Gumbel-max), where u is a pure function
    of the row's key and the position. nucleus keeps the smallest set of tokens that has at least
    the probability top_p (ties: the lower id) and renormalizes, also for the log-prob. greedy takes
    the argmax, with its log-prob at temperature 1. The flags are static; the numbers are not.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if not greedy:
        logits_BV = logits_BV / temperature
    if nucleus and not greedy:
        logits_BV = nucleus_only(logits_BV, top_p)
    logp_BV = jax.nn.log_softmax(logits_BV)
    score_BV = logp_BV
    if not greedy:
        arange_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)
        bits_BV = noise.token_bits(key_B, position_B.astype(jnp.uint32), arange_V)
        score_BV = logp_BV - jnp.log(-jnp.log(noise.uniform(bits_BV)))
    token_B = jnp.argmax(score_BV, -1).astype(jnp.int32)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], -1)[:, 0]


def nucleus_only(logits_BV, top_p) -> jax.Array:
    """The logits, with -inf for the tokens that top-p drops."""
    return jnp.where(_nucleus(logits_BV, top_p), logits_BV, -jnp.inf)


def _nucleus(logits_BV, top_p) -> jax.Array:
    """Mask [B, V] of the tokens that have less than top_p of probability strictly before them."""
    order = jnp.argsort(-logits_BV, -1, stable=True)
    ranked = jnp.take_along_axis(jax.nn.softmax(logits_BV), order, -1)
    kept = jnp.cumsum(ranked, -1) - ranked < top_p
    rank = jnp.argsort(order, -1, stable=True)
    return jnp.take_along_axis(kept, rank, -1)
