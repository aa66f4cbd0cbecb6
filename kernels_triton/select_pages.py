"""Pages that sparse decode reads: landmark scores and an exact, deterministic top-k, on GPU.

    score[b, k, p] = mean_r q[b, k R + r] . landmark[page_table[b, p], k]        (float32)
    chosen[b, k]   = {0, n - 2, n - 1} and the k_b best of 1 .. n - 3, ties to the lower page
    page_ids       = page_table[b, sorted(chosen)], then zeros

There are two launches. Between them lies one int32 per page, the key: the score as an integer in
the same order.

    landmarks --(1. score)--> keys [B, K, P] --(2. list)--> page_ids [B, K, J]

1. score, grid (K x B, blocks of pages): one program owns `score` pages of one KV head of one row.
   It gathers their landmarks ([score, H], in registers) and multiplies them with the mean query.
   Sizes, page ids and queries are loaded at once, so that only the landmarks wait for another load.
   No landmark is read for a row that chooses all of its candidates or none, nor past its last
   candidate. KV heads come first in the grid, since the landmarks of a page lie side by side.
2. list, grid (K x B): one program owns one KV head of one row. It finds the k-th largest key bit by
   bit from the highest, by counting the keys that reach a threshold (there is no sort), and stops
   as soon as exactly k do. Rows of up to `count` pages are counted in registers (32 keys a thread);
   longer rows read their keys again from cache for every bit. Then, `list` pages at a time, prefix
   sums rank keys equal to the threshold, so that the lowest pages are chosen first, and give each
   chosen page its place in the list.

On chip: [score, H] landmarks; `count` keys and `list` pages; all in registers.

Numerics: mean query, products and sums in float32; -0 equals 0. From the keys on all steps are on
integers, so that the list is a function of the scores alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels_triton.tuning import SelectTuning, tune_select

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program

MIN_KEY = tl.constexpr(-(2**31))  # less than the key of any number
NUM_RESERVED = tl.constexpr(3)


def select_pages(
    q_BNH,
    landmarks_LMKH,
    layer,
    page_table_BP,
    num_pages_B,
    k_B,
    *,
    max_selected,
    tuning: SelectTuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The physical pages that each (sequence, KV head) reads: (page_ids_BKJ, count_B), both int32.

    q_BNH: the queries of one token per row. landmarks_LMKH: any strides except on the last axis.
    num_pages_B: pages of the row, a partly filled last page included. k_B: budget of the row, at
    most max_selected - 3. J = max_selected; the last used entry is the row's last page, unused
    entries are 0, and count = min(k + 3, num_pages). The grid depends on shapes only, so that the
    launches need no host sync. Raises ValueError for shapes that do not fit. Source: arXiv
    2606.08446, section 2.
    """
    _check(q_BNH, landmarks_LMKH, page_table_BP, num_pages_B, k_B, max_selected)
    B, N, H = q_BNH.shape
    landmarks = landmarks_LMKH[layer]
    K, P = landmarks.shape[1], page_table_BP.shape[1]
    tuning = tuning or tune_select(P)
    place = {"dtype": torch.int32, "device": q_BNH.device}
    page_ids_BKJ = torch.empty((B, K, max_selected), **place)
    count_B = torch.empty((B,), **place)
    if B == 0:
        return page_ids_BKJ, count_B
    keys_BKP = torch.empty((B, K, P), **place)
    R = N // K
    _score[(K * B, triton.cdiv(P, tuning.score))](
        q_BNH, landmarks, page_table_BP, num_pages_B, k_B, keys_BKP,
        *q_BNH.stride()[:2], *landmarks.stride()[:2], page_table_BP.stride(0), P,
        K=K, R=R, R_PAD=triton.next_power_of_2(R), H=H, BLOCK=tuning.score, num_warps=4,
    )  # fmt: skip
    _list[(K * B,)](
        keys_BKP, page_table_BP, num_pages_B, k_B, page_ids_BKJ, count_B,
        page_table_BP.stride(0), P, max_selected,
        K=K, COUNT=tuning.count, WHOLE=tuning.count >= P, LIST=tuning.list,
        num_warps=tuning.num_warps,
    )  # fmt: skip
    return page_ids_BKJ, count_B


def _check(q_BNH, landmarks_LMKH, page_table_BP, num_pages_B, k_B, max_selected) -> None:
    B, N, H = q_BNH.shape
    if landmarks_LMKH.ndim != 4 or landmarks_LMKH.shape[3] != H or N % landmarks_LMKH.shape[2]:
        raise ValueError(
            f"{landmarks_LMKH.shape=}: expected [L, M, K, {H}] with K dividing the {N} heads of"
            f" {q_BNH.shape=}; pass both of the same model"
        )
    if H & (H - 1):
        raise ValueError(f"{H=}: expected a head dim that is a power of 2; use the reference")
    if not page_table_BP.shape[0] == num_pages_B.shape[0] == k_B.shape[0] == B:
        raise ValueError(
            f"{page_table_BP.shape=}, {num_pages_B.shape=}, {k_B.shape=}: expected {B} rows each,"
            " as many as queries"
        )
    if max_selected < 1:
        raise ValueError(f"{max_selected=}: expected at least 1 page; widen the list")
    named = {"q_BNH": q_BNH, "landmarks_LMKH": landmarks_LMKH, "page_table_BP": page_table_BP}
    for name, x in named.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: {x.stride()=}: expected a last axis of stride 1; copy it")


@triton.jit
def _score(
    q_ptr,  # [B, N, H]
    landmarks_ptr,  # [M, K, H], one layer
    table_ptr,  # [B, P]
    num_pages_ptr,  # [B]
    k_ptr,  # [B]
    keys_ptr,  # int32 [B, K, P]
    stride_qb, stride_qn, stride_lm, stride_lk, stride_tb,
    P,
    K: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    k, b = (tl.program_id(0) % K).to(tl.int64), (tl.program_id(0) // K).to(tl.int64)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r, h = tl.arange(0, R_PAD), tl.arange(0, H)
    # Sizes, page ids and queries are loaded at once; only the landmarks wait for another load.
    ids = tl.load(table_ptr + b * stride_tb + page, mask=page < P, other=0)
    at = q_ptr + b * stride_qb + (k * R + r)[:, None] * stride_qn + h[None, :]
    queries = tl.load(at, mask=(r < R)[:, None], other=0.0)
    n, taken = _row(num_pages_ptr, k_ptr, b, P)
    if _searched(n, taken) & (tl.program_id(1) * BLOCK < n - 2):
        q = tl.sum(queries.to(tl.float32), 0) / R
        wanted = _is_candidate(page, n)
        physical = tl.where(wanted, ids, 0).to(tl.int64)
        mark_at = landmarks_ptr + k * stride_lk + (physical * stride_lm)[:, None] + h[None, :]
        landmarks = tl.load(mark_at, mask=wanted[:, None], other=0.0).to(tl.float32)
        key = _ordered(tl.sum(landmarks * q[None, :], 1))
        row = b * K + k
        tl.store(keys_ptr + row * P + page, tl.where(wanted, key, MIN_KEY), mask=page < P)


@triton.jit
def _row(num_pages_ptr, k_ptr, b, P) -> tuple:
    """The number of pages of the row, and the number of candidates that it chooses."""
    n = tl.minimum(tl.load(num_pages_ptr + b), P).to(tl.int32)
    taken = tl.minimum(tl.load(k_ptr + b), tl.maximum(n - NUM_RESERVED, 0)).to(tl.int32)
    return n, tl.maximum(taken, 0)


@triton.jit
def _searched(n, taken) -> tl.tensor:
    return (taken > 0) & (taken < n - NUM_RESERVED)


@triton.jit
def _is_candidate(page, n) -> tl.tensor:
    return (page >= 1) & (page < n - 2)


@triton.jit
def _ordered(score) -> tl.tensor:
    """int32 in the order of the float32 scores; -0 equals 0."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _list(
    keys_ptr,  # int32 [B, K, P]
    table_ptr,  # [B, P]
    num_pages_ptr,  # [B]
    k_ptr,  # [B]
    ids_ptr,  # int32 [B, K, J]
    count_ptr,  # int32 [B]
    stride_tb,
    P, J,
    K: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr, LIST: tl.constexpr,
) -> None:  # fmt: skip
    k, b = tl.program_id(0) % K, (tl.program_id(0) // K).to(tl.int64)
    n, taken = _row(num_pages_ptr, k_ptr, b, P)
    count = taken + tl.minimum(n, NUM_RESERVED)
    if k == 0:
        tl.store(count_ptr + b, count)
    taken = tl.minimum(taken, tl.maximum(J - NUM_RESERVED, 0))
    row = b * K + k
    keys_ptr += row * P
    ids_ptr += row * J
    table_ptr += b * stride_tb
    searched = _searched(n, taken)
    end = tl.where(searched, n - 2, 0)  # keys from here on are not read

    threshold, room = MIN_KEY, taken
    if searched:
        keys = tl.load(
            keys_ptr + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < end, other=MIN_KEY
        )
        bit = 31
        while bit >= 0:
            # The threshold starts at MIN_KEY, so that its first trial clears the sign bit.
            trial = threshold ^ (1 << bit)
            found = _count(keys_ptr, keys, trial, end, COUNT, WHOLE)
            threshold = tl.where(found >= taken, trial, threshold)
            bit = tl.where(found == taken, -1, bit - 1)
        room = taken - _count(keys_ptr, keys, threshold + 1, end, COUNT, WHOLE)

    equal_before, before = 0, 0
    for first in range(0, n, LIST):
        page = first + tl.arange(0, LIST)
        candidate = _is_candidate(page, n)
        key = tl.load(keys_ptr + page, mask=candidate & (page < end), other=MIN_KEY)
        equal = (candidate & (key == threshold)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        chosen = candidate & ((key > threshold) | ((equal > 0) & (rank <= room)))
        chosen |= (page < n) & ((page == 0) | (page >= n - 2))
        place = before + tl.cumsum(chosen.to(tl.int32), 0) - 1
        physical = tl.load(table_ptr + page, mask=chosen, other=0).to(tl.int32)
        tl.store(ids_ptr + place, physical, mask=chosen & (place < J))
        equal_before += tl.sum(equal, 0)
        before += tl.sum(chosen.to(tl.int32), 0)
    for first in range(before // LIST * LIST, J, LIST):
        entry = first + tl.arange(0, LIST)
        tl.store(ids_ptr + entry, tl.zeros([LIST], tl.int32), mask=(entry >= before) & (entry < J))


@triton.jit
def _count(keys_ptr, keys, trial, end, COUNT: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """The number of keys >= trial, of the keys in registers and, unless WHOLE, in memory."""
    found = tl.sum((keys >= trial).to(tl.int32), 0)
    if not WHOLE:
        for first in range(COUNT, end, COUNT):
            page = first + tl.arange(0, COUNT)
            key = tl.load(keys_ptr + page, mask=page < end, other=MIN_KEY)
            found += tl.sum((key >= trial).to(tl.int32), 0)
    return found


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The programs that gpu_compile compiles: rows of 40K, 128K and 256K tokens (pages of 16)."""
    from kernels_triton.gpu_compile import Program

    group = num_heads // num_kv_heads
    types = {
        "q_ptr": f"*{dtype}", "landmarks_ptr": f"*{dtype}", "table_ptr": "*i32",
        "num_pages_ptr": "*i32", "k_ptr": "*i32", "keys_ptr": "*i32",
    }  # fmt: skip
    strides = ("stride_qb", "stride_qn", "stride_lm", "stride_lk", "stride_tb", "P")
    constants = {
        "K": num_kv_heads,
        "R": group,
        "R_PAD": triton.next_power_of_2(group),
        "H": head_dim,
    }
    constants["BLOCK"] = tune_select(2560).score
    yield Program(
        "select_pages, score", _score, types | dict.fromkeys(strides, "i32"), constants, 4, 3
    )
    pointers = ("keys_ptr", "table_ptr", "num_pages_ptr", "k_ptr", "ids_ptr", "count_ptr")
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(("stride_tb", "P", "J"), "i32")
    for pages in (2560, 8192, 16384):
        tuning = tune_select(pages)
        constants = {"K": num_kv_heads, "COUNT": tuning.count, "WHOLE": tuning.count >= pages}
        constants["LIST"] = tuning.list
        name = f"select_pages, list of {pages} pages"
        yield Program(name, _list, types, constants, tuning.num_warps, 3)
