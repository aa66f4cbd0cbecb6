"""Plain-torch versions of every kernel: the CPU path, and what Triton kernels are tested against.

The cache, its page table and its landmarks are laid out as layout.py describes.

Page selection follows arXiv 2606.08446, section 2. Page 0 and the last two pages of a sequence are
always read (NUM_RESERVED). Of the other pages a query reads the k with the largest dot product of
landmark and mean query of the head's group; k is the budget. common/oracles/sparse_attention.py has
the same rule in float64, kernels_pallas/reference.py the same functions in JAX.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from kernels_triton.layout import touched_pages
from kernels_triton.policies import POLICIES

NUM_RESERVED = 3
NEG = -1e30
STEP_TOKENS = 2048  # most tokens in a step of the online softmax of sparse_decode
GATHER_NUMBERS = 2**21  # most numbers that one group of rows gathers
QUERY_BLOCK = 256  # default number of queries handled together in flash_prefill
HEAD_ELEMENTS = 2**24  # most logits in one block of tokens x vocabulary


def select_pages(
    q_BNH, landmarks_LMKH, layer, page_table_BP, num_pages_B, k_B, *, max_selected
) -> tuple[torch.Tensor, torch.Tensor]:
    """The physical pages that each (sequence, KV head) reads, in the order of the sequence.

    q_BNH: the queries of one token per row. num_pages_B: pages of the row, a partly filled last
    page included. k_B: budget of the row, at most max_selected - 3. Scores are float32, the top-k
    is exact, and of pages with equal scores the lower one is chosen. Returns page_ids_BKJ
    (J = max_selected; the last used entry is the row's last page, unused entries are 0) and
    count_B = min(k + 3, num_pages), the number of used entries; both int32.
    """
    B, K, P = q_BNH.shape[0], landmarks_LMKH.shape[2], page_table_BP.shape[1]
    used_BP = torch.arange(P, device=q_BNH.device) < num_pages_B[:, None]
    scores_BKP = page_scores(q_BNH, landmarks_LMKH, layer, torch.where(used_BP, page_table_BP, 0))
    logical_BKJ, count_B = top_pages(scores_BKP, num_pages_B, k_B, max_selected)
    used = torch.arange(max_selected, device=q_BNH.device) < count_B[:, None, None]
    table_BKP = page_table_BP[:, None].expand(B, K, P)
    physical = table_BKP.gather(2, logical_BKJ.clamp(max=P - 1))
    return torch.where(used, physical, 0).int(), count_B.int()


def page_scores(q_BNH, landmarks_LMKH, layer, page_table_BP) -> torch.Tensor:
    """Scores [B, K, P] of pages: landmark . mean query of the group, in float32."""
    B, _, H = q_BNH.shape
    K, P = landmarks_LMKH.shape[2], page_table_BP.shape[1]
    q_BKH = q_BNH.reshape(B, K, -1, H).float().mean(2)
    return torch.cat(
        [
            torch.einsum("bkh,bpkh->bkp", q_bKH, landmarks_LMKH[layer, table_bP].float())
            for q_bKH, table_bP in _groups(P * K * H, q_BKH, page_table_BP)
        ]
    )


def top_pages(scores_BKP, num_pages_B, k_B, max_selected) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted logical page ids [B, K, max_selected], unused entries P; and the number used, [B]."""
    B, K, P = scores_BKP.shape
    pages, n = torch.arange(P, device=scores_BKP.device), num_pages_B.long()[:, None, None]
    candidate = (pages >= 1) & (pages < n - 2)
    scores_BKP = torch.where(candidate, scores_BKP, -torch.inf)
    # A stable sort keeps the lower of two pages with equal scores first; torch.topk need not.
    best = torch.sort(scores_BKP, dim=-1, descending=True, stable=True).indices
    best = best[..., : max(max_selected - NUM_RESERVED, 1)]
    k = torch.minimum(k_B.long(), (num_pages_B.long() - NUM_RESERVED).clamp(min=0))
    rank = torch.arange(best.shape[-1], device=best.device)
    best = torch.where(rank < k[:, None, None], best, P)
    first_last = torch.stack([torch.zeros_like(n), n - 2, n - 1], -1)[:, :, 0]
    needed = torch.stack([n > 0, n > 2, n > 1], -1)[:, :, 0]
    reserved = torch.where(needed, first_last, P).expand(B, K, NUM_RESERVED)
    listed = torch.cat([best, reserved], -1).sort(-1).values[..., :max_selected]
    pad = max_selected - listed.shape[-1]
    listed = torch.nn.functional.pad(listed, (0, pad), value=P)
    return listed, torch.minimum(k_B.long() + NUM_RESERVED, num_pages_B.long())


def sparse_decode(
    q_BTNH, kv_pages_LKMxCH, layer, page_ids, start_B, length_B
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of T query tokens per row over listed pages; returns (out_BTNH, lse_BTN).

    out = softmax(q k^T / sqrt(H)) v in q's type and lse = log sum exp(q k^T / sqrt(H)) in float32,
    over the first length_B tokens of the listed pages. page_ids is [B, K, J], selected pages, or
    [B, P], the page table itself (dense decode, for which no list is made). length_B counts the
    tokens of the listed pages, (count - 1) C + tokens in the last page; start_B counts those before
    the first query. Query t reads the first min(start + t + 1, length) tokens, so that new tokens
    attend causally to each other; a selected list has them in its last pages. Rows of length 0 give
    0 and lse = -inf. Time follows the longest of the rows handled together, not page_ids' width.
    """
    B, T, N, H = q_BTNH.shape
    K, C = kv_pages_LKMxCH.shape[1], kv_pages_LKMxCH.shape[4]
    if page_ids.ndim == 2:
        page_ids = page_ids[:, None].expand(-1, K, -1)
    q_BKXH = q_BTNH.float().reshape(B, T, K, -1, H).transpose(1, 2).reshape(B, K, -1, H)
    limit_BT = start_B[:, None] + torch.arange(T, device=q_BTNH.device) + 1
    limit_BX = torch.minimum(limit_BT, length_B[:, None]).repeat_interleave(N // K, 1)
    pages = min(page_ids.shape[2], max(1, STEP_TOKENS // C))
    rows = _groups(2 * K * pages * C * H, q_BKXH * H**-0.5, page_ids, limit_BX, length_B)
    parts = [_attend_rows(kv_pages_LKMxCH[layer], pages, *row) for row in rows]
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    out = out.reshape(B, K, T, N // K, H).transpose(1, 2).reshape(B, T, N, H)
    return out.to(q_BTNH.dtype), lse.reshape(B, K, T, N // K).transpose(1, 2).reshape(B, T, N)


def _groups(numbers_per_row, *arrays) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equal groups of rows of all arrays; a group gathers at most GATHER_NUMBERS numbers."""
    size = max(1, GATHER_NUMBERS // numbers_per_row)
    return zip(*(x.split(size) for x in arrays), strict=True)


def _attend_rows(
    kv_KMxCH, pages_per_step, q_BKXH, page_ids_BKJ, limit_BX, length_B
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, K, X, H] and log-sum-exp [B, K, X] of some rows, pages_per_step at a time."""
    B, K, _, H = q_BKXH.shape
    C, device = kv_KMxCH.shape[3], q_BKXH.device
    heads = torch.arange(K, device=device)[None, :, None]
    m = torch.full(q_BKXH.shape[:3], NEG, device=device)
    state = m, torch.zeros_like(m), torch.zeros_like(q_BKXH)
    num_pages = -(-int(length_B.max()) // C)
    for first in range(0, num_pages, pages_per_step):
        last = min(first + pages_per_step, num_pages)
        index = first * C + torch.arange((last - first) * C, device=device)
        inside_BS = index < length_B[:, None]
        ids = torch.where(inside_BS[:, None, ::C], page_ids_BKJ[:, :, first:last], 0)
        key, value = kv_KMxCH[heads, ids.long()].float().unbind(3)
        inside = inside_BS[:, None, :, None]  # memory past the end may be NaN
        key = torch.where(inside, key.reshape(B, K, -1, H), 0)
        value = torch.where(inside, value.reshape(B, K, -1, H), 0)
        state = _attend_more(state, q_BKXH, key, value, (index < limit_BX[..., None])[:, None])
    m, denom, acc = state
    nonempty = denom > 0
    denom = torch.where(nonempty, denom, 1)
    return acc / denom[..., None], torch.where(nonempty, m + denom.log(), -torch.inf)


def _attend_more(
    state, q_BKXH, key_BKSH, value_BKSH, visible_B1XS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state (max, denominator, weighted values) after further keys; masked ones weigh 0."""
    m, denom, acc = state
    s = torch.where(visible_B1XS, q_BKXH @ key_BKSH.mT, NEG)
    m_new = torch.maximum(m, s.amax(-1))
    p = torch.where(visible_B1XS, (s - m_new[..., None]).exp(), 0)
    scale = (m - m_new).exp()
    return m_new, denom * scale + p.sum(-1), acc * scale[..., None] + p @ value_BKSH


def append_kv(
    kv_pages_LKMxCH, landmarks_LMKH, layer, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write T new tokens per row into the pool, in place; returns the pool and the landmarks.

    Row b writes tokens 0 .. num_new - 1 at positions start .. start + num_new - 1. Other tokens,
    and those past the page table, go to the null page. A page that a new token completes gets its
    landmark: the float32 mean of its C keys, rounded to the landmarks' type.
    """
    T = k_BTKH.shape[1]
    C, P = kv_pages_LKMxCH.shape[4], page_table_BP.shape[1]
    start_B, table_BP = start_B.long(), page_table_BP.long()
    token = torch.arange(T, device=k_BTKH.device)
    position_BT = start_B[:, None] + token
    valid_BT = (token < num_new_B[:, None]) & (position_BT < P * C)
    page_BT = table_BP.gather(1, (position_BT // C).clamp(max=P - 1))
    page_BT = torch.where(valid_BT, page_BT, 0)
    kv_BTKxH = torch.stack([k_BTKH, v_BTKH], 3).to(kv_pages_LKMxCH.dtype)
    kv_pages_LKMxCH[layer, :, page_BT, :, position_BT % C] = kv_BTKxH

    reach = torch.arange(touched_pages(T, C), device=k_BTKH.device)
    page_BQ = start_B[:, None] // C + reach
    last_BQ, end_B = (page_BQ + 1) * C, start_B + num_new_B
    complete = (last_BQ > start_B[:, None]) & (last_BQ <= end_B[:, None]) & (page_BQ < P)
    page_BQ = torch.where(complete, table_BP.gather(1, page_BQ.clamp(max=P - 1)), 0)
    mean_KBQH = kv_pages_LKMxCH[layer, :, page_BQ, 0].float().mean(3)
    landmarks_LMKH[layer, page_BQ] = mean_KBQH.permute(1, 2, 0, 3).to(landmarks_LMKH.dtype)
    return kv_pages_LKMxCH, landmarks_LMKH


def flash_prefill(
    q_BTNH, k_BTKH, v_BTKH, *, budget_T=None, sparse_BT=None, page=16, chunk=QUERY_BLOCK,
    policy="mean",
) -> torch.Tensor:  # fmt: skip
    """Causal attention over whole sequences, dense or with the pages of sparse decode (replay).

    Returns out_BTNH. budget_T: int32 [T], the budget k at each query position; None = dense.
    sparse_BT: bool [B, T], the queries that read exactly the pages that decode would have read at
    their position; all others are dense. policy names another rule of policies.py that ranks
    pages. Differentiable in q, k and v; the choice of pages is a constant. Blocks of at most
    `chunk` queries read keys up to their own end only, and the backward pass recomputes them.
    """
    T = q_BTNH.shape[1]
    k_BKSH, v_BKSH = k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2)
    replay = None
    if budget_T is not None:
        assert sparse_BT is not None, "a replay needs sparse_BT"
        rule = POLICIES[policy]
        summary = rule.summary(k_BTKH, page)
        replay = rule, summary, budget_T.long(), sparse_BT.bool(), page
    out = []
    for first in range(0, T, chunk):
        last = min(first + chunk, T)
        args = first, q_BTNH[:, first:last], k_BKSH[:, :, :last], v_BKSH[:, :, :last], replay
        out.append(checkpoint(_attend_block, *args, use_reentrant=False))
    return torch.cat(out, 1)


def _attend_block(first, q_BtNH, k_BKSH, v_BKSH, replay) -> torch.Tensor:
    """Causal attention of queries first, first + 1, ... to the given keys, or to some pages."""
    B, t, N, H = q_BtNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BKRtH = q_BtNH.reshape(B, t, K, N // K, H).permute(0, 2, 3, 1, 4)
    pos_t = first + torch.arange(t, device=q_BtNH.device)
    mask = (torch.arange(S, device=q_BtNH.device) <= pos_t[:, None])[None, None]
    if replay is not None:
        mask = mask & _replay_mask(q_BKRtH, k_BKSH, pos_t, *replay)
    s = torch.einsum("bkrth,bksh->bkrts", q_BKRtH.float(), k_BKSH.float()) * H**-0.5
    p = torch.where(mask[:, :, None], s, NEG).softmax(-1).to(v_BKSH.dtype)
    out = torch.einsum("bkrts,bksh->bkrth", p, v_BKSH)
    return out.permute(0, 3, 1, 2, 4).reshape(B, t, N, H)


def _replay_mask(q_BKRtH, k_BKSH, pos_t, rule, summary, budget_T, sparse_BT, page) -> torch.Tensor:
    """Keys that a replay reads at positions pos_t, bool [B, K, t, S]."""
    num_keys = k_BKSH.shape[2]
    num_pages = -(-num_keys // page)
    with torch.no_grad():
        summary = [x_BKP[:, :, :num_pages] for x_BKP in summary]
        scores = rule.scores(q_BKRtH.float(), summary, k_BKSH, pos_t, page)
        pages = replayed_pages(scores, pos_t, budget_T, sparse_BT, page)
    return pages.repeat_interleave(page, -1)[..., :num_keys]


def replayed_pages(scores_BKtP, pos_t, budget_T, sparse_BT, page) -> torch.Tensor:
    """Pages that decode read at positions pos_t, bool [B, K, t, P]; all pages if not sparse.

    Past the end of budget_T the last budget holds.
    """
    budget_t = budget_T[pos_t.clamp(max=len(budget_T) - 1)]
    pages = page_mask(scores_BKtP, pos_t // page + 1, budget_t)
    return pages | ~sparse_BT[:, None, pos_t, None]


def page_mask(scores_BKtP, num_pages_t, budget_t) -> torch.Tensor:
    """Whether a query reads a page, bool [B, K, t, P]: reserved pages and the top-k of the rest."""
    P = scores_BKtP.shape[-1]
    pages = torch.arange(P, device=scores_BKtP.device)
    n, k = num_pages_t[:, None], budget_t[:, None]
    candidate = (pages >= 1) & (pages < n - 2)
    scores = torch.where(candidate, scores_BKtP, -torch.inf)
    kth_index = (P - k).clamp(0, P - 1).expand(*scores.shape[:-1], 1)
    kth = scores.sort(-1).values.gather(-1, kth_index)
    above, equal = scores > kth, scores == kth
    room = k - above.sum(-1, keepdim=True)
    chosen = candidate & (k > 0) & (above | (equal & (equal.cumsum(-1) <= room)))
    reserved = (pages < n) & ((pages == 0) | (pages >= n - 2))
    return chosen | reserved


def token_logprob(hidden_XD, head_VD, token_X, *, temperature=1.0) -> tuple[torch.Tensor, ...]:
    """Log-prob of each token, and the entropy of softmax(head . hidden / temperature), both [X].

    Float32, in nats, differentiable. Tokens are handled in blocks, so that no array [X, V] exists.
    """

    def block(hidden_cD, head_VD, token_c) -> tuple[torch.Tensor, torch.Tensor]:
        logp = log_softmax(_logits(hidden_cD, head_VD) / temperature)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, token_c[:, None])[:, 0], entropy

    return _blocks(block, head_VD, hidden_XD, token_X.long())


def acceptance_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, token_X, *, temperature=1.0
) -> tuple[torch.Tensor, ...]:
    """alpha = sum_v min(p_dense, p_sparse), the acceptance rate, and log p_sparse of the token."""

    def block(dense_cD, head_VD, sparse_cD, token_c) -> tuple[torch.Tensor, torch.Tensor]:
        logp_dense = log_softmax(_logits(dense_cD, head_VD) / temperature)
        logp_sparse = log_softmax(_logits(sparse_cD, head_VD) / temperature)
        alpha = torch.minimum(logp_dense, logp_sparse).exp().sum(-1)
        return alpha, logp_sparse.gather(-1, token_c[:, None])[:, 0]

    return _blocks(block, head_VD, hidden_dense_XD, hidden_sparse_XD, token_X.long())


def topk_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, *, temperature=1.0, top=20
) -> torch.Tensor:
    """Lower bound of alpha: the sum of min(p_dense, p_sparse) over tokens in the top of both."""

    def block(dense_cD, head_VD, sparse_cD) -> tuple[torch.Tensor]:
        (dense_cJ, ids_cJ), (sparse_cJ, others_cJ) = (
            log_softmax(_logits(x, head_VD) / temperature).topk(top) for x in (dense_cD, sparse_cD)
        )
        same_cJJ = ids_cJ[:, :, None] == others_cJ[:, None]
        smaller_cJJ = torch.minimum(dense_cJ[:, :, None], sparse_cJ[:, None]).exp()
        return (torch.where(same_cJJ, smaller_cJJ, 0.0).sum((1, 2)),)

    return _blocks(block, head_VD, hidden_dense_XD, hidden_sparse_XD)[0]


def log_softmax(logits_XV) -> torch.Tensor:
    """Log-softmax over the vocabulary. On a CPU torch's own errs by 8e-5 for 151,936 terms."""
    return logits_XV - torch.logsumexp(logits_XV, -1, keepdim=True)


def _logits(hidden_XD, head_VD) -> torch.Tensor:
    return hidden_XD.float() @ head_VD.float().mT


def _blocks(f, head_VD, first, *arrays) -> tuple[torch.Tensor, ...]:
    """f(rows, head, other rows) of HEAD_ELEMENTS / V rows at a time, recomputed in backward."""
    size = max(1, HEAD_ELEMENTS // head_VD.shape[0])
    out = [
        checkpoint(f, rows, head_VD, *others, use_reentrant=False)
        for rows, *others in zip(*(a.split(size) for a in (first, *arrays)), strict=True)
    ]
    return tuple(torch.cat(parts) for parts in zip(*out, strict=True))
