"""Writes new keys and values into the paged cache, and landmarks of completed pages, in place.

    page[x, c] = new[x, c + C page - start]   for lo <= c < hi, x = key, value; the rest stays
    landmark   = float32 mean over c of page[key, c]                     if hi = C (page complete)

Grid (K x B x touched_pages(T, C)): one program owns one KV head of one page in which T tokens of a
row can lie. With C = 4, T = 3 new tokens lie in at most 2 pages:

    start = 6       | 4  5 [6  7]| [8] .  .  . |       program 0: lo = 2, hi = 4, page complete
                                                       program 1: lo = 0, hi = 1

A program computes lo and hi of its page on the device and ends if no new token lies there, or if
the table has no such page; nothing is written to the null page. New tokens are written as rows of H
numbers; old keys are read only if the page completes.

On chip: 2 C H numbers, in registers.

Numerics: the landmark is the mean of the keys as the cache holds them (rounded to its type), summed
in float32 and rounded to the landmarks' type. float8 saturates at 448. Offsets into the pool have
64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels_triton import float8
from kernels_triton.layout import touched_pages

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program


def append_kv(
    kv_pages_LKMxCH, landmarks_LMKH, layer, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write T new tokens per row into the pool, in place; returns the pool and the landmarks.

    Row b writes tokens 0 .. num_new - 1 at positions start .. start + num_new - 1. Other tokens,
    and those past the page table, are not written. A page that a new token completes gets its
    landmark. kv_pages_LKMxCH [L, K, M, 2, C, H] and landmarks_LMKH [L, M, K, H] may have any
    strides except on the last axis. No two rows may write to the same page. The grid depends on
    shapes only, so that the launch needs no host sync. Raises ValueError for shapes that do not
    fit. Source: arXiv 2606.08446, section 2.
    """
    _check(kv_pages_LKMxCH, landmarks_LMKH, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B)
    B, T, K, H = k_BTKH.shape
    kv, landmarks = kv_pages_LKMxCH[layer], landmarks_LMKH[layer]
    C = kv.shape[3]
    if kv.dtype == torch.float8_e4m3fn:
        kv = kv.view(torch.uint8)
    if B * T > 0:
        _append[(K * B * touched_pages(T, C),)](
            kv, landmarks, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B,
            *kv.stride()[:4], *landmarks.stride()[:2], *k_BTKH.stride()[:3], *v_BTKH.stride()[:3],
            page_table_BP.stride(0), B, T, page_table_BP.shape[1],
            K=K, C=C, BLOCK=triton.next_power_of_2(C), H=H, num_warps=4,
        )  # fmt: skip
    return kv_pages_LKMxCH, landmarks_LMKH


def _check(
    kv_pages_LKMxCH, landmarks_LMKH, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B
) -> None:
    B, _, K, H = k_BTKH.shape
    pool = kv_pages_LKMxCH.shape
    if v_BTKH.shape != k_BTKH.shape or len(pool) != 6 or pool[1::2] != (K, 2, H):
        raise ValueError(
            f"{v_BTKH.shape=}, {kv_pages_LKMxCH.shape=}: expected the shape of the keys"
            f" {k_BTKH.shape} and a pool [L, {K}, M, 2, C, {H}], pass tensors of one model"
        )
    marks = (pool[0], pool[2], K, H)
    if landmarks_LMKH.shape != marks:
        raise ValueError(
            f"{landmarks_LMKH.shape=}: expected {marks} for {pool=}, pass the landmarks of it"
        )
    if H & (H - 1):
        raise ValueError(f"{H=}: expected a head dim that is a power of 2; use the reference")
    if not page_table_BP.shape[0] == start_B.shape[0] == num_new_B.shape[0] == B:
        raise ValueError(
            f"{page_table_BP.shape=}, {start_B.shape=}, {num_new_B.shape=}: expected {B} rows each,"
            " as many as keys"
        )
    named = {"kv_pages_LKMxCH": kv_pages_LKMxCH, "landmarks_LMKH": landmarks_LMKH,
             "k_BTKH": k_BTKH, "v_BTKH": v_BTKH, "page_table_BP": page_table_BP}  # fmt: skip
    for name, x in named.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: {x.stride()=}: expected a last axis of stride 1; copy it")


@triton.jit
def _append(
    kv_ptr,  # [K, M, 2, C, H], one layer
    landmarks_ptr,  # [M, K, H], one layer
    new_k_ptr, new_v_ptr,  # [B, T, K, H]
    table_ptr,  # [B, P]
    start_ptr,  # [B]
    num_new_ptr,  # [B]
    stride_kk, stride_km, stride_kx, stride_kc,
    stride_lm, stride_lk,
    stride_nb, stride_nt, stride_nk,
    stride_vb, stride_vt, stride_vk,
    stride_tb,
    B, T, P,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr,
) -> None:  # fmt: skip
    k, rest = (tl.program_id(0) % K).to(tl.int64), tl.program_id(0) // K
    b = (rest % B).to(tl.int64)
    start = tl.load(start_ptr + b).to(tl.int32)
    num_new = tl.minimum(tl.load(num_new_ptr + b).to(tl.int32), T)
    logical = start // C + rest // B
    lo = tl.maximum(start - logical * C, 0)
    hi = tl.minimum(start + num_new - logical * C, C)
    if (lo < hi) & (logical < P):
        page = tl.load(table_ptr + b * stride_tb + logical).to(tl.int64)
        c, h = tl.arange(0, BLOCK)[:, None], tl.arange(0, H)[None, :]
        fresh = _is_fresh(c, lo, hi)
        t = (logical * C - start + c).to(tl.int64)
        at = kv_ptr + k * stride_kk + page * stride_km + c * stride_kc + h
        new_k = tl.load(
            new_k_ptr + b * stride_nb + t * stride_nt + k * stride_nk + h, mask=fresh, other=0.0
        )
        new_k = _stored(new_k, kv_ptr.dtype.element_ty)
        new_v = tl.load(
            new_v_ptr + b * stride_vb + t * stride_vt + k * stride_vk + h, mask=fresh, other=0.0
        )
        if _completes(hi, C):
            old = tl.load(at, mask=c < lo, other=0)
            total = tl.sum(_number(tl.where(fresh, new_k, old)), 0)
            mark = landmarks_ptr + page * stride_lm + k * stride_lk + tl.arange(0, H)
            tl.store(mark, (total / C).to(landmarks_ptr.dtype.element_ty))
        tl.store(at, new_k, mask=fresh)
        tl.store(at + stride_kx, _stored(new_v, kv_ptr.dtype.element_ty), mask=fresh)


@triton.jit
def _stored(x, dtype: tl.constexpr) -> tl.tensor:
    """x in the cache's type, of which bytes stand for float8."""
    if dtype == tl.uint8:
        return float8.encode(x)
    return x.to(dtype)


@triton.jit
def _number(x) -> tl.tensor:
    if x.dtype == tl.uint8:
        return float8.decode(x).to(tl.float32)
    return x.to(tl.float32)


@triton.jit
def _is_fresh(c, lo, hi) -> tl.tensor:
    return (c >= lo) & (c < hi)


@triton.jit
def _completes(hi, C: tl.constexpr) -> tl.tensor:
    return hi == C


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The program that gpu_compile compiles; beside a float8 cache everything else is bf16."""
    from kernels_triton.gpu_compile import Program

    scaled = dtype in ("fp8e4nv", "u8")
    outer, dtype = ("bf16", "u8") if scaled else (dtype, dtype)
    types = {
        "kv_ptr": f"*{dtype}", "landmarks_ptr": f"*{outer}", "new_k_ptr": f"*{outer}",
        "new_v_ptr": f"*{outer}", "table_ptr": "*i32", "start_ptr": "*i32", "num_new_ptr": "*i32",
    }  # fmt: skip
    numbers = _append.arg_names[len(types) : _append.arg_names.index("K")]
    constants = {"K": num_kv_heads, "C": page, "BLOCK": triton.next_power_of_2(page), "H": head_dim}
    yield Program("append_kv", _append, types | dict.fromkeys(numbers, "i32"), constants, 4, 3)
