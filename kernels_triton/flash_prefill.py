"""Causal attention over whole sequences, dense or by pages (replay), with backward, for GPU.

    s = q k^T / sqrt(H),  p = exp(s - lse),  lse = log sum_keys exp(s),  out = p v
    delta = sum_h(out do),  ds = p (do v^T - delta),  dv = p^T do,  dk = ds^T q / sqrt(H),
    dq = ds k / sqrt(H)

The algorithm is FlashAttention-2 (arXiv 2307.08691).

              keys 0   keys 1   keys 2      forward, dq: a program owns a row, loops over its keys
    queries 0   *                           dk, dv: a program owns a column, loops over its queries
    queries 1   *        *                  * blocks with a visible key
    queries 2   *        *        *

Forward and dq: grid (B x N x blocks of queries). A program owns a block of queries of one head and
loops over the blocks of keys up to the diagonal. The longest loops of a head start first.

dk and dv, one launch each: grid (B x K x blocks of keys). A program owns a block of keys of one KV
head and loops over the blocks of queries from the diagonal on, for every head of the group, so that
the sum over the group stays in registers. One kernel for dk and dv would save one of eight products
of the backward pass, but at H = 128 both sums do not fit into registers beside the scores.

Replay: the pages that each query reads are packed into bits outside the kernel (page_words.py). All
keys of a block lie in the 32 pages of one word, so that a program loads one word per query and
block, and shifts it. In the forward pass only blocks that the diagonal crosses compare positions.

On chip per program: in shared memory num_stages x keys x H x 2 numbers of keys and values (or of
queries and output gradients), and the block that the program owns; in registers float32 scores
[queries, keys] and the sum [queries, H] or [keys, H].

Inputs have any strides except on H, which is contiguous. Offsets of rows have 64 bits.

Numerics: float32 softmax, in powers of 2, and float32 sums. float32 inputs multiply at full
precision (no TF32); otherwise p and ds are rounded to the inputs' type before they multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels_triton import reference
from kernels_triton.page_words import BITS, page_words
from kernels_triton.tuning import tune_prefill

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG = tl.constexpr(-1e30)
HEAD_DIMS = 16, 32, 64, 128


def flash_prefill(
    q_BTNH, k_BTKH, v_BTKH, *, budget_T=None, sparse_BT=None, page=16,
    chunk=reference.QUERY_BLOCK, tuning=None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention over whole sequences, dense or with the pages of sparse decode (replay).

    Returns out_BTNH = softmax(q k^T / sqrt(H)) v over the keys up to the query. With budget_T
    (int32 [T], the budget at each query position) only over the pages that decode would have read
    there. sparse_BT: bool [B, T], the queries for which this holds; all others read all pages.
    Differentiable in q, k and v; the choice of pages is a constant. chunk: queries that
    choose their pages together. tuning: a PrefillTuning.
    Raises ValueError for shapes, types, heads or pages that the kernels do not take.
    """
    page = 0 if budget_T is None else page
    tuning = tuning or tune_prefill(q_BTNH.element_size(), q_BTNH.shape[3], page)
    _check(q_BTNH, k_BTKH, v_BTKH, page, tuning)
    words = None
    if budget_T is not None:
        if sparse_BT is None or sparse_BT.shape != q_BTNH.shape[:2] or page < 1:
            raise ValueError(
                f"{sparse_BT=} {page=}: expected the queries that choose pages, bool [B, T], "
                "and tokens in a page beside budget_T; pass both"
            )
        budget_T, sparse_BT = (
            torch.as_tensor(x, device=q_BTNH.device) for x in (budget_T, sparse_BT)
        )
        q, k = q_BTNH.detach(), k_BTKH.detach()
        words = page_words(q, k, budget_T, sparse_BT, page, chunk)
    return _Attend.apply(*map(_rows, (q_BTNH, k_BTKH, v_BTKH)), words, page, tuning)


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The programs that gpu_compile compiles, dense and replay. dtype: bf16, fp16 or fp32."""
    from kernels_triton.gpu_compile import Program

    strides = [f"s_{x}{axis}" for x in ("q", "k", "v", "o") for axis in "btn"]
    sizes = dict.fromkeys((*strides, "T", "N", "R", "num_words"), "i32")
    arrays, rows = dict.fromkeys("qkv", f"*{dtype}"), dict.fromkeys(("lse", "delta"), "*fp32")
    do, out = {"do": f"*{dtype}"}, {"out": f"*{dtype}"}
    kernels = [
        ("forward", _forward_kernel, {**out, "lse": "*fp32"}, {}),
        ("dq", _query_gradient_kernel, {**do, **out, **rows, "dq": f"*{dtype}"}, {}),
        ("dk", _key_gradient_kernel, {**do, **rows, **out}, {"VALUE": False}),
        ("dv", _key_gradient_kernel, {**do, **rows, **out}, {"VALUE": True}),
    ]
    for kind, used in (("dense", 0), ("replay", page)):
        tunings = tune_prefill(4 if dtype == "fp32" else 2, head_dim, used)
        for (name, kernel, others, more), blocks in zip(kernels, tunings, strict=True):
            signature = {**arrays, "words": "*i32", **others, "scale": "fp32", **sizes}
            constexprs = {"H": head_dim, "X": blocks.queries, "Y": blocks.keys, "PAGE": used}
            name = f"flash_prefill_{kind}_{name}"
            yield Program(name, kernel, signature, constexprs | more, *blocks[2:])


def _check(q_BTNH, k_BTKH, v_BTKH, page, tuning) -> None:
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    if k_BTKH.shape != (B, T, K, H) or v_BTKH.shape != k_BTKH.shape or N % K:
        raise ValueError(
            f"{q_BTNH.shape=} {k_BTKH.shape=} {v_BTKH.shape=}: expected [B, T, N, H] and twice "
            "[B, T, K, H] with N a multiple of K; reshape"
        )
    if not (kind := q_BTNH.dtype) == k_BTKH.dtype == v_BTKH.dtype:
        raise ValueError(f"{k_BTKH.dtype=} {v_BTKH.dtype=}: expected q's {kind}, cast them")
    if H not in HEAD_DIMS:
        raise ValueError(f"{q_BTNH.shape=}: expected a head of {HEAD_DIMS}; use the reference")
    if any(BITS * page % blocks.keys for blocks in tuning):
        raise ValueError(
            f"{page=} {tuning=}: expected blocks of keys that divide {BITS} pages; change tuning"
        )


def _rows(x) -> torch.Tensor:
    """x, or a copy in which the numbers of a head are contiguous, as the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, words, page, tuning) -> torch.Tensor:
        out_BTNH, lse_BNT = _forward(q_BTNH, k_BTKH, v_BTKH, words, page, tuning.forward)
        ctx.save_for_backward(q_BTNH, k_BTKH, v_BTKH, words, out_BTNH, lse_BNT)
        ctx.page, ctx.tuning = page, tuning
        return out_BTNH

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTNH) -> tuple[Any, ...]:
        *qkv, words, out_BTNH, lse_BNT = ctx.saved_tensors
        do_BTNH, kinds = _rows(do_BTNH), (words, ctx.page)
        _, of_query, *of_keys = ctx.tuning
        dq, delta_BNT = _query_gradient(*qkv, do_BTNH, out_BTNH, lse_BNT, *kinds, of_query)
        dk, dv = _key_gradients(*qkv, do_BTNH, lse_BNT, delta_BNT, *kinds, of_keys)
        return dq, dk, dv, None, None, None


def _forward(q_BTNH, k_BTKH, v_BTKH, words, page, blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, T, N, H] and log-sum-exp [B, N, T]."""
    B, T, N, _ = q_BTNH.shape
    out_BTNH = q_BTNH.new_empty(q_BTNH.shape)
    lse_BNT = q_BTNH.new_empty((B, N, T), dtype=torch.float32)
    grid = (B * N * triton.cdiv(T, blocks.queries),)  # other axes take at most 65,535
    args = words, out_BTNH, lse_BNT, *_arguments(q_BTNH, k_BTKH, v_BTKH, out_BTNH, words)
    _forward_kernel[grid](q_BTNH, k_BTKH, v_BTKH, *args, **_constants(q_BTNH, page, blocks))
    return out_BTNH, lse_BNT


def _query_gradient(
    q_BTNH, k_BTKH, v_BTKH, do_BTNH, out_BTNH, lse_BNT, words, page, blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq [B, T, N, H], contiguous, and delta [B, N, T]."""
    B, T, N, _ = q_BTNH.shape
    dq_BTNH, delta_BNT = torch.empty_like(out_BTNH), torch.empty_like(lse_BNT)
    grid = (B * N * triton.cdiv(T, blocks.queries),)  # other axes take at most 65,535
    args = _arguments(q_BTNH, k_BTKH, v_BTKH, do_BTNH, words)
    _query_gradient_kernel[grid](
        q_BTNH, k_BTKH, v_BTKH, words, do_BTNH, out_BTNH, lse_BNT, delta_BNT, dq_BTNH, *args,
        **_constants(q_BTNH, page, blocks),
    )  # fmt: skip
    return dq_BTNH, delta_BNT


def _key_gradients(
    q_BTNH, k_BTKH, v_BTKH, do_BTNH, lse_BNT, delta_BNT, words, page, blocks
) -> list[torch.Tensor]:
    """dk and dv [B, T, K, H], contiguous."""
    B, T, K, _ = k_BTKH.shape
    grads = [k_BTKH.new_empty(k_BTKH.shape) for _ in range(2)]
    args = _arguments(q_BTNH, k_BTKH, v_BTKH, do_BTNH, words)
    for value, out in enumerate(grads):
        _key_gradient_kernel[(B * K * triton.cdiv(T, blocks[value].keys),)](
            q_BTNH, k_BTKH, v_BTKH, words, do_BTNH, lse_BNT, delta_BNT, out, *args,
            VALUE=bool(value), **_constants(q_BTNH, page, blocks[value]),
        )  # fmt: skip
    return grads


def _arguments(q_BTNH, k_BTKH, v_BTKH, other_BTNH, words) -> tuple[Any, ...]:
    """The last arguments of every kernel: scale, strides and sizes."""
    T, N, H = q_BTNH.shape[1:]
    strides = [s for x in (q_BTNH, k_BTKH, v_BTKH, other_BTNH) for s in x.stride()[:3]]
    return H**-0.5, *strides, T, N, N // k_BTKH.shape[2], 0 if words is None else words.shape[1]


def _constants(q_BTNH, page, blocks) -> dict[str, int]:
    X, Y, num_warps, num_stages = blocks
    return dict(H=q_BTNH.shape[3], X=X, Y=Y, PAGE=page, num_warps=num_warps, num_stages=num_stages)


@triton.jit
def _forward_kernel(
    q, k, v,  # [B, T, N, H] and twice [B, T, K, H]
    words,  # [B K, words, T]; unused if PAGE = 0
    out, lse,  # as q; [B, N, T]
    scale,  # 1 / sqrt(H)
    s_qb, s_qt, s_qn, s_kb, s_kt, s_kn, s_vb, s_vt, s_vn, s_ob, s_ot, s_on, T, N, R, num_words,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    row, i = _program(T, X)
    i = tl.cdiv(T, X) - 1 - i
    b, n = row // N, row % N
    query_X = i * X + tl.arange(0, X)
    q_XH = _load(_at(q, b, i * X, n, s_qb, s_qt, s_qn), s_qt, query_X, T, X, H, True)
    k, v = _at(k, b, 0, n // R, s_kb, s_kt, s_kn), _at(v, b, 0, n // R, s_vb, s_vt, s_vn)
    if PAGE > 0:
        words += tl.cast(row // R, tl.int64) * num_words * T
    state = tl.full([X], NEG, tl.float32), tl.zeros([X], tl.float32), tl.zeros([X, H], tl.float32)
    whole, stop = _key_blocks(i, T, X, Y)
    walk = q_XH, k, v, words, query_X, scale * LOG2E, s_kt, s_vt, T
    state = _attend(state, walk, 0, whole, X, Y, H, PAGE, False)
    m_X, sum_X, acc_XH = _attend(state, walk, whole, stop, X, Y, H, PAGE, True)
    _store(_at(out, b, i * X, n, s_ob, s_ot, s_on), s_ot, acc_XH / sum_X[:, None], query_X, T, X, H)
    lse += tl.cast(row, tl.int64) * T + query_X
    tl.store(lse, (m_X + tl.log2(sum_X)) * LN2, mask=query_X < T)


@triton.jit
def _attend(
    state, walk, first, last,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, DIAGONAL: tl.constexpr,
) -> tuple:  # fmt: skip
    """(maximum [X], sum [X], weighted values [X, H]) after blocks first .. last - 1 of keys."""
    m_X, sum_X, acc_XH = state
    q_XH, k, v, words, query_X, scale2, s_kt, s_vt, T = walk
    for j in range(first, last):
        key_Y = j * Y + tl.arange(0, Y)
        k_YH = _load(_at(k, 0, j * Y, 0, 0, s_kt, 0), s_kt, key_Y, T, Y, H, DIAGONAL)
        v_YH = _load(_at(v, 0, j * Y, 0, 0, s_vt, 0), s_vt, key_Y, T, Y, H, DIAGONAL)
        s = tl.dot(q_XH, tl.trans(k_YH), input_precision="ieee") * scale2
        s = _masked(s, words, key_Y[None, :], query_X[:, None], j * Y, T, PAGE, DIAGONAL)
        # Every query reads key 0, so the maximum is a real score after the first block.
        m_new = tl.maximum(m_X, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        keep = tl.exp2(m_X - m_new)
        sum_X = sum_X * keep + tl.sum(p, 1)
        acc_XH = tl.dot(p.to(v_YH.dtype), v_YH, acc_XH * keep[:, None], input_precision="ieee")
        m_X = m_new
    return m_X, sum_X, acc_XH


@triton.jit
def _query_gradient_kernel(
    q, k, v, words, do,  # as forward; do as out
    out, lse,  # from the forward pass
    delta, dq,  # [B, N, T]; as out
    scale, s_qb, s_qt, s_qn, s_kb, s_kt, s_kn, s_vb, s_vt, s_vn, s_ob, s_ot, s_on,
    T, N, R, num_words,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    row, i = _program(T, X)
    i = tl.cdiv(T, X) - 1 - i
    b, n = row // N, row % N
    query_X = i * X + tl.arange(0, X)
    q_XH = _load(_at(q, b, i * X, n, s_qb, s_qt, s_qn), s_qt, query_X, T, X, H, True)
    do_XH = _load(_at(do, b, i * X, n, s_ob, s_ot, s_on), s_ot, query_X, T, X, H, True)
    N_H, T_N_H = N * H, tl.cast(T, tl.int64) * N * H  # out and dq are contiguous
    out_XH = _load(_at(out, b, i * X, n, T_N_H, N_H, H), N_H, query_X, T, X, H, True)
    delta_X = tl.sum(do_XH.to(tl.float32) * out_XH.to(tl.float32), 1)
    k, v = _at(k, b, 0, n // R, s_kb, s_kt, s_kn), _at(v, b, 0, n // R, s_vb, s_vt, s_vn)
    if PAGE > 0:
        words += tl.cast(row // R, tl.int64) * num_words * T
    place = tl.cast(row, tl.int64) * T + query_X
    tl.store(delta + place, delta_X, mask=query_X < T)
    lse_X = tl.load(lse + place, mask=query_X < T, other=0.0)
    dq_XH = tl.zeros([X, H], tl.float32)
    for j in range(0, _key_blocks(i, T, X, Y)[1]):
        key_Y = j * Y + tl.arange(0, Y)
        k_YH = _load(_at(k, 0, j * Y, 0, 0, s_kt, 0), s_kt, key_Y, T, Y, H, True)
        v_YH = _load(_at(v, 0, j * Y, 0, 0, s_vt, 0), s_vt, key_Y, T, Y, H, True)
        s = tl.dot(q_XH, tl.trans(k_YH), input_precision="ieee") * (scale * LOG2E)
        s = _masked(s, words, key_Y[None, :], query_X[:, None], j * Y, T, PAGE, True)
        dp = tl.dot(do_XH, tl.trans(v_YH), input_precision="ieee")
        ds = _weights(s, lse_X[:, None]) * (dp - delta_X[:, None])
        dq_XH = tl.dot(ds.to(k_YH.dtype), k_YH, dq_XH, input_precision="ieee")
    _store(_at(dq, b, i * X, n, T_N_H, N_H, H), N_H, dq_XH * scale, query_X, T, X, H)


@triton.jit
def _key_gradient_kernel(
    q, k, v, words, do,  # as forward; do as out
    lse, delta,  # [B, N, T]
    out,  # dk or, if VALUE, dv: as k, contiguous
    scale, s_qb, s_qt, s_qn, s_kb, s_kt, s_kn, s_vb, s_vt, s_vn, s_ob, s_ot, s_on,
    T, N, R, num_words,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, PAGE: tl.constexpr, VALUE: tl.constexpr,
) -> None:  # fmt: skip
    row, j = _program(T, Y)
    K = N // R
    b, kv = row // K, row % K
    key_Y = j * Y + tl.arange(0, Y)
    k_YH = _load(_at(k, b, j * Y, kv, s_kb, s_kt, s_kn), s_kt, key_Y, T, Y, H, True)
    if not VALUE:
        v_YH = _load(_at(v, b, j * Y, kv, s_vb, s_vt, s_vn), s_vt, key_Y, T, Y, H, True)
    if PAGE > 0:
        words += tl.cast(row, tl.int64) * num_words * T
    first, num = j * Y // X, tl.cdiv(T, X) - j * Y // X
    acc_YH = tl.zeros([Y, H], tl.float32)
    for step in range(0, R * num):
        n, i = kv * R + step // num, first + step % num
        query_X = i * X + tl.arange(0, X)
        place = (tl.cast(b, tl.int64) * N + n) * T + query_X
        q_XH = _load(_at(q, b, i * X, n, s_qb, s_qt, s_qn), s_qt, query_X, T, X, H, True)
        do_XH = _load(_at(do, b, i * X, n, s_ob, s_ot, s_on), s_ot, query_X, T, X, H, True)
        lse_X = tl.load(lse + place, mask=query_X < T, other=0.0)
        s = tl.dot(k_YH, tl.trans(q_XH), input_precision="ieee") * (scale * LOG2E)
        s = _masked(s, words, key_Y[:, None], query_X[None, :], j * Y, T, PAGE, True)
        p = _weights(s, lse_X[None, :])
        if VALUE:
            acc_YH = tl.dot(p.to(do_XH.dtype), do_XH, acc_YH, input_precision="ieee")
        else:
            delta_X = tl.load(delta + place, mask=query_X < T, other=0.0)
            dp = tl.dot(v_YH, tl.trans(do_XH), input_precision="ieee")
            ds = p * (dp - delta_X[None, :])
            acc_YH = tl.dot(ds.to(q_XH.dtype), q_XH, acc_YH, input_precision="ieee")
    acc_YH *= 1.0 if VALUE else scale
    K_H, T_K_H = K * H, tl.cast(T, tl.int64) * K * H
    _store(_at(out, b, j * Y, kv, T_K_H, K_H, H), K_H, acc_YH, key_Y, T, Y, H)


@triton.jit
def _program(T, SIZE: tl.constexpr) -> tuple:
    """(row, block) of this program; a row is a head of a sequence, its blocks are consecutive."""
    blocks = tl.cdiv(T, SIZE)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def _key_blocks(i, T, X: tl.constexpr, Y: tl.constexpr) -> tuple:
    """For block i of queries: how many blocks of keys all of them see, and how many any sees."""
    return (i * X + 1) // Y, tl.cdiv(tl.minimum((i + 1) * X, T), Y)


@triton.jit
def _visible(key, query) -> tl.tensor:
    return key <= query


@triton.jit
def _masked(
    s, words, key, query, first_key, T, PAGE: tl.constexpr, DIAGONAL: tl.constexpr
) -> tl.tensor:
    """s, but NEG where a query does not read a key. key, query: a row and a column, or reversed."""
    if PAGE > 0:
        place = tl.cast(first_key // (PAGE * 32), tl.int64) * T + query
        word = tl.load(words + place, mask=query < T, other=0)
        s = tl.where(((word >> (key // PAGE % 32)) & 1) != 0, s, NEG)
    if DIAGONAL:
        s = tl.where(_visible(key, query), s, NEG)
    return s


@triton.jit
def _weights(s, lse) -> tl.tensor:
    """p = exp(s - lse) from scores times log2(e) and the natural log-sum-exp."""
    return tl.exp2(s - lse * LOG2E)


@triton.jit
def _at(x, b, row, head, s_b, s_t, s_n) -> tl.tensor:
    """The address at which a row of a head begins."""
    b, row, head = tl.cast(b, tl.int64), tl.cast(row, tl.int64), tl.cast(head, tl.int64)
    return x + (b * s_b + row * s_t + head * s_n)


@triton.jit
def _load(x, s_t, row, T, X: tl.constexpr, H: tl.constexpr, MASK: tl.constexpr) -> tl.tensor:
    """Load X rows of a head from x on; rows past T are 0."""
    place = x + tl.arange(0, X)[:, None] * s_t + tl.arange(0, H)[None, :]
    if MASK:
        return tl.load(place, mask=row[:, None] < T, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _store(x, s_t, rows, row, T, X: tl.constexpr, H: tl.constexpr) -> None:
    """Store X rows of a head from x on, up to T."""
    place = x + tl.arange(0, X)[:, None] * s_t + tl.arange(0, H)[None, :]
    tl.store(place, rows.to(x.dtype.element_ty), mask=row[:, None] < T)
