"""The oracles themselves: hand-worked numbers and properties that do not reuse their code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ModelConfig
from common.oracles import float64


def test_rms_norm_by_hand():
    # mean square of (3, 4) = 12.5; with eps 3.5: sqrt(16) = 4; gains 2, 1
    np.testing.assert_allclose(float64.rms_norm([3, 4], [2, 1], 3.5), [1.5, 1.0])


def test_rope_pairs_a_dimension_with_the_one_half_a_head_further():
    # H = 4, theta 100: angles p * 100^0 = p and p * 100^(-1/2) = p / 10; pairs (0, 2) and (1, 3)
    x = np.array([[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]], [[0, 0, 1.0, 0]]])
    got = float64.rope(x, np.array([2, 3, 2]), 100.0)
    np.testing.assert_allclose(got[0, 0], [np.cos(2), 0, np.sin(2), 0], atol=1e-12)
    np.testing.assert_allclose(got[1, 0], [0, np.cos(0.3), 0, np.sin(0.3)], atol=1e-12)
    np.testing.assert_allclose(got[2, 0], [-np.sin(2), 0, np.cos(2), 0], atol=1e-12)


def test_rope_dot_products_depend_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 8))

    def dot(s, t):
        return float((float64.rope(q, [s], 1e4) * float64.rope(k, [t], 1e4)).sum())

    assert dot(7, 3) == pytest.approx(dot(104, 100)) and dot(0, 0) == pytest.approx((q * k).sum())
    assert dot(7, 3) != pytest.approx(dot(7, 4))


def paged_keys(page_scores, page_size, last_len):
    """Keys [S, 1, 1] whose pages have the given means; the last page holds last_len tokens."""
    keys = np.repeat(np.float64(page_scores), page_size)[
        : (len(page_scores) - 1) * page_size + last_len
    ]
    return keys[:, None, None]


@pytest.mark.parametrize("last_len", [1, 3, 4])
def test_select_pages_by_hand(last_len):
    # pages 0..6, n = 7; reserved 0, 5, 6; candidates 1..4 with scores 2 5 5 1 (times q = 1)
    keys = paged_keys([-9, 2, 5, 5, 1, -9, -9], 4, last_len)
    q = np.ones((2, 1))
    want = {0: [0, 5, 6], 1: [0, 2, 5, 6], 2: [0, 2, 3, 5, 6], 3: [0, 1, 2, 3, 5, 6]}
    for k, pages in want.items():  # k = 1: pages 2 and 3 tie, the lower one is read
        got = float64.select_pages(q, keys, k=k, page_size=4)
        np.testing.assert_array_equal(got, [pages])
    for k in (4, 5, 100, None):
        got = float64.select_pages(q, keys, k=k, page_size=4)
        np.testing.assert_array_equal(got, [range(7)])
    # a query that points the other way prefers the lowest landmarks
    got = float64.select_pages(-q, keys, k=2, page_size=4)
    np.testing.assert_array_equal(got, [[0, 1, 4, 5, 6]])
    np.testing.assert_array_equal(float64.select_pages(q, keys[:9], k=0, page_size=4), [[0, 1, 2]])
    with pytest.raises(ValueError, match="k=-1"):
        float64.select_pages(q, keys[:5], k=-1, page_size=4)


def test_landmark_is_the_mean_key_and_the_group_mean_is_the_query():
    # page 1 has one huge key, mean (8 + 0) / 2 = 4; page 2 has 5 and 5, mean 5 and no outlier
    keys = np.array([0, 0, 8, 0, 5, 5, 0, 0, 0])[:, None, None]
    np.testing.assert_array_equal(
        float64.select_pages(np.ones((1, 1)), keys, k=1, page_size=2), [[0, 2, 3, 4]]
    )
    # KV head 0: group queries 3 and -1, mean 1 > 0; KV head 1: 1 and -3, mean -1 < 0
    keys = np.repeat(keys, 2, axis=1)
    got = float64.select_pages(np.array([[3.0], [-1], [1], [-3]]), keys, k=1, page_size=2)
    np.testing.assert_array_equal(got, [[0, 2, 3, 4], [0, 1, 3, 4]])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 20), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_selected_pages_are_sorted_distinct_reserved_first_and_counted(S, k, page_size, seed):
    rng = np.random.default_rng(seed)
    q, keys = rng.normal(size=(4, 8)), rng.normal(size=(S, 2, 8))
    n = -(-S // page_size)
    got = float64.select_pages(q, keys, k=k, page_size=page_size)
    assert got.shape == (2, min(n, k + 3))
    assert (np.diff(got, axis=1) > 0).all()
    for pages in got:
        assert {0, n - 1, max(n - 2, 0)} <= set(pages.tolist()) <= set(range(n))
    more = float64.select_pages(q, keys, k=k + 1, page_size=page_size)
    for few, many in zip(got, more, strict=True):
        assert set(few) <= set(many)


def test_attention_by_hand():
    # logits log 1, log 3 -> weights .25, .75: out .25 * 10 + .75 * 20 = 17.5; lse log 4
    q, k = np.ones((1, 1, 1)), np.log([1.0, 3.0])[:, None, None]
    v = np.array([10.0, 20.0])[:, None, None]
    out, lse = float64.attention(q, k, v, np.ones((1, 1, 2), bool))
    np.testing.assert_allclose((out[0, 0, 0], lse[0, 0]), (17.5, np.log(4)))
    out, lse = float64.attention(q, k, v, np.array([[[False, True]]]))
    np.testing.assert_allclose((out[0, 0, 0], lse[0, 0]), (20, np.log(3)))
    out, lse = float64.attention(q, k, v, np.zeros((1, 1, 2), bool))
    assert out[0, 0, 0] == 0 and lse[0, 0] == -np.inf
    # default scale H ** -.5: H = 4, q.k = 4 -> logit 2
    _, lse = float64.attention(np.ones((1, 1, 4)), np.ones((1, 1, 4)), np.ones((1, 1, 4)), True)
    assert lse[0, 0] == pytest.approx(2)


def test_query_heads_are_grouped_by_kv_head():
    v = np.stack([np.full((3, 2), 1.0), np.full((3, 2), 2.0)], axis=1)  # KV head 0 -> 1, 1 -> 2
    rng = np.random.default_rng(0)
    out, _ = float64.attention(rng.normal(size=(1, 6, 2)), rng.normal(size=(3, 2, 2)), v, True)
    np.testing.assert_allclose(out[0, :, 0], [1, 1, 1, 2, 2, 2])


def test_sparse_decode_is_softmax_over_the_listed_tokens():
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(4, 8)), rng.normal(size=(11, 2, 8)), rng.normal(size=(11, 2, 8))
    pages = np.array([[0, 2, 3], [0, 1, 3]])  # page size 3: page 3 holds tokens 9, 10
    out, lse = float64.sparse_decode(q, k, v, pages, page_size=3)
    tokens = [[0, 1, 2, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 9, 10]]
    for n in range(4):
        kept, logits = tokens[n // 2], k[tokens[n // 2], n // 2] @ q[n] / np.sqrt(8)
        p = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(out[n], p @ v[kept, n // 2], rtol=1e-12)
        assert lse[n] == pytest.approx(np.log(np.exp(logits).sum()))


def test_token_logprob_and_overlap_by_hand():
    # p = 1/2, 1/4, 1/4: entropy 1.5 log 2
    logits = np.log([[2.0, 1, 1], [2.0, 1, 1]]) + 7
    logp, entropy = float64.token_logprob(logits, np.array([0, 2]))
    np.testing.assert_allclose(logp, np.log([0.5, 0.25]))
    np.testing.assert_allclose(entropy, 1.5 * np.log(2))
    # temperature 1/2 squares: 4 1 1 over 6
    np.testing.assert_allclose(float64.token_logprob(logits, [0, 0], 0.5)[0], np.log(4 / 6))
    assert float64.token_logprob(np.array([[0, -np.inf]]), [0])[1][0] == 0
    # min(.5, .25) + min(.25, .25) + min(.25, .5) = .75
    got = float64.acceptance_overlap(logits[:1], np.log([[1.0, 1, 2]]))
    np.testing.assert_allclose(got, [0.75])
    # at temperature 1/2: 4/6 1/6 1/6 against 1/6 1/6 4/6: 3/6
    np.testing.assert_allclose(
        float64.acceptance_overlap(logits[:1], np.log([[1.0, 1, 2]]), 0.5), [0.5]
    )


def geometry(**changes):
    small = {
        "vocab_size": 17, "num_layers": 3, "hidden_size": 12, "intermediate_size": 20,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 1e4,
    }  # fmt: skip
    return ModelConfig(**small | changes)


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
    got = float64.decoder_forward(w, g, tokens)
    np.testing.assert_allclose(got, plain_decoder(w, g, tokens), rtol=1e-9, atol=1e-9)


def test_sparse_forward_is_dense_where_it_should_be_and_only_there():
    g, tokens = geometry(), np.random.default_rng(1).integers(0, 17, 24)
    w = random_weights(g)
    options = {"prompt_len": 14, "page_size": 2}
    dense = float64.decoder_forward(w, g, tokens)
    sparse = float64.decoder_forward(w, g, tokens, budgets=lambda t: 1, **options)
    differs = np.abs(sparse - dense).max(axis=1) > 1e-6
    # the prompt (rows 0 .. 13, the last gives the first response token) is dense, the rest is not
    assert not differs[:14].any() and differs[14:].all()
    for all_pages in (lambda t: 9, lambda t: None, None):  # 24 tokens: 12 pages = 9 + 3
        got = float64.decoder_forward(w, g, tokens, budgets=all_pages, **options)
        np.testing.assert_array_equal(got, dense)
    got = float64.decoder_forward(w, g, tokens, budgets=lambda t: 1, num_dense_layers=3, **options)
    np.testing.assert_array_equal(got, dense)
    # the budget of each position is its own: more pages at t = 20 change the row 20 and later ones
    got = float64.decoder_forward(w, g, tokens, budgets=lambda t: 3 if t == 20 else 1, **options)
    changed = np.abs(got - sparse).max(axis=1) > 1e-9
    assert changed[20] and not changed[:20].any()
    with pytest.raises(ValueError, match="prompt_len"):
        float64.decoder_forward(w, g, tokens, budgets=lambda t: 1)


def test_replay_equals_decode_token_by_token():
    """Row t of the replay is the last row of a run that never saw the tokens after t."""
    g, tokens = geometry(), np.random.default_rng(5).integers(0, 17, 26)
    w = random_weights(g, seed=3)
    options = {"prompt_len": 9, "budgets": lambda t: t // 8, "page_size": 2, "num_dense_layers": 1}
    full = float64.decoder_forward(w, g, tokens, **options)
    for t in range(26):
        alone = float64.decoder_forward(w, g, tokens[: t + 1], **options)[-1]
        np.testing.assert_allclose(full[t], alone, rtol=1e-10, atol=1e-10)


def test_replay_mask_equals_pages_listed_at_each_step():
    rng = np.random.default_rng(8)
    q, k, v = rng.normal(size=(20, 4, 6)), rng.normal(size=(20, 2, 6)), rng.normal(size=(20, 2, 6))
    visible = float64.replay_mask(q, k, prompt_len=5, budgets=lambda t: 1, page_size=3)
    out, lse = float64.attention(q, k, v, visible)
    assert not visible[:, ~np.tril(np.ones((20, 20), bool))].any()
    assert visible[:, np.arange(20), np.arange(20)].all()  # a token sees itself
    for t in range(5, 20):
        pages = float64.select_pages(q[t], k[: t + 1], k=1, page_size=3)
        step_out, step_lse = float64.sparse_decode(q[t], k[: t + 1], v[: t + 1], pages, page_size=3)
        np.testing.assert_allclose(out[t], step_out, rtol=1e-12)
        np.testing.assert_allclose(lse[t], step_lse, rtol=1e-12)
