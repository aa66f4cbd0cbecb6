"""A structured start for tiny from-scratch policies: a rough induction circuit in layers 0 and 1.

A small transformer learns to look up ("which token followed this key before?") only after long
training, and with some seeds never. This start writes a rough version of the two heads that do it,
so that a warm-up on a CPU takes a minute. It is far from a solution: the rest of the network is
random, and training has to make the heads precise.

    token t - 1          token t = key        ...        token u = the same key again
         |                    |                               |
         +--- layer 0: copy --+                               |
              A of t - 1 goes |                               |
              to B of t       v                               v
                     B holds token t - 1       layer 1: query from A of u, keys from B:
                                               attends where B matches, copies the value

Layer 0, KV head 0 attends to the previous token: keys and queries read the direction that all
embeddings share, with a RoPE phase of one position on the fastest pairs. Layer 1, KV head 0 uses
one random map on the slow RoPE pairs for both its query (subspace A, the token's own content) and
its key (subspace B, the content of the token before). A and B are orthogonal to each other and to
the shared direction. Everything else is scaled down.
"""

from __future__ import annotations

import numpy as np

from common.config import ModelConfig
from common.errors import UserError

FAST_PAIRS = 3
SLOW_FROM = 6
SMALL = 0.1


def check(c: ModelConfig) -> None:
    """Raise UserError unless the model has room for the circuit."""
    ok = c.num_layers >= 2 and c.hidden_size > 2 * c.head_dim and c.head_dim >= 2 * SLOW_FROM
    if not ok or c.embed_offset == 0:
        raise UserError(
            f"induction_init with num_layers={c.num_layers}, hidden_size={c.hidden_size}, "
            f"head_dim={c.head_dim}, embed_offset={c.embed_offset}: expected 2 layers, "
            f"head_dim >= {2 * SLOW_FROM}, hidden_size > 2 head_dim, embed_offset > 0"
        )


def add_circuit(
    c: ModelConfig, embed_VD: np.ndarray, w: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The stacked layer parameters `w`, changed in place: layers 0 and 1 hold the circuit.

    Raises: UserError if the model has no room for it.
    """
    check(c)
    D, H, R = c.hidden_size, c.head_dim, c.num_heads // c.num_kv_heads
    shared = np.sign(embed_VD.mean(0)) * D**-0.5
    basis = np.linalg.qr(np.column_stack([shared, rng.standard_normal((D, 2 * H))]))[0]
    content, before = basis[:, 1 : 1 + H], basis[:, 1 + H :]
    w["down_LFD"] *= SMALL
    w["o_LNHD"][0] *= 2 * SMALL

    key_phase, query_phase = _previous_token_phases(c)
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


def _previous_token_phases(c: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Key and query [H] that match best when the key is one position before the query."""
    pairs = np.arange(c.head_dim // 2)
    frequency = c.rope_theta ** (-pairs * 2 / c.head_dim)
    fast = (pairs < FAST_PAIRS).astype(np.float32)
    key = np.concatenate([fast, 0 * fast])
    return key, np.concatenate([fast * np.cos(frequency), -fast * np.sin(frequency)])


def _mix(heads_DNH: np.ndarray, circuit_DH: np.ndarray) -> None:
    """Scale the random weights of these heads down and add the circuit to them, in place."""
    heads_DNH *= SMALL
    heads_DNH += circuit_DH[:, None]
