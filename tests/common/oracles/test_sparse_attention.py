"""The page rule and sparse attention in float64: by hand, and properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import oracles


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
        got = oracles.select_pages(q, keys, k=k, page_size=4)
        np.testing.assert_array_equal(got, [pages])
    for k in (4, 5, 100, None):
        got = oracles.select_pages(q, keys, k=k, page_size=4)
        np.testing.assert_array_equal(got, [range(7)])
    # a query that points the other way prefers the lowest landmarks
    got = oracles.select_pages(-q, keys, k=2, page_size=4)
    np.testing.assert_array_equal(got, [[0, 1, 4, 5, 6]])
    np.testing.assert_array_equal(oracles.select_pages(q, keys[:9], k=0, page_size=4), [[0, 1, 2]])
    with pytest.raises(ValueError, match="k=-1"):
        oracles.select_pages(q, keys[:5], k=-1, page_size=4)


def test_landmark_is_the_mean_key_and_the_group_mean_is_the_query():
    # page 1 has one huge key, mean (8 + 0) / 2 = 4; page 2 has 5 and 5, mean 5 and no outlier
    keys = np.array([0, 0, 8, 0, 5, 5, 0, 0, 0])[:, None, None]
    np.testing.assert_array_equal(
        oracles.select_pages(np.ones((1, 1)), keys, k=1, page_size=2), [[0, 2, 3, 4]]
    )
    # KV head 0: group queries 3 and -1, mean 1 > 0; KV head 1: 1 and -3, mean -1 < 0
    keys = np.repeat(keys, 2, axis=1)
    got = oracles.select_pages(np.array([[3.0], [-1], [1], [-3]]), keys, k=1, page_size=2)
    np.testing.assert_array_equal(got, [[0, 2, 3, 4], [0, 1, 3, 4]])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 20), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_selected_pages_are_sorted_distinct_reserved_first_and_counted(S, k, page_size, seed):
    rng = np.random.default_rng(seed)
    q, keys = rng.normal(size=(4, 8)), rng.normal(size=(S, 2, 8))
    n = -(-S // page_size)
    got = oracles.select_pages(q, keys, k=k, page_size=page_size)
    assert got.shape == (2, min(n, k + 3))
    assert (np.diff(got, axis=1) > 0).all()
    for pages in got:
        assert {0, n - 1, max(n - 2, 0)} <= set(pages.tolist()) <= set(range(n))
    more = oracles.select_pages(q, keys, k=k + 1, page_size=page_size)
    for few, many in zip(got, more, strict=True):
        assert set(few) <= set(many)


def test_attention_by_hand():
    # logits log 1, log 3 -> weights .25, .75: out .25 * 10 + .75 * 20 = 17.5; lse log 4
    q, k = np.ones((1, 1, 1)), np.log([1.0, 3.0])[:, None, None]
    v = np.array([10.0, 20.0])[:, None, None]
    out, lse = oracles.attention(q, k, v, np.ones((1, 1, 2), bool))
    np.testing.assert_allclose((out[0, 0, 0], lse[0, 0]), (17.5, np.log(4)))
    out, lse = oracles.attention(q, k, v, np.array([[[False, True]]]))
    np.testing.assert_allclose((out[0, 0, 0], lse[0, 0]), (20, np.log(3)))
    out, lse = oracles.attention(q, k, v, np.zeros((1, 1, 2), bool))
    assert out[0, 0, 0] == 0 and lse[0, 0] == -np.inf
    # default scale H ** -.5: H = 4, q.k = 4 -> logit 2
    _, lse = oracles.attention(np.ones((1, 1, 4)), np.ones((1, 1, 4)), np.ones((1, 1, 4)), True)
    assert lse[0, 0] == pytest.approx(2)


def test_query_heads_are_grouped_by_kv_head():
    v = np.stack([np.full((3, 2), 1.0), np.full((3, 2), 2.0)], axis=1)  # KV head 0 -> 1, 1 -> 2
    rng = np.random.default_rng(0)
    out, _ = oracles.attention(rng.normal(size=(1, 6, 2)), rng.normal(size=(3, 2, 2)), v, True)
    np.testing.assert_allclose(out[0, :, 0], [1, 1, 1, 2, 2, 2])


def test_sparse_decode_is_softmax_over_the_listed_tokens():
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(4, 8)), rng.normal(size=(11, 2, 8)), rng.normal(size=(11, 2, 8))
    pages = np.array([[0, 2, 3], [0, 1, 3]])  # page size 3: page 3 holds tokens 9, 10
    out, lse = oracles.sparse_decode(q, k, v, pages, page_size=3)
    tokens = [[0, 1, 2, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 9, 10]]
    for n in range(4):
        kept, logits = tokens[n // 2], k[tokens[n // 2], n // 2] @ q[n] / np.sqrt(8)
        p = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(out[n], p @ v[kept, n // 2], rtol=1e-12)
        assert lse[n] == pytest.approx(np.log(np.exp(logits).sum()))


def test_replay_mask_equals_pages_listed_at_each_step():
    rng = np.random.default_rng(8)
    q, k, v = rng.normal(size=(20, 4, 6)), rng.normal(size=(20, 2, 6)), rng.normal(size=(20, 2, 6))
    visible = oracles.replay_mask(
        q, k, sparse_T=np.arange(len(q)) >= 5, budgets=lambda t: 1, page_size=3
    )
    out, lse = oracles.attention(q, k, v, visible)
    assert not visible[:, ~np.tril(np.ones((20, 20), bool))].any()
    assert visible[:, np.arange(20), np.arange(20)].all()  # a token sees itself
    for t in range(5, 20):
        pages = oracles.select_pages(q[t], k[: t + 1], k=1, page_size=3)
        step_out, step_lse = oracles.sparse_decode(q[t], k[: t + 1], v[: t + 1], pages, page_size=3)
        np.testing.assert_allclose(out[t], step_out, rtol=1e-12)
        np.testing.assert_allclose(lse[t], step_lse, rtol=1e-12)


def test_window_reads_the_newest_pages():
    scores = oracles.page_scores("window", np.ones((2, 4)), np.ones((23, 1, 4)), 4)
    np.testing.assert_array_equal(scores, [[0, 1, 2, 3, 4]])


def test_quest_bounds_every_product_and_is_reached_by_equal_keys():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 8)), rng.normal(size=(16, 1, 8))
    bound = oracles.page_scores("quest", q, k, 4)[0]
    assert (bound >= (k[:, 0] @ q[0]).reshape(4, 4).max(1)).all()
    k = np.repeat(k[::4], 4, 0)
    np.testing.assert_allclose(
        oracles.page_scores("quest", q, k, 4), oracles.page_scores("mean", q, k, 4)
    )


def test_oracle_finds_the_page_with_the_key_that_is_looked_for():
    """One key among many that point away: the mean hides it, the mass and the bounds do not."""
    k = np.zeros((64, 1, 8))
    k[:, 0, 0] = -1.0
    k[37, 0, 0] = 9.0
    k[8:12, 0, 0] = 1.9
    q = np.eye(8)[:1]
    best = {p: oracles.page_scores(p, q, k, 4)[0].argmax() for p in ("mean", "quest", "oracle")}
    assert best == {"mean": 2, "quest": 9, "oracle": 9}


def test_random_pages_are_spread_evenly():
    ranks = [
        oracles.page_scores("random", np.ones((2, 4)), np.ones((t, 2, 4)), 4).argsort()[:, -2:]
        for t in range(40, 240)
    ]
    ranks = [r[r < 10] for r in ranks]
    counts = np.bincount(np.concatenate(ranks), minlength=10)
    assert counts.min() > 0.5 * counts.max()
