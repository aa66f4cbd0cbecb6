"""Deliberate faults that the comparisons of ladder.py must reject."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import reference as ops
from tests.kernels import ladder
from tests.kernels.test_reference import JAX as reference

LENGTHS = [0, 1, 4, 5, 21, 43]
K = [2] * len(LENGTHS)


def rejects(check, *args, **kwargs):
    with pytest.raises(AssertionError):
        check(*args, **kwargs)


def dropped_page(q, kv, layer, ids, start, length):
    """The second listed page is left out."""
    C, more = kv.shape[4], length > kv.shape[4]
    ids = np.concatenate([ids[..., :1], ids[..., 2:], ids[..., :1]], -1)
    return reference.sparse_decode(q, kv, layer, ids, start - C * more, length - C * more)


def dropped_last_key(q, kv, layer, ids, start, length):
    return reference.sparse_decode(
        q, kv, layer, ids, start, np.maximum(length - 1, np.minimum(length, 1))
    )


def length_one_too_long(q, kv, layer, ids, start, length):
    return reference.sparse_decode(q, kv, layer, ids, start + 1, length + 1)


def missing_first_page(q, kv, layer, ids, start, length):
    C, more = kv.shape[4], length > kv.shape[4]
    ids = np.where(more[:, None, None], np.roll(ids, -1, -1), ids)
    return reference.sparse_decode(q, kv, layer, ids, start - C * more, length - C * more)


def scale_by_head_dim(q, kv, *rest):
    return reference.sparse_decode(q * q.shape[-1] ** -0.5, kv, *rest)


def lse_without_max(q, kv, layer, ids, start, length):
    """The maximum is not added back to the log-sum-exp; the output stays correct."""
    out, lse = reference.sparse_decode(q, kv, layer, ids, start, length)
    top = []
    for b, n in enumerate(length):
        pages = np.repeat(ids[b], kv.shape[4], -1)[:, :n]
        slots = np.arange(n) % kv.shape[4]
        keys = np.stack([kv[layer, k, pages[k], 0, slots] for k in range(len(pages))])
        queries = q[b].reshape(q.shape[1], len(pages), -1, q.shape[-1])
        s = np.einsum("tkrh,ksh->tkrs", queries, keys) * q.shape[-1] ** -0.5
        top.append(np.max(s, -1, initial=-1e30).reshape(q.shape[1], -1))
    return out, lse - np.where(np.isfinite(lse), np.stack(top), 0)


def wrong_kv_head(q, kv, layer, ids, start, length):
    """Query head n reads KV head n % K instead of n // R."""
    shape, K = q.shape, kv.shape[1]
    R = shape[2] // K
    q = q.reshape(*shape[:2], R, K, -1).swapaxes(2, 3).reshape(shape)
    out, lse = reference.sparse_decode(q, kv, layer, ids, start, length)
    out = out.reshape(*shape[:2], K, R, -1).swapaxes(2, 3).reshape(shape)
    return out, lse.reshape(*shape[:2], K, R).swapaxes(2, 3).reshape(shape[:3])


def first_layer(q, kv, layer, *rest):
    return reference.sparse_decode(q, kv, layer - 1, *rest)


def heads_of_one_list(q, kv, layer, ids, start, length):
    """All KV heads read the pages of head 0."""
    return reference.sparse_decode(
        q, kv, layer, np.repeat(ids[:, :1], ids.shape[1], 1), start, length
    )


@pytest.mark.parametrize("fault", [
    dropped_page, dropped_last_key, length_one_too_long, missing_first_page, scale_by_head_dim,
    lse_without_max, wrong_kv_head, first_layer, heads_of_one_list,
])  # fmt: skip
def test_decode(fault):
    case = ladder.make_paged(LENGTHS)
    q = ladder.random_queries(case, 1, 3)
    rejects(ladder.check_decode, fault, case, q, 1, K, 5)


def test_lse_without_max_gives_the_right_output():
    case = ladder.make_paged([21, 43])
    q = ladder.random_queries(case, 1, 3)
    pages = np.tile(case.table_BP[:, None], (1, 2, 1))
    args = q, case.kv_pages, ladder.LAYER, pages, case.length_B - 1, case.length_B
    good, bad = reference.sparse_decode(*args), lse_without_max(*args)
    np.testing.assert_array_equal(good[0], bad[0])
    assert np.abs(good[1] - bad[1]).max() > 0.1


@pytest.mark.parametrize("shift", [-1, 1])
def test_causal_limit_among_new_tokens(shift):
    def fault(q, kv, layer, ids, start, length):
        return reference.sparse_decode(q, kv, layer, ids, start + shift, length)

    case = ladder.make_paged([9, 21, 43])
    rejects(ladder.check_decode, fault, case, ladder.random_queries(case, 3, 2), 3)


def higher_page_on_ties(q, landmarks, layer, table, n, k, *, max_selected):
    """Of pages with equal scores the higher one is chosen."""
    ids = np.array(
        reference.select_pages(q, landmarks, layer, table, n, k, max_selected=max_selected)[0]
    )
    for b, pages in enumerate(n):
        if pages > k[b] + 3:  # all tie: the k candidates nearest to the end
            chosen = [0, *range(pages - 2 - k[b], pages)]
            ids[b, :, : k[b] + 3] = table[b][chosen]
    return ids, np.minimum(k + 3, n)


def shifted_candidates(q, landmarks, layer, table, n, k, *, max_selected):
    """Every page has the score of the next page."""
    landmarks = np.array(landmarks)
    landmarks[:, table[:, :-1]] = landmarks[:, table[:, 1:]]
    return reference.select_pages(q, landmarks, layer, table, n, k, max_selected=max_selected)


def first_head_of_group(q, landmarks, *rest, max_selected):
    """The group's first query instead of its mean."""
    heads = q.reshape(q.shape[0], landmarks.shape[2], -1, q.shape[-1])
    q = np.broadcast_to(heads[:, :, :1], heads.shape).reshape(q.shape)
    return reference.select_pages(q, landmarks, *rest, max_selected=max_selected)


def page_too_few(q, landmarks, layer, table, n, k, *, max_selected):
    return reference.select_pages(q, landmarks, layer, table, n, k - 1, max_selected=max_selected)


def first_page_not_reserved(q, landmarks, layer, table, n, k, *, max_selected):
    ids, count = reference.select_pages(q, landmarks, layer, table, n, k, max_selected=max_selected)
    return np.where(np.arange(max_selected) == 0, table[:, 1, None, None], ids), count


def logical_ids(q, landmarks, layer, table, n, k, *, max_selected):
    """The page table is not applied."""
    same = np.broadcast_to(np.arange(table.shape[1], dtype=np.int32), table.shape)
    marks = np.array(landmarks)
    rows = []
    for b in range(len(table)):
        marks[:, : table.shape[1]] = landmarks[:, table[b]]
        row = slice(b, b + 1)
        args = q[row], marks, layer, same[row], n[row], k[row]
        rows.append(reference.select_pages(*args, max_selected=max_selected))
    return np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])


@pytest.mark.parametrize("fault", [
    higher_page_on_ties, shifted_candidates, first_head_of_group, page_too_few,
    first_page_not_reserved, logical_ids,
])  # fmt: skip
def test_select(fault):
    case = ladder.make_paged([21, 43, 44], equal=fault is higher_page_on_ties)
    q = np.round(4 * ladder.random_queries(case, 1, 3)[:, 0]) / 4
    rejects(ladder.check_select, fault, case, q, [2, 2, 3], 6)


def sum_as_landmark(kv, landmarks, layer, *rest):
    kv, new = reference.append_kv(kv, landmarks, layer, *rest)
    return kv, jnp.where(jnp.isnan(landmarks), new * kv.shape[4], landmarks)


def stale_landmark(kv, landmarks, *rest):
    return reference.append_kv(kv, landmarks, *rest)[0], landmarks


def early_landmark(kv, landmarks, layer, k, v, table, start, new):
    """A landmark is written when a page gets its first token instead of its last."""
    C = kv.shape[4]
    kv, landmarks = reference.append_kv(kv, landmarks, layer, k, v, table, start, new)
    for b in np.flatnonzero((new > 0) & (start % C == 0)):
        landmarks = landmarks.at[layer, table[b, start[b] // C]].set(k[b, 0])
    return kv, landmarks


def one_landmark_per_call(kv, landmarks, layer, k, v, table, start, new):
    """Only the first page that a call completes gets its landmark."""
    kv, after = reference.append_kv(kv, landmarks, layer, k, v, table, start, new)
    for b, page in enumerate(start // kv.shape[4] + 1):
        after = after.at[layer, table[b, page]].set(landmarks[layer, table[b, page]])
    return kv, after


def padding_is_written(kv, landmarks, layer, k, v, table, start, new):
    full = np.minimum(k.shape[1], table.shape[1] * kv.shape[4] - start)
    return reference.append_kv(kv, landmarks, layer, k, v, table, start, full.astype(np.int32))


def keys_and_values_swapped(kv, landmarks, layer, k, v, *rest):
    return reference.append_kv(kv, landmarks, layer, v, k, *rest)


def all_layers(kv, landmarks, layer, *rest):
    return reference.append_kv(*reference.append_kv(kv, landmarks, layer, *rest), layer - 1, *rest)


@pytest.mark.parametrize("fault", [
    sum_as_landmark, stale_landmark, early_landmark, one_landmark_per_call, padding_is_written,
    keys_and_values_swapped, all_layers,
])  # fmt: skip
def test_append(fault):
    rejects(ladder.check_append, fault, [[5, 9, 1], [9, 1, 6], [1, 9, 4]])


def prompt_treated_as_sparse(q, k, v, *, sparse_BT, **kwargs):
    return ops.flash_prefill(q, k, v, sparse_BT=np.ones_like(sparse_BT), **kwargs)


def prompt_one_longer(q, k, v, *, sparse_BT, **kwargs):
    return ops.flash_prefill(q, k, v, sparse_BT=np.roll(sparse_BT, 1, 1), **kwargs)


def prompt_length_alone(q, k, v, *, sparse_BT, **kwargs):
    """Every query after the first sparse one is sparse."""
    return ops.flash_prefill(q, k, v, sparse_BT=np.maximum.accumulate(sparse_BT, 1), **kwargs)


def budget_of_next_position(q, k, v, *, budget_T, **kwargs):
    return ops.flash_prefill(q, k, v, budget_T=np.append(budget_T[1:], budget_T[-1:]), **kwargs)


def dense_replay(q, k, v, *, budget_T, sparse_BT, **kwargs):
    return ops.flash_prefill(q, k, v, **kwargs)


def mask_shifted_by_a_page(q, k, v, **kwargs):
    """Each query reads the page after the one it chose (0 and the last two stay)."""
    choose = ops.page_mask

    def fault(scores, n, budget):
        pages, n_t = jnp.arange(scores.shape[-1]), n[:, None]
        chosen = jnp.roll(choose(scores, n, budget), 1, -1) & (pages < n_t)
        return chosen | (pages == 0) & (n_t > 0) | (pages >= n_t - 2) & (pages < n_t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "page_mask", fault)
        return ops.flash_prefill(q, k, v, **kwargs)


def sees_future_pages(q, k, v, **kwargs):
    """Pages that complete only later can be chosen."""
    choose = ops.page_mask
    last = -(-k.shape[1] // kwargs["page"])

    def fault(scores, n, budget):
        return choose(scores, jnp.full_like(n, last), budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "page_mask", fault)
        return ops.flash_prefill(q, k, v, **kwargs)


@pytest.mark.parametrize("fault", [
    prompt_treated_as_sparse, prompt_one_longer, prompt_length_alone, budget_of_next_position,
    dense_replay,
    mask_shifted_by_a_page, sees_future_pages,
])  # fmt: skip
def test_replay(fault):
    q, k, v = ladder.prefill_inputs(num_tokens=45)
    budgets = np.array([0, 1, 3], np.int32)[np.arange(45) // 15]
    sparse = np.arange(45) >= np.array([[17], [25]])
    sparse[1] &= np.arange(45) % 11 != 3
    rejects(ladder.check_prefill, fault, q, k, v, budgets, sparse)


def one_key_of_the_future(q, k, v, **kwargs):
    """Query t sees key t + 1."""
    wide = np.concatenate([k[:, 1:], k[:, -1:]], 1), np.concatenate([v[:, 1:], v[:, -1:]], 1)
    return ops.flash_prefill(q, *wide, **kwargs)


def head_order(q, k, v, **kwargs):
    """Query head n reads KV head n % K."""
    return ops.flash_prefill(q, k[:, :, ::-1], v[:, :, ::-1], **kwargs)


def prefill_scale(q, k, v, **kwargs):
    return ops.flash_prefill(q * q.shape[-1] ** -0.5, k, v, **kwargs)


@pytest.mark.parametrize("fault", [one_key_of_the_future, head_order, prefill_scale])
def test_prefill(fault):
    rejects(ladder.check_prefill, fault, *ladder.prefill_inputs(num_tokens=45))


def test_head():
    def no_temperature(f):
        return lambda *args, temperature: f(*args)

    def next_token(f):
        return lambda *args, **kwargs: f(*args[:-1], np.roll(args[-1], 1), **kwargs)

    def swapped(dense, sparse, *rest, **kwargs):
        return ops.acceptance_overlap(sparse, dense, *rest, **kwargs)

    rejects(ladder.check_logprob, no_temperature(ops.token_logprob), 0.6)
    rejects(ladder.check_overlap, no_temperature(ops.acceptance_overlap), 0.6)
    rejects(ladder.check_logprob, next_token(ops.token_logprob), 1.0)
    rejects(ladder.check_overlap, next_token(ops.acceptance_overlap), 1.0)
    rejects(ladder.check_overlap, swapped, 1.0)


def test_gradient():
    x = np.arange(3.0)
    ladder.check_gradient([np.cos(x)], lambda x: np.sum(np.sin(x)), [x])
    rejects(ladder.check_gradient, [np.cos(x) / 2], lambda x: np.sum(np.sin(x)), [x])
