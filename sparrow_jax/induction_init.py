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

import numpy as np

from common.config import ModelConfig
from common.errors import UserError

FAST_PAIRS = 3
SLOW_FROM = 6
SMALL = 0.1


def check(g: ModelConfig) -> None:
    """UserError unless the geometry has room for the circuit."""
    ok = g.num_layers >= 2 and g.hidden_size > 2 * g.head_dim and g.head_dim >= 2 * SLOW_FROM
    if not ok or g.embed_offset == 0:
        raise UserError(
            f"induction_init with num_layers={g.num_layers}, hidden_size={g.hidden_size}, "
            f"head_dim={g.head_dim}, embed_offset={g.embed_offset}: expected 2 layers, "
            f"head_dim >= {2 * SLOW_FROM}, hidden_size > 2 head_dim, embed_offset > 0"
        )


def draw_circuit(
    g: ModelConfig, embed_VD: np.ndarray, w: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The stacked layer parameters `w` with the circuit drawn into layers 0 and 1 (in place)."""
    check(g)
    D, H, R = g.hidden_size, g.head_dim, g.num_heads // g.num_kv_heads
    shared = np.sign(embed_VD.mean(0)) * D**-0.5
    basis = np.linalg.qr(np.column_stack([shared, rng.standard_normal((D, 2 * H))]))[0]
    content, before = basis[:, 1 : 1 + H], basis[:, 1 + H :]
    w["down_LFD"] *= SMALL
    w["o_LNHD"][0] *= 2 * SMALL

    key_phase, query_phase = _previous_token_phases(g)
    _mix(w["k_LDKH"][0, :, :1], np.outer(shared, key_phase))
    _mix(w["q_LDNH"][0, :, :R], np.outer(shared, query_phase))
    w["v_LDKH"][0, :, 0] = content
    w["o_LNHD"][0, :R] = 0.7 / R * before.T

    slow = np.tile(np.arange(H // 2) >= SLOW_FROM, 2)
    match = rng.standard_normal((H, H)) * slow * H**-0.5
    _mix(w["k_LDKH"][1, :, :1], before @ match)
    _mix(w["q_LDNH"][1, :, :R], content @ match)
    copied = rng.standard_normal((D, H))
    copied = np.linalg.qr(copied - np.outer(shared, shared @ copied))[0]
    w["v_LDKH"][1, :, 0] = copied
    w["o_LNHD"][1, :R] = copied.T / R
    return w


def _previous_token_phases(g: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Key and query [H] that match best when the key stands one position before the query."""
    pairs = np.arange(g.head_dim // 2)
    frequency = g.rope_theta ** (-pairs * 2 / g.head_dim)
    fast = (pairs < FAST_PAIRS).astype(np.float32)
    key = np.concatenate([fast, 0 * fast])
    return key, np.concatenate([fast * np.cos(frequency), -fast * np.sin(frequency)])


def _mix(heads_DNH: np.ndarray, circuit_DH: np.ndarray) -> None:
    """Scale the random draw of these heads down and add the circuit, in place."""
    heads_DNH *= SMALL
    heads_DNH += circuit_DH[:, None]
