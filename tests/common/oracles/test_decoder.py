"""The float64 decoder: by hand, against an independent one, and as a replay of decode."""

import numpy as np
import pytest

from common import oracles
from common.model.geometry import Geometry


def test_rms_norm_by_hand():
    # mean square of (3, 4) = 12.5; with eps 3.5: sqrt(16) = 4; gains 2, 1
    np.testing.assert_allclose(oracles.rms_norm([3, 4], [2, 1], 3.5), [1.5, 1.0])


def test_rope_pairs_a_dimension_with_the_one_half_a_head_further():
    # H = 4, theta 100: angles p * 100^0 = p and p * 100^(-1/2) = p / 10; pairs (0, 2) and (1, 3)
    x = np.array([[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]], [[0, 0, 1.0, 0]]])
    got = oracles.rope(x, np.array([2, 3, 2]), 100.0)
    np.testing.assert_allclose(got[0, 0], [np.cos(2), 0, np.sin(2), 0], atol=1e-12)
    np.testing.assert_allclose(got[1, 0], [0, np.cos(0.3), 0, np.sin(0.3)], atol=1e-12)
    np.testing.assert_allclose(got[2, 0], [-np.sin(2), 0, np.cos(2), 0], atol=1e-12)


def test_rope_dot_products_depend_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 8))

    def dot(s, t):
        return float((oracles.rope(q, [s], 1e4) * oracles.rope(k, [t], 1e4)).sum())

    assert dot(7, 3) == pytest.approx(dot(104, 100)) and dot(0, 0) == pytest.approx((q * k).sum())
    assert dot(7, 3) != pytest.approx(dot(7, 4))


def geometry(**changes):
    small = {
        "vocab_size": 17, "num_layers": 3, "hidden_size": 12, "intermediate_size": 20,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 1e4,
    }  # fmt: skip
    return Geometry(**small | changes)


def random_weights(g, seed=0):
    rng = np.random.default_rng(seed)
    V, L, D, F = g.vocab_size, g.num_layers, g.hidden_size, g.intermediate_size
    N, K, H = g.num_heads, g.num_kv_heads, g.head_dim
    shapes = {
        "embed_VD": (V, D), "q_LDNH": (L, D, N, H), "k_LDKH": (L, D, K, H), "v_LDKH": (L, D, K, H),
        "o_LNHD": (L, N, H, D), "gate_LDF": (L, D, F), "up_LDF": (L, D, F), "down_LFD": (L, F, D),
    }  # fmt: skip
    w = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    gains = {"final_norm_D": (D,), "attn_norm_LD": (L, D), "mlp_norm_LD": (L, D)}
    if g.qk_norm:
        gains |= {"q_norm_LH": (L, H), "k_norm_LH": (L, H)}
    w |= {name: rng.uniform(1, 2, shape) for name, shape in gains.items()}
    if not g.tie_embeddings:
        w["head_VD"] = rng.normal(size=(V, D))
    return w


def plain_decoder(w, g, tokens):
    """An independent dense decoder: token by token, head by head, complex-number RoPE."""
    cache = [[] for _ in range(g.num_layers)]
    rows = []
    half = g.head_dim // 2
    freq = np.array([g.rope_theta ** (-2 * i / g.head_dim) for i in range(half)])

    def norm(x, gain):
        return x * gain / np.sqrt((x @ x) / len(x) + g.norm_eps)

    def rotate(x, t):
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * t * freq)
        return np.concatenate([z.real, z.imag])

    for t, token in enumerate(tokens):
        x = w["embed_VD"][token]
        for layer in range(g.num_layers):
            h = norm(x, w["attn_norm_LD"][layer])
            keys, values = [], []
            for head in range(g.num_kv_heads):
                key = h @ w["k_LDKH"][layer][:, head]
                if g.qk_norm:
                    key = norm(key, w["k_norm_LH"][layer])
                keys.append(rotate(key, t))
                values.append(h @ w["v_LDKH"][layer][:, head])
            cache[layer].append((keys, values))
            attended = 0
            for n in range(g.num_heads):
                head = n // (g.num_heads // g.num_kv_heads)
                query = h @ w["q_LDNH"][layer][:, n]
                if g.qk_norm:
                    query = norm(query, w["q_norm_LH"][layer])
                query = rotate(query, t)
                e = [np.exp(query @ k[head] / np.sqrt(g.head_dim)) for k, _ in cache[layer]]
                mix = sum(a * v[head] for a, (_, v) in zip(e, cache[layer], strict=True)) / sum(e)
                attended = attended + mix @ w["o_LNHD"][layer][n]
            x = x + attended
            h = norm(x, w["mlp_norm_LD"][layer])
            gate = h @ w["gate_LDF"][layer]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up_LDF"][layer])) @ w["down_LFD"][layer]
        head = w["embed_VD"] if g.tie_embeddings else w["head_VD"]
        rows.append(head @ norm(x, w["final_norm_D"]))
    return np.array(rows)


@pytest.mark.parametrize("qk_norm, tie", [(True, True), (False, False)])
def test_decoder_equals_an_independent_one(qk_norm, tie):
    g = geometry(qk_norm=qk_norm, tie_embeddings=tie)
    w = random_weights(g)
    tokens = np.random.default_rng(1).integers(0, 17, 9)
    got = oracles.decoder_forward(w, g, tokens)
    np.testing.assert_allclose(got, plain_decoder(w, g, tokens), rtol=1e-9, atol=1e-9)


def test_sparse_forward_is_dense_where_it_should_be_and_only_there():
    g, tokens = geometry(), np.random.default_rng(1).integers(0, 17, 24)
    w = random_weights(g)
    options = {"sparse_T": np.arange(24) >= 14, "page_size": 2}
    dense = oracles.decoder_forward(w, g, tokens)
    sparse = oracles.decoder_forward(w, g, tokens, budgets=lambda t: 1, **options)
    differs = np.abs(sparse - dense).max(axis=1) > 1e-6
    # the prompt (rows 0 .. 13, the last gives the first response token) is dense, the rest is not
    assert not differs[:14].any() and differs[14:].all()
    for all_pages in (lambda t: 9, lambda t: None, None):  # 24 tokens: 12 pages = 9 + 3
        got = oracles.decoder_forward(w, g, tokens, budgets=all_pages, **options)
        np.testing.assert_array_equal(got, dense)
    got = oracles.decoder_forward(w, g, tokens, budgets=lambda t: 1, num_dense_layers=3, **options)
    np.testing.assert_array_equal(got, dense)
    # the budget of each position is its own: more pages at t = 20 change the row 20 and later ones
    got = oracles.decoder_forward(w, g, tokens, budgets=lambda t: 3 if t == 20 else 1, **options)
    changed = np.abs(got - sparse).max(axis=1) > 1e-9
    assert changed[20] and not changed[:20].any()
    with pytest.raises(ValueError, match="sparse_T"):
        oracles.decoder_forward(w, g, tokens, budgets=lambda t: 1)


def test_replay_equals_decode_token_by_token():
    """Row t of the replay is the last row of a run that never saw the tokens after t."""
    g, tokens = geometry(), np.random.default_rng(5).integers(0, 17, 26)
    w = random_weights(g, seed=3)
    options = {"budgets": lambda t: t // 8, "page_size": 2, "num_dense_layers": 1}
    sparse = np.arange(26) >= 9
    full = oracles.decoder_forward(w, g, tokens, sparse_T=sparse, **options)
    for t in range(26):
        part = {"sparse_T": sparse[: t + 1], **options}
        alone = oracles.decoder_forward(w, g, tokens[: t + 1], **part)[-1]
        np.testing.assert_allclose(full[t], alone, rtol=1e-10, atol=1e-10)
