"""Plain-XLA and plain-torch operations against the float64 oracles: ids exact, the rest at 1e-5."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import oracles
from kernels_pallas import reference as in_jax
from kernels_triton import reference as in_torch
from tests.kernels import ladder

jit = functools.partial(jax.jit, compiler_options=ladder.QUICK)
JAX = SimpleNamespace(
    module=in_jax,
    select_pages=jit(in_jax.select_pages, static_argnames="max_selected"),
    sparse_decode=jit(in_jax.sparse_decode),
    append_kv=jit(in_jax.append_kv),
    flash_prefill=jit(in_jax.flash_prefill, static_argnames=("page", "chunk")),
    gradients=ladder.jax_gradients,
)
NAMES = "select_pages sparse_decode append_kv flash_prefill token_logprob acceptance_overlap"
TORCH = SimpleNamespace(
    module=in_torch,
    gradients=ladder.torch_gradients,
    **{name: ladder.on_torch(getattr(in_torch, name)) for name in NAMES.split()},
)


@pytest.fixture(params=[JAX, TORCH], ids=["jax", "torch"])
def ops(request):
    """The operations of one package, on numpy arrays."""
    return request.param


SHAPES = [(1, 32), (2, 64), (3, 128), (4, 32), (5, 64), (8, 128)]
# C = 4, k = 2 (5 pages): empty, one token, around one page, 2 and 3 pages, then 4, 5 and 6 pages,
# each both full and part filled.
LENGTHS = [0, 1, 3, 4, 5, 8, 9, 12, 16, 17, 20, 21, 24, 43]


@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_decode_path_at_every_ratio_and_head_dim(ops, ratio, head_dim):
    case = ladder.make_paged(LENGTHS, head_dim=head_dim)
    q, k = ladder.random_queries(case, 1, ratio), np.full(len(LENGTHS), 2)
    ladder.check_select(ops.select_pages, case, q[:, 0], k, 5)
    ladder.check_decode(ops.sparse_decode, case, q, 1, k, 5)


def test_compiled_with_all_optimisations():
    case = ladder.make_paged(LENGTHS, head_dim=32)
    q, k = ladder.random_queries(case, 1, 2), np.full(len(LENGTHS), 2)
    select = jax.jit(in_jax.select_pages, static_argnames="max_selected")
    ladder.check_select(select, case, q[:, 0], k, 5)
    ladder.check_decode(jax.jit(in_jax.sparse_decode), case, q, 1)


def test_rows_have_budgets_of_their_own(ops):
    lengths = [41] * 10 + [2, 40]
    case = ladder.make_paged(lengths)
    k = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 5, 0])  # 11 pages: 8 candidates
    q = ladder.random_queries(case, 1, 2)
    ladder.check_select(ops.select_pages, case, q[:, 0], k, 13)
    ladder.check_decode(ops.sparse_decode, case, q, 1, k, 13)


def test_more_pages_asked_than_exist(ops):
    case = ladder.make_paged(LENGTHS)
    q, k, width = ladder.random_queries(case, 1, 2), [1000] * len(LENGTHS), case.table_BP.shape[1]
    ladder.check_select(ops.select_pages, case, q[:, 0], k, width)  # the engine's list: every page
    ladder.check_select(ops.select_pages, case, q[:, 0], k, width + 5)
    ladder.check_decode(ops.sparse_decode, case, q, 1, k, width)


def test_ties_go_to_the_lower_page(ops):
    case = ladder.make_paged([37, 40, 41, 16], equal=True)
    q = np.round(4 * ladder.random_queries(case, 1, 2)[:, 0]) / 4
    for k in (1, 3, 6):
        ladder.check_select(ops.select_pages, case, q, [k] * 4, 9)
    zero = np.zeros((4, 4, 8), np.float32)  # all scores are 0, with mixed signs of zero inside
    ladder.check_select(ops.select_pages, case, zero, [3] * 4, 9)


@pytest.mark.parametrize("page_size", [16, 64])
def test_more_than_2048_tokens(ops, page_size):
    case = ladder.make_paged([2 * page_size + 1, 2100], head_dim=32, page_size=page_size)
    q = ladder.random_queries(case, 1, 2)
    ladder.check_select(ops.select_pages, case, q[:, 0], [20, 20], 23)
    ladder.check_decode(ops.sparse_decode, case, q, 1, [20, 20], 23)


def test_several_new_tokens_see_each_other_causally(ops):
    lengths = [0, 1, 3, 4, 5, 9, 21, 43, 300, 300]
    case = ladder.make_paged(lengths)  # 300 tokens: more than one step of the loop
    q = ladder.random_queries(case, 7, 2)
    ladder.check_decode(ops.sparse_decode, case, q, 7)
    ladder.check_decode(ops.sparse_decode, case, q, np.array([0, 1, 2, 4, 3, 7, 1, 6, 7, 2]))


def test_several_new_tokens_over_selected_pages(ops):
    lengths = [43, 44, 41, 40, 9]  # the new tokens lie in the last two pages
    case = ladder.make_paged(lengths)
    q = ladder.random_queries(case, 4, 2)
    ladder.check_decode(ops.sparse_decode, case, q, np.array([4, 4, 3, 4, 1]), [2, 3, 0, 1, 2], 6)


@pytest.mark.parametrize("pieces", [
    [[1, 4, 0]] * 9,
    [[4, 3, 1], [4, 1, 0], [0, 4, 3], [1, 4, 4]],
    [[11, 1, 8], [9, 11, 2], [0, 11, 11], [1, 1, 3]],  # several pages at once
])  # fmt: skip
def test_append_writes_tokens_and_landmarks_and_nothing_else(ops, pieces):
    ladder.check_append(ops.append_kv, pieces)


def test_append_past_the_page_table_is_dropped(ops):
    ladder.check_end_of_table(ops.append_kv)


@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_prefill_dense_and_replay(ops, ratio, head_dim):
    q, k, v = ladder.prefill_inputs(ratio, head_dim=head_dim, num_tokens=39)
    if ratio < 3:
        ladder.check_prefill(ops.flash_prefill, q, k, v)
    sparse = np.arange(39) >= np.array([[5], [12]])
    ladder.check_prefill(ops.flash_prefill, q, k, v, np.full(39, 2, np.int32), sparse)


@pytest.mark.parametrize(("num_tokens", "chunk", "page"), [
    (1, 128, 16), (16, 16, 4), (17, 16, 4), (50, 16, 16), (65, 8, 4),
])  # fmt: skip
def test_prefill_lengths_and_schedules(ops, num_tokens, chunk, page):
    q, k, v = ladder.prefill_inputs(num_tokens=num_tokens, rows=4)
    rng = np.random.default_rng(0)
    budgets = np.array([1, 0, 3, 2, 40], np.int32)[np.arange(num_tokens) // 13]
    prompt = rng.integers(0, num_tokens + 1, 4)
    prompt[0], prompt[1] = num_tokens, 0
    sparse = np.arange(num_tokens) >= prompt[:, None]
    ladder.check_prefill(ops.flash_prefill, q, k, v, budgets, sparse, page, chunk)


def test_prefill_ties_go_to_the_lower_page(ops):
    q, k, v = ladder.prefill_inputs(num_tokens=48)
    q, k = np.round(4 * q) / 4, np.round(4 * k[:, np.arange(48) % 4]) / 4
    ladder.check_prefill(
        ops.flash_prefill, q, k, v, np.full(48, 2, np.int32), np.arange(48) >= np.array([[0], [9]])
    )


def test_prefill_over_2048_tokens(ops):
    q, k, v = ladder.prefill_inputs(1, num_tokens=2100, rows=1, kv_heads=1)
    budgets = np.full(2100, 8, np.int32)
    got = ops.flash_prefill(
        q, k, v, budget_T=budgets, sparse_BT=np.arange(2100)[None] >= 1000, page=64
    )
    for t in (0, 63, 999, 1000, 1023, 1024, 2047, 2048, 2099):
        budget = 8 if t >= 1000 else None
        pages = oracles.select_pages(q[0, t], k[0, : t + 1], k=budget, page_size=64)
        want, _ = oracles.sparse_decode(q[0, t], k[0, : t + 1], v[0, : t + 1], pages, page_size=64)
        ladder.close(got[0, t], want, f"position {t}")


PAGES, HEADS, QUERIES = 9, 2, 4


def both_rules(module, scores_BKP, num_pages_B, k_B):
    """The pages that decode (top_pages) and replay (page_mask) choose from the same scores."""
    scores_KtP = scores_BKP.swapaxes(0, 1)[None]
    mask = module.page_mask(scores_KtP, num_pages_B, k_B)[0].swapaxes(0, 1)
    return (*module.top_pages(scores_BKP, num_pages_B, k_B, PAGES), mask)


BOTH_RULES = [
    jit(functools.partial(both_rules, in_jax)),
    ladder.on_torch(functools.partial(both_rules, in_torch)),
]


@given(data=st.data())
def test_replay_and_decode_choose_the_same_pages(data):
    draw = functools.partial(data.draw)
    numbers = st.lists(st.integers(-2, 2), min_size=PAGES, max_size=PAGES)  # many ties
    heads = st.lists(numbers, min_size=HEADS, max_size=HEADS)
    scores = np.float32(draw(st.lists(heads, min_size=QUERIES, max_size=QUERIES)))
    num_pages = np.int32(draw(st.lists(st.integers(1, PAGES), min_size=QUERIES, max_size=QUERIES)))
    k = np.int32(draw(st.lists(st.integers(0, 12), min_size=QUERIES, max_size=QUERIES)))
    for rules in BOTH_RULES:
        listed, count, mask = map(np.asarray, rules(scores, num_pages, k))
        for i in range(QUERIES):
            n = num_pages[i]
            # one token per page, q = 1: the landmark is the score itself
            want = oracles.select_pages(
                np.ones((HEADS, 1)), scores[i].T[:n, :, None], k=int(k[i]), page_size=1
            )
            assert count[i] == want.shape[1]
            np.testing.assert_array_equal(listed[i, :, : count[i]], want)
            assert (listed[i, :, count[i] :] == PAGES).all()
            np.testing.assert_array_equal(mask[i], [np.isin(np.arange(PAGES), w) for w in want])


def head_operations(ops):
    """token_logprob and acceptance_overlap, traced again as HEAD_ELEMENTS may have changed."""
    if ops is TORCH:
        return ops.token_logprob, ops.acceptance_overlap
    return [
        jit(lambda *a, f=f, **k: f(*a, **k))
        for f in (in_jax.token_logprob, in_jax.acceptance_overlap)
    ]


@pytest.mark.parametrize("block", [2**24, 51 * 10, 1])  # one block, four with padding, one a token
def test_head_in_blocks(ops, block, monkeypatch):
    monkeypatch.setattr(ops.module, "HEAD_ELEMENTS", block)
    token_logprob, acceptance_overlap = head_operations(ops)
    for temperature in (0.6, 1.0, 1.3):
        ladder.check_logprob(token_logprob, temperature)
        ladder.check_overlap(acceptance_overlap, temperature)


def test_sums_over_a_real_vocabulary_lose_nothing(ops):
    """A flat distribution over 151,936 tokens, for which a running float32 sum errs by 8e-5."""
    rng = np.random.default_rng(0)
    hidden, other = rng.standard_normal((2, 8, 16), np.float32)
    head, token = rng.standard_normal((151_936, 16), np.float32) / 2, np.arange(8)
    logits = [np.float64(x) @ np.float64(head).T for x in (hidden, other)]
    want = oracles.token_logprob(logits[0], token)
    token_logprob, acceptance_overlap = head_operations(ops)
    got = token_logprob(hidden, head, token)
    np.testing.assert_allclose(got[0], want[0], atol=5e-6)
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)
    alpha, _ = acceptance_overlap(hidden, other, head, token)
    np.testing.assert_allclose(alpha, oracles.acceptance_overlap(*logits), atol=5e-6)


def test_overlap_of_equal_hidden_states_is_one(ops):
    hidden, _, head, token = ladder.head_inputs()
    alpha, _ = head_operations(ops)[1](hidden, hidden, head, token)
    ladder.close(alpha, np.ones(len(token)))


def arrays(ops, x):
    """Arguments of a differentiated operation that are constants."""
    return ladder.tensor(x) if ops is TORCH else x


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_prefill(ops, sparse):
    q, k, v = ladder.prefill_inputs(num_tokens=37)
    weight = np.random.default_rng(5).normal(size=q.shape)
    kind = {
        "budget_T": np.full(37, 2, np.int32),
        "sparse_BT": np.arange(37) >= np.array([[5], [20]]),
    }
    kind = kind if sparse else {}
    _, masks = ladder.prefill_oracle(q, k, v, *kind.values())  # the choice of pages is constant
    constants = {name: arrays(ops, x) for name, x in kind.items()}

    def f(q, k, v):
        return ops.module.flash_prefill(q, k, v, page=4, chunk=16, **constants)

    def f64(q, k, v):
        rows = [oracles.attention(q[b], k[b], v[b], masks[b])[0] for b in range(2)]
        return np.sum(np.stack(rows) * weight)

    ladder.check_gradient(ops.gradients(f, [q, k, v], [weight]), f64, [q, k, v])


def test_gradient_of_log_prob_and_entropy(ops, monkeypatch):
    monkeypatch.setattr(ops.module, "HEAD_ELEMENTS", 51 * 10)
    hidden, _, head, token = ladder.head_inputs()
    weights = np.random.default_rng(6).normal(size=(2, len(token)))

    def f(hidden, head):
        return ops.module.token_logprob(hidden, head, arrays(ops, token), temperature=0.7)

    def f64(hidden, head):
        return np.sum(oracles.token_logprob(hidden @ head.T, token, 0.7) * weights)

    ladder.check_gradient(ops.gradients(f, [hidden, head], weights), f64, [hidden, head])


def test_gradient_of_acceptance(ops):
    dense, sparse, head, token = ladder.head_inputs()
    weights = np.random.default_rng(7).normal(size=(2, len(token)))

    def f(*args):
        return ops.module.acceptance_overlap(*args, arrays(ops, token), temperature=0.7)

    def f64(dense, sparse, head):
        logits = dense @ head.T, sparse @ head.T
        logp, _ = oracles.token_logprob(logits[1], token, 0.7)
        return np.sum(np.stack([oracles.acceptance_overlap(*logits, 0.7), logp]) * weights)

    args = [dense, sparse, head]
    ladder.check_gradient(ops.gradients(f, args, weights), f64, args)
