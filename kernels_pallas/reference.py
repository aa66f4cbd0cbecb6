"""Plain-XLA versions of every kernel: the CPU path, and what the Pallas kernels are tested against.

The cache, its page table and its landmarks are laid out as layout.py describes.

Page selection follows arXiv 2606.08446, section 2. Page 0 and the last two pages of a sequence are
always read (NUM_RESERVED). Of the other pages a query reads the k with the largest dot product of
landmark and mean query of the head's group; k is the budget. common/oracles/sparse_attention.py has
the same rule in float64.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.layout import logical_pages, touched_pages
from kernels_pallas.policies import POLICIES

NUM_RESERVED = 3
MIN_STEP, MAX_STEP = 256, 2048  # tokens in a step of the online softmax of sparse_decode
NEG = -1e30
GATHER_BYTES = 2**19  # most bytes that the rows of one loop step gather
SEGMENTS = 4  # parts of a sequence in flash_prefill
QUERY_BLOCK = 256  # default number of queries handled together in flash_prefill
HEAD_ELEMENTS = 2**24  # most logits in one block of tokens x vocabulary


def select_pages(
    q_BNH, landmarks_LMKH, layer, page_table_BP, num_pages_B, k_B, *, max_selected
) -> tuple[jax.Array, jax.Array]:
    """The physical pages that each (sequence, KV head) reads, in the order of the sequence.

    q_BNH: the queries of one token per row. num_pages_B: pages of the row, a partly filled last
    page included. k_B: budget of the row, at most max_selected - 3. Scores are float32, the top-k
    is exact, and of pages with equal scores the lower one is chosen. Returns page_ids_BKJ
    (J = max_selected; the last used entry is the row's last page, unused entries are 0) and
    count_B = min(k + 3, num_pages), the number of used entries.
    """
    P = page_table_BP.shape[1]
    scores_BKP = page_scores(q_BNH, landmarks_LMKH, layer, page_table_BP)
    logical_BKJ, count_B = top_pages(scores_BKP, num_pages_B, k_B, max_selected)
    used = jnp.arange(max_selected) < count_B[:, None, None]
    physical = jnp.take_along_axis(page_table_BP[:, None], jnp.minimum(logical_BKJ, P - 1), -1)
    return jnp.where(used, physical, 0), count_B


def page_scores(q_BNH, landmarks_LMKH, layer, page_table_BP) -> jax.Array:
    """Scores [B, K, P] of pages: landmark . mean query of the group, in float32."""
    B, _, H = q_BNH.shape
    M, K = landmarks_LMKH.shape[1], math.prod(landmarks_LMKH.shape[2:]) // H
    P = page_table_BP.shape[1]
    rows = landmarks_LMKH.reshape(-1, H)
    q_XH = q_BNH.reshape(B * K, -1, H).astype(jnp.float32).mean(1)

    def score(i) -> jax.Array:
        ids_P = (page_table_BP[i // K] + layer * M) * K + i % K
        landmarks_PH = rows.at[ids_P].get(mode="promise_in_bounds")
        return landmarks_PH.astype(jnp.float32) @ q_XH[i]

    scores_XP = lax.map(score, jnp.arange(B * K), batch_size=_rows_per_step(P * H * 4))
    return scores_XP.reshape(B, K, P)


def top_pages(scores_BKP, num_pages_B, k_B, max_selected) -> tuple[jax.Array, jax.Array]:
    """Sorted logical page ids [B, K, max_selected], unused entries P; and the number used, [B]."""
    B, K, P = scores_BKP.shape
    pages, n = jnp.arange(P), num_pages_B[:, None, None]
    candidate = (pages >= 1) & (pages < n - 2)
    scores_BKP = jnp.where(candidate, scores_BKP, -jnp.inf)
    width = min(max(max_selected - NUM_RESERVED, 1), P)
    _, best = lax.top_k(scores_BKP, width)
    k = jnp.minimum(k_B, jnp.maximum(num_pages_B - NUM_RESERVED, 0))[:, None, None]
    best = jnp.where(jnp.arange(width) < k, best, P)
    first_last = jnp.stack([jnp.zeros_like(n), n - 2, n - 1], -1)[:, :, 0]
    needed = jnp.stack([n > 0, n > 2, n > 1], -1)[:, :, 0]
    reserved = jnp.where(needed, first_last, P)
    listed = jnp.concatenate([best, jnp.broadcast_to(reserved, (B, K, 3))], -1)
    listed = jnp.sort(listed, -1)[..., :max_selected]
    pad = max_selected - listed.shape[-1]
    listed = jnp.pad(listed, ((0, 0), (0, 0), (0, pad)), constant_values=P)
    return listed, jnp.minimum(k_B + NUM_RESERVED, num_pages_B)


def sparse_decode(
    q_BTNH, kv_pages_LKM, layer, page_ids, start_B, length_B
) -> tuple[jax.Array, jax.Array]:
    """Attention of T query tokens per row over listed pages; returns (out_BTNH, lse_BTN).

    out = softmax(q k^T / sqrt(H)) v in q's type and lse = log sum exp(q k^T / sqrt(H)) in float32,
    over the first length_B tokens of the listed pages. page_ids is [B, K, J], selected pages, or
    [B, P], the page table itself (dense decode, for which no list is made). length_B counts the
    tokens of the listed pages, (count - 1) C + tokens in the last page; start_B counts those before
    the first query. Query t reads the first min(start + t + 1, length) tokens, so that new tokens
    attend causally to each other; a selected list has them in its last pages. Rows of length 0 give
    0 and lse = -inf. A row takes time by its own length, not by the width of page_ids.
    """
    B, T, N, H = q_BTNH.shape
    _, K, M, _, C, _ = logical_pages(kv_pages_LKM, H).shape
    pool = kv_pages_LKM.reshape(-1, C * H)  # page i: keys in row 2 i, values in row 2 i + 1
    width = page_ids.shape[-1]
    step = min(width, max(1, MIN_STEP // C, min(width // 2, MAX_STEP // C)))
    page_ids = jnp.pad(page_ids, [(0, 0)] * (page_ids.ndim - 1) + [(0, -width % step)])
    q_XH = q_BTNH.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B * K, -1, H)
    query = jnp.repeat(jnp.arange(T), N // K)

    def read(rows) -> jax.Array:
        return pool.at[rows].get(mode="promise_in_bounds").reshape(-1, H).astype(jnp.float32)

    def attend(i) -> tuple[jax.Array, jax.Array]:
        b, k = i // K, i % K
        ids_J = page_ids[b] if page_ids.ndim == 2 else page_ids[b, k]
        ids_J = 2 * (ids_J + (layer * K + k) * M)
        q = q_XH[i].astype(jnp.float32) * H**-0.5
        num_full = length_B[b] // C
        limit = jnp.minimum(start_B[b] + query + 1, length_B[b])
        # Entries past the full pages become the first page: its finite numbers get weight 0.
        full_J = jnp.where(jnp.arange(ids_J.shape[0]) < num_full, ids_J, ids_J[0])
        tail = lax.dynamic_slice_in_dim(ids_J, jnp.minimum(num_full, width - 1), 1)
        index = num_full * C + jnp.arange(C)
        value = jnp.where((index < length_B[b])[:, None], read(tail + 1), 0)
        state = _attend_more(_nothing(q), q, read(tail), value, index < limit[:, None])

        def chunk(state) -> tuple[Any, ...]:
            j, *state = state
            rows = lax.dynamic_slice_in_dim(full_J, j * step, step)
            index = j * step * C + jnp.arange(step * C)
            visible = index < jnp.minimum(limit, num_full * C)[:, None]
            return j + 1, *_attend_more(state, q, read(rows), read(rows + 1), visible)

        _, m, denom, acc = lax.while_loop(lambda s: s[0] * step < num_full, chunk, (0, *state))
        nonempty = denom > 0
        denom = jnp.where(nonempty, denom, 1)
        return acc / denom[:, None], jnp.where(nonempty, m + jnp.log(denom), -jnp.inf)

    bytes_per_row = step * 2 * C * H * kv_pages_LKM.dtype.itemsize
    out, lse = lax.map(attend, jnp.arange(B * K), batch_size=_rows_per_step(bytes_per_row))
    out = out.reshape(B, K, T, N // K, H).swapaxes(1, 2).reshape(B, T, N, H)
    lse = lse.reshape(B, K, T, N // K).swapaxes(1, 2).reshape(B, T, N)
    return out.astype(q_BTNH.dtype), lse


def _nothing(q_XH) -> tuple[jax.Array, jax.Array, jax.Array]:
    """State of the online softmax before the first key: (max, denominator, weighted values)."""
    rows = q_XH.shape[0]
    return jnp.full(rows, NEG), jnp.zeros(rows), jnp.zeros(q_XH.shape)


def _attend_more(
    state, q_XH, key_SH, value_SH, visible_XS
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state of the online softmax after further keys; masked keys have weight 0."""
    m, denom, acc = state
    s = jnp.where(visible_XS, q_XH @ key_SH.T, NEG)
    m_new = jnp.maximum(m, s.max(-1))
    p = jnp.where(visible_XS, jnp.exp(s - m_new[:, None]), 0)
    scale = jnp.exp(m - m_new)
    return m_new, denom * scale + p.sum(-1), acc * scale[:, None] + p @ value_SH


def _rows_per_step(bytes_per_row) -> int | None:
    """Rows that a loop handles together: at most 32, and GATHER_BYTES; None for one at a time."""
    rows = min(32, GATHER_BYTES // max(bytes_per_row, 1))
    return rows if rows > 1 else None


def append_kv(
    kv_pages_LKM, landmarks_LMKH, layer, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B
) -> tuple[jax.Array, jax.Array]:
    """The pool and the landmarks with T new tokens per row; in place where the caller donates them.

    Row b writes tokens 0 .. num_new - 1 at positions start .. start + num_new - 1. Other tokens,
    and those past the page table, go to the null page. A page that a new token completes gets its
    landmark: the float32 mean of its C keys, rounded to the landmarks' type.
    """
    B, T, K, H = k_BTKH.shape
    kv_pages_LKMxCH = logical_pages(kv_pages_LKM, H)
    C = kv_pages_LKMxCH.shape[4]
    P = page_table_BP.shape[1]
    position_BT = start_B[:, None] + jnp.arange(T)
    valid_BT = (jnp.arange(T) < num_new_B[:, None]) & (position_BT < P * C)
    logical = jnp.minimum(position_BT // C, P - 1)
    page_BT = jnp.where(valid_BT, jnp.take_along_axis(page_table_BP, logical, 1), 0)
    kv_BTKxH = jnp.stack([k_BTKH, v_BTKH], 3).astype(kv_pages_LKMxCH.dtype)
    kv_pages_LKMxCH = kv_pages_LKMxCH.at[layer, :, page_BT, :, position_BT % C].set(kv_BTKxH)

    page_BQ = start_B[:, None] // C + jnp.arange(touched_pages(T, C))
    last_BQ = (page_BQ + 1) * C
    end_B = start_B + num_new_B
    complete = (last_BQ > start_B[:, None]) & (last_BQ <= end_B[:, None]) & (page_BQ < P)
    page_BQ = jnp.take_along_axis(page_table_BP, jnp.minimum(page_BQ, P - 1), 1)
    page_BQ = jnp.where(complete, page_BQ, 0)
    keys_BQKCH = kv_pages_LKMxCH[layer, :, page_BQ, 0]
    mean_BQKH = keys_BQKCH.astype(jnp.float32).mean(3).astype(landmarks_LMKH.dtype)
    mean = mean_BQKH.reshape(*page_BQ.shape, *landmarks_LMKH.shape[2:])
    landmarks_LMKH = landmarks_LMKH.at[layer, page_BQ].set(mean)
    return kv_pages_LKMxCH.reshape(kv_pages_LKM.shape), landmarks_LMKH


def flash_prefill(
    q_BTNH, k_BTKH, v_BTKH, *, budget_T=None, sparse_BT=None, page=16, chunk=QUERY_BLOCK,
    policy="mean",
) -> jax.Array:  # fmt: skip
    """Causal attention over whole sequences, dense or with the pages of sparse decode (replay).

    Returns out_BTNH. budget_T: int32 [T], the budget k at each query position; None = dense.
    sparse_BT: bool [B, T], the queries that read exactly the pages that decode would have read at
    their position; all others are dense. policy names another rule of policies.py that ranks
    pages. Differentiable in q, k and v; the choice of pages is a constant. The sequence is cut into
    SEGMENTS that read keys up to their own end only, and these into blocks of at most `chunk`
    queries that the backward pass recomputes, so that memory is B x N x chunk x T numbers.
    """
    T = q_BTNH.shape[1]
    k_BKSH, v_BKSH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    replay = None
    if budget_T is not None:
        budget_T, sparse_BT = jnp.asarray(budget_T), jnp.asarray(sparse_BT, bool)
        rule = POLICIES[policy]
        replay = (rule, rule.summary(k_BTKH, page), budget_T, sparse_BT, page)
    length = -(-T // (SEGMENTS * page)) * page
    out = []
    for start in range(0, T, length):
        stop = min(start + length, T)
        keys, values = k_BKSH[:, :, :stop], v_BKSH[:, :, :stop]

        def block(first, q_BtNH, keys=keys, values=values) -> jax.Array:
            return _attend_block(first, q_BtNH, keys, values, replay)

        out.append(_map_queries(jax.checkpoint(block), start, q_BTNH[:, start:stop], chunk))
    return jnp.concatenate(out, 1)


def _map_queries(block, start, q_BtNH, chunk) -> jax.Array:
    """Apply block(position of its first query, queries) to at most `chunk` queries at a time."""
    B, t, N, H = q_BtNH.shape
    if t <= chunk:
        return block(start, q_BtNH)
    pad = -t % chunk
    blocks = jnp.pad(q_BtNH, ((0, 0), (0, pad), (0, 0), (0, 0)))
    blocks = blocks.reshape(B, -1, chunk, N, H).swapaxes(0, 1)
    firsts = start + jnp.arange(len(blocks)) * chunk
    out = lax.map(lambda x: block(*x), (firsts, blocks))
    return out.swapaxes(0, 1).reshape(B, t + pad, N, H)[:, :t]


def _attend_block(first, q_BtNH, k_BKSH, v_BKSH, replay) -> jax.Array:
    """Causal attention of queries first, first + 1, ... to the given keys, or to some pages."""
    B, t, N, H = q_BtNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BKRtH = q_BtNH.reshape(B, t, K, N // K, H).transpose(0, 2, 3, 1, 4)
    pos_t = first + jnp.arange(t)
    mask = (jnp.arange(S) <= pos_t[:, None])[None, None]
    if replay is not None:
        mask = mask & _replay_mask(q_BKRtH, k_BKSH, pos_t, *replay)
    q_BKnH = q_BKRtH.reshape(B, K, -1, H)
    s = jnp.einsum("bknh,bksh->bkns", q_BKnH, k_BKSH, preferred_element_type=jnp.float32)
    s = jnp.where(mask[:, :, None], s.reshape(B, K, -1, t, S) * H**-0.5, NEG)
    p = jax.nn.softmax(s, -1).astype(v_BKSH.dtype).reshape(B, K, -1, S)
    out = jnp.einsum("bkns,bksh->bknh", p, v_BKSH)
    return out.reshape(B, K, -1, t, H).transpose(0, 3, 1, 2, 4).reshape(B, t, N, H)


def _replay_mask(q_BKRtH, k_BKSH, pos_t, rule, summary, budget_T, sparse_BT, page) -> jax.Array:
    """Keys that a replay reads at positions pos_t, bool [B, K, t, S]."""
    num_keys = k_BKSH.shape[2]
    num_pages = -(-num_keys // page)
    summary = jax.tree.map(lambda x_BKP: x_BKP[:, :, :num_pages], summary)
    scores = rule.scores(q_BKRtH.astype(jnp.float32), summary, k_BKSH, pos_t, page)
    pages = replayed_pages(lax.stop_gradient(scores), pos_t, budget_T, sparse_BT, page)
    return jnp.repeat(pages, page, -1)[..., :num_keys]


def replayed_pages(scores_BKtP, pos_t, budget_T, sparse_BT, page) -> jax.Array:
    """Pages that decode read at positions pos_t, bool [B, K, t, P]; all pages if not sparse.

    Past the end of budget_T the last budget holds.
    """
    budget_t = budget_T[jnp.minimum(pos_t, budget_T.shape[0] - 1)]
    pages = page_mask(scores_BKtP, pos_t // page + 1, budget_t)
    sparse_Bt = sparse_BT[:, jnp.minimum(pos_t, sparse_BT.shape[1] - 1)]
    return pages | ~sparse_Bt[:, None, :, None]


def page_mask(scores_BKtP, num_pages_t, budget_t) -> jax.Array:
    """Whether a query reads a page, bool [B, K, t, P]: reserved pages and the top-k of the rest."""
    P = scores_BKtP.shape[-1]
    pages, n, k = jnp.arange(P), num_pages_t[:, None], budget_t[:, None]
    candidate = (pages >= 1) & (pages < n - 2)
    scores = jnp.where(candidate, scores_BKtP, -jnp.inf)
    kth_index = jnp.broadcast_to(jnp.clip(P - k, 0, P - 1), (*scores.shape[:-1], 1))
    kth = jnp.take_along_axis(jnp.sort(scores, -1), kth_index, -1)
    above, equal = scores > kth, scores == kth
    room = k - above.sum(-1, keepdims=True)
    chosen = candidate & (k > 0) & (above | (equal & (jnp.cumsum(equal, -1) <= room)))
    reserved = (pages < n) & ((pages == 0) | (pages >= n - 2))
    return chosen | reserved


def token_logprob(hidden_XD, head_VD, token_X, *, temperature=1.0) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each token, and the entropy of softmax(head . hidden / temperature), both [X].

    Float32, in nats, differentiable. Tokens are handled in blocks, so that no array [X, V] exists.
    """

    def block(hidden_cD, token_c) -> tuple[jax.Array, jax.Array]:
        logp = jax.nn.log_softmax(_logits(hidden_cD, head_VD) / temperature)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        return jnp.take_along_axis(logp, token_c[:, None], -1)[:, 0], entropy

    return _blocks(block, head_VD.shape[0], hidden_XD, token_X)


def acceptance_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, token_X, *, temperature=1.0
) -> tuple[jax.Array, jax.Array]:
    """alpha = sum_v min(p_dense, p_sparse), the acceptance rate, and log p_sparse of the token."""

    def block(dense_cD, sparse_cD, token_c) -> tuple[jax.Array, jax.Array]:
        p_dense = jax.nn.softmax(_logits(dense_cD, head_VD) / temperature)
        logp_sparse = jax.nn.log_softmax(_logits(sparse_cD, head_VD) / temperature)
        alpha = jnp.minimum(p_dense, jnp.exp(logp_sparse)).sum(-1)
        return alpha, jnp.take_along_axis(logp_sparse, token_c[:, None], -1)[:, 0]

    return _blocks(block, head_VD.shape[0], hidden_dense_XD, hidden_sparse_XD, token_X)


def topk_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, *, temperature=1.0, top=20
) -> jax.Array:
    """Lower bound of alpha: the sum of min(p_dense, p_sparse) over tokens in the top of both."""

    def block(dense_cD, sparse_cD) -> jax.Array:
        lists = (
            lax.top_k(jax.nn.log_softmax(_logits(x, head_VD) / temperature), top)
            for x in (dense_cD, sparse_cD)
        )
        (dense_cJ, ids_cJ), (sparse_cJ, others_cJ) = lists
        same_cJJ = ids_cJ[:, :, None] == others_cJ[:, None]
        smaller_cJJ = jnp.exp(jnp.minimum(dense_cJ[:, :, None], sparse_cJ[:, None]))
        return jnp.where(same_cJJ, smaller_cJJ, 0).sum((1, 2))

    return _blocks(block, head_VD.shape[0], hidden_dense_XD, hidden_sparse_XD)


def _logits(hidden_XD, head_VD) -> jax.Array:
    return jnp.einsum("xd,vd->xv", hidden_XD, head_VD, preferred_element_type=jnp.float32)


def _blocks(f, vocab, *arrays) -> Any:
    """Apply f to blocks of at most HEAD_ELEMENTS / V rows; the backward pass recomputes them."""
    num = arrays[0].shape[0]
    size = max(1, min(num, HEAD_ELEMENTS // vocab))
    pad = -num % size
    blocked = [
        jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, size, *a.shape[1:])
        for a in arrays
    ]
    out = lax.map(jax.checkpoint(lambda xs: f(*xs)), tuple(blocked))
    return jax.tree.map(lambda a: a.reshape(-1)[:num], out)
