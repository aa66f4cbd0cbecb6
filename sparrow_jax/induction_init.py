"""A structured start for tiny from-scratch policies: a rough induction circuit in layers 0 and 1.

A small transformer finds look-up ("after this key, what followed it before?") only after long
training, and on some seeds not at all. This start draws the two heads that implement it, roughly,
so that warm-up on a CPU takes a minute. What is drawn is far from a solution: the rest of the
network is random, and training has to turn the sketch into look-ups.

    layer 0, KV head 0: attends to the previous token (a RoPE phase of one position on the fastest
        pairs, keyed by the direction all embeddings share) and copies it: content A -> subspace B
    layer 1, KV head 0: query reads A of its own token, key reads B (= the token before), both
        through one random map on the slow RoPE pairs; the value is copied to the output
A and B are orthogonal to each other and to the shared direction. All else is scaled down.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from common.config import ModelConfig

FAST_PAIRS = 3
SLOW_FROM = 6
SMALL = 0.1


def check(g: ModelConfig) -> None:
    """ValueError unless the geometry has room for the circuit."""
    ok = g.num_layers >= 2 and g.hidden_size > 2 * g.head_dim and g.head_dim >= 4 * SLOW_FROM // 2
    if not ok or g.embed_offset == 0:
        raise ValueError(
            f"induction_init with num_layers={g.num_layers}, hidden_size={g.hidden_size}, "
            f"head_dim={g.head_dim}, embed_offset={g.embed_offset}: expected 2 layers, "
            f"head_dim >= {2 * SLOW_FROM}, hidden_size > 2 head_dim, embed_offset > 0"
        )


def induction_weights(g: ModelConfig, embed_VD: jax.Array, w: dict, key: jax.Array) -> dict:
    """New stacked layer parameters: `w` with the circuit drawn into layers 0 and 1."""
    check(g)
    D, H, R = g.hidden_size, g.head_dim, g.num_heads // g.num_kv_heads
    keys = jax.random.split(key, 3)
    shared = jnp.sign(embed_VD.mean(0)) * D**-0.5
    basis = jnp.concatenate([shared[:, None], jax.random.normal(keys[0], (D, 2 * H))], 1)
    basis = jnp.linalg.qr(basis)[0]
    content, before = basis[:, 1 : 1 + H], basis[:, 1 + H :]
    w = dict(w)
    w["down_LFD"] = w["down_LFD"] * SMALL
    w["o_LNHD"] = w["o_LNHD"].at[0].multiply(2 * SMALL)
    return _induction_head(g, _previous_token_head(g, w, shared, content, before, R), keys, content,
                           before, shared, R)  # fmt: skip


def _previous_token_head(g, w, shared, content, before, R):
    pairs = jnp.arange(g.head_dim // 2)
    frequency = g.rope_theta ** (-pairs * 2 / g.head_dim)
    fast = (pairs < FAST_PAIRS).astype(jnp.float32)
    key_phase = jnp.concatenate([fast, 0 * fast])
    query_phase = jnp.concatenate([fast * jnp.cos(frequency), -fast * jnp.sin(frequency)])
    w["k_LDKH"] = _mix(w["k_LDKH"], 0, slice(0, 1), jnp.outer(shared, key_phase), SMALL)
    w["q_LDNH"] = _mix(w["q_LDNH"], 0, slice(0, R), jnp.outer(shared, query_phase), SMALL)
    w["v_LDKH"] = w["v_LDKH"].at[0, :, 0].set(content)
    w["o_LNHD"] = w["o_LNHD"].at[0, :R].set(0.7 / R * before.T)
    return w


def _induction_head(g, w, keys, content, before, shared, R):
    D, H = g.hidden_size, g.head_dim
    slow = jnp.tile(jnp.arange(H // 2) >= SLOW_FROM, 2)
    match = jax.random.normal(keys[1], (H, H)) * slow * H**-0.5
    w["k_LDKH"] = _mix(w["k_LDKH"], 1, slice(0, 1), before @ match, SMALL)
    w["q_LDNH"] = _mix(w["q_LDNH"], 1, slice(0, R), content @ match, SMALL)
    copied = jax.random.normal(keys[2], (D, H))
    copied = jnp.linalg.qr(copied - jnp.outer(shared, shared @ copied))[0]
    w["v_LDKH"] = w["v_LDKH"].at[1, :, 0].set(copied)
    w["o_LNHD"] = w["o_LNHD"].at[1, :R].set(copied.T / R)
    return w


def _mix(stack_LDNH, layer, heads, circuit_DH, keep):
    """keep x the random draw of these heads + the circuit."""
    drawn = stack_LDNH[layer, :, heads] * keep + circuit_DH[:, None]
    return stack_LDNH.at[layer, :, heads].set(drawn)
