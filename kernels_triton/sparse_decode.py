"""Decode attention over listed pages of the paged cache: output and log-sum-exp, on GPU.

    out = softmax(q k^T / sqrt(H)) v        over the first `length` tokens of the listed pages
    lse = log(sum(exp(q k^T / sqrt(H))))    query t sees the first min(start + t + 1, length)

Grid (K x B x blocks of queries, splits): one program owns one KV head of one row, X of its T x R
queries (up to 64 of them, padded to 16 for the matrix unit), and one share of the row's tokens. It
loops over tiles of `tile` tokens, which it gathers page by page; a tile is one step of the online
softmax. The number of splits depends on shapes only. The share of a split follows from the row's
length on the device, max(ceil(tiles / splits), least) tiles, so that a short row occupies few
programs and the others end at once. With 4 splits and least = 2:

    row of 12 tiles   | split 0: 3 tiles | split 1: 3 tiles | split 2: 3 tiles | split 3: 3 tiles |
    row of 3 tiles    | split 0: 2 | split 1: 1 |             splits 2 and 3 have nothing to do
                               |           |
                        (out, lse)   (out, lse)               float32, one per split and query
                               |___________|
                                     |
                 out = sum_s w_s out_s / sum_s w_s,           w_s = exp(lse_s - max lse)

With one split the program writes the result. Otherwise a second launch, grid (B T, N), joins the
splits as above: 4 (H + 1) bytes per split and query are written and read once.

KV heads come first in the grid, so that in layouts with the heads of a token side by side they are
read at about the same time. Everything that grows with the batch is on the first axis, since the
other axes of a CUDA grid take at most 65,535.

On chip: num_stages - 1 tiles of keys and values in shared memory, 4 tile H bytes each in bfloat16
(32 KiB at tile 64, H = 128); q, output and state of X queries in registers.

Numerics: products take the queries' type if it is bfloat16 or float16 and the cache has that type
or float8 (which is exact in both), else float32 without TF32. Products, softmax and state
accumulate in float32. The softmax uses powers of 2: a factor log2(e) is part of the scale, which
multiplies the float32 scores and not the queries. Weights are rounded to the products' type for the
second product; the denominator sums them unrounded. Values past the end are read as 0, since
0 x NaN is NaN. Offsets into the pool have 64 bits.

The page ids of a tile are loaded one step ahead, because Triton's pipeliner does not buffer loads
that depend on a load of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels_triton import float8
from kernels_triton.tuning import PROCESSORS, DecodeTuning, tune_decode

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program

MAX_QUERIES = 64  # per program
LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)


def sparse_decode(
    q_BTNH,
    kv_pages_LKMxCH,
    layer,
    page_ids,
    start_B,
    length_B,
    *,
    page_scales_LKM=None,
    tuning: DecodeTuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of T query tokens per row over listed pages: (out_BTNH, lse_BTN in float32).

    kv_pages_LKMxCH: [L, K, M, 2, C, H], any strides except on the last axis. page_ids: [B, K, J],
    selected pages, or [B, P], the page table itself (dense decode, for which no list is made).
    length_B: tokens of the listed pages, (count - 1) C + tokens in the last page; start_B: those
    before the first query. Query t reads the first min(start + t + 1, length), so that new tokens
    attend causally to each other. Rows of length 0 give 0 and lse = -inf. page_scales_LKM: float32
    [L, K, M, 2], factors of the stored keys and values of each page (None = 1). The grid depends on
    shapes only, so that the launches need no host sync. Raises ValueError for shapes that do not
    fit. Sources: arXiv 2606.08446, section 2; the splits are those of Flash-Decoding.
    """
    B, T, N, H = q_BTNH.shape
    _check(q_BTNH, kv_pages_LKMxCH, page_ids, start_B, length_B, page_scales_LKM)
    kv = _readable(kv_pages_LKMxCH[layer])
    K, _, _, C, _ = kv.shape
    out_BTNH = torch.empty(q_BTNH.shape, dtype=q_BTNH.dtype, device=q_BTNH.device)
    float32 = {"dtype": torch.float32, "device": q_BTNH.device}
    lse_BTN = torch.empty((B, T, N), **float32)
    if lse_BTN.numel() == 0:
        return out_BTNH, lse_BTN
    tokens = page_ids.shape[-1] * C
    product = _product_type(q_BTNH, kv)
    itemsize = 4 if product == tl.float32 else kv.element_size()
    tuning = tuning or tune_decode(itemsize, H, B * K, tokens, processors(q_BTNH))
    splits = tuning.splits
    out, lse = out_BTNH[None], lse_BTN
    if splits > 1:
        out = torch.empty((splits, B, T, N, H), **float32)
        lse = torch.empty((splits, B, T, N), **float32)
    scales = None if page_scales_LKM is None else page_scales_LKM[layer]
    R = N // K
    X = max(16, min(MAX_QUERIES, triton.next_power_of_2(T * R)))
    _attend[(K * B * triton.cdiv(T * R, X), splits)](
        q_BTNH, kv, page_ids, scales, start_B, length_B, out, lse,
        *q_BTNH.stride()[:3], *kv.stride()[:4],
        page_ids.stride(0), page_ids.stride(1) if page_ids.ndim == 3 else 0,
        *(scales.stride()[:2] if scales is not None else (0, 0)),
        *out.stride()[:4], T, tokens, H**-0.5 * LOG2E,
        K=K, R=R, C=C, H=H, X=X, TILE=tuning.tile, LEAST=tuning.least,
        PARTS=splits > 1, DOT=product, num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    if splits > 1:
        join_splits(out, lse, out_BTNH, lse_BTN)
    return out_BTNH, lse_BTN


def join_splits(part_ZBTNH, part_lse_ZBTN, out_BTNH, lse_BTN) -> None:
    """Write the joined outputs of the splits into out_BTNH and lse_BTN."""
    splits, B, T, N, H = part_ZBTNH.shape
    _combine[(B * T, N)](
        part_ZBTNH, part_lse_ZBTN, out_BTNH, lse_BTN, *out_BTNH.stride()[:3], T, splits,
        H=H, Z=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip


def _check(q_BTNH, kv_pages_LKMxCH, page_ids, start_B, length_B, page_scales_LKM) -> None:
    B, _, N, H = q_BTNH.shape
    if kv_pages_LKMxCH.ndim != 6 or kv_pages_LKMxCH.shape[3::2] != (2, H):
        raise ValueError(f"{kv_pages_LKMxCH.shape=}: expected [L, K, M, 2, C, {H}]; pass a view")
    K = kv_pages_LKMxCH.shape[1]
    if H < 16 or H & (H - 1):
        raise ValueError(f"{H=}: expected a head dim of 16, 32, 64, ...; use the reference")
    if N % K:
        raise ValueError(f"{q_BTNH.shape=}: expected a multiple of the {K} KV heads in axis 2")
    if page_ids.shape[:-1] not in ((B,), (B, K)):
        raise ValueError(f"{page_ids.shape=}: expected [{B}, {K}, J] or [{B}, P]; pass one per row")
    if start_B.shape != (B,) or length_B.shape != (B,):
        raise ValueError(f"{start_B.shape=}, {length_B.shape=}: expected ({B},); pass one per row")
    scales = None if page_scales_LKM is None else page_scales_LKM.shape
    if scales not in (None, (*kv_pages_LKMxCH.shape[:3], 2)):
        raise ValueError(f"page_scales_LKM: {scales=}: expected [L, K, M, 2] of the same pool")
    named = {"q_BTNH": q_BTNH, "kv_pages_LKMxCH": kv_pages_LKMxCH, "page_ids": page_ids,
             "page_scales_LKM": page_scales_LKM}  # fmt: skip
    for name, x in named.items():
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"{name}: {x.stride()=}: expected a last axis of stride 1; copy it")


def processors(x) -> int:
    """Streaming multiprocessors of the tensor's GPU; those of an H100 for a CPU tensor."""
    if not x.is_cuda:
        return PROCESSORS
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _readable(kv) -> torch.Tensor:
    """The cache, viewed as bytes if it is float8 and Triton cannot convert that on this device."""
    if kv.dtype == torch.float8_e4m3fn and not _converts_float8(kv):
        return kv.view(torch.uint8)
    return kv


def _converts_float8(x) -> bool:
    """Whether Triton converts float8 e4m3 on the tensor's device: NVIDIA, from 8.9 on."""
    if not x.is_cuda or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def _product_type(q, kv) -> tl.dtype:
    """The type of both products, in which queries and cache are exact."""
    halves = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if q.dtype in halves and (kv.dtype == q.dtype or kv.element_size() == 1):
        return halves[q.dtype]
    return tl.float32


@triton.jit
def _attend(
    q_ptr,  # [B, T, N, H]
    kv_ptr,  # [K, M, 2, C, H], one layer
    ids_ptr,  # [B, K, J], or [B, P] with stride_ik = 0
    scales_ptr,  # None or float32 [K, M, 2]
    start_ptr,  # [B]
    length_ptr,  # [B]
    out_ptr,  # [splits, B, T, N, H]: float32, or with one split the output itself
    lse_ptr,  # float32 [splits, B, T, N], contiguous
    stride_qb, stride_qt, stride_qn,
    stride_kk, stride_km, stride_kx, stride_kc,
    stride_ib, stride_ik,
    stride_sk, stride_sm,
    stride_os, stride_ob, stride_ot, stride_on,
    T,
    tokens,  # width of a list
    scale,  # log2(e) / sqrt(H)
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, X: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
) -> None:  # fmt: skip
    blocks = tl.cdiv(T * R, X)
    head, block = tl.program_id(0) % K, tl.program_id(0) // K
    k = head.to(tl.int64)
    b = block // blocks
    split, splits = tl.program_id(1), tl.num_programs(1)
    num_rows = tl.num_programs(0) // K // blocks
    x = (block % blocks) * X + tl.arange(0, X)
    h = tl.arange(0, H)
    t, n = x // R, head * R + x % R
    start = tl.load(start_ptr + b).to(tl.int32)
    length = tl.minimum(tl.load(length_ptr + b).to(tl.int32), tokens)
    limit = tl.minimum(start + t + 1, length)
    end = tl.minimum(start + T, length)
    first, last = _share(tl.cdiv(end, TILE), split, splits, LEAST)

    row = b.to(tl.int64)
    q_offset = row * stride_qb + t[:, None] * stride_qt + n[:, None] * stride_qn + h[None, :]
    q = tl.load(q_ptr + q_offset, mask=(t < T)[:, None], other=0.0).to(DOT)
    ids_ptr += row * stride_ib + k * stride_ik
    kv_ptr += k * stride_kk
    m = tl.full([X], LOWEST, tl.float32)
    denom = tl.zeros([X], tl.float32)
    acc = tl.zeros([X, H], tl.float32)
    token = first * TILE + tl.arange(0, TILE)
    page = tl.load(ids_ptr + _entry(token, C), mask=token < end, other=0)
    for _ in range(first, last):
        exists = token < end
        at = page.to(tl.int64) * stride_km + (token % C) * stride_kc
        at = kv_ptr + at[:, None] + h[None, :]
        key = tl.load(at, mask=exists[:, None], other=0.0)
        s = tl.dot(q, tl.trans(_number(key, DOT)), input_precision="ieee") * scale
        if scales_ptr is not None:
            scale_at = scales_ptr + k * stride_sk + page.to(tl.int64) * stride_sm
            s *= tl.load(scale_at, mask=exists, other=0.0)[None, :]
        page = tl.load(ids_ptr + _entry(token + TILE, C), mask=token + TILE < end, other=0)
        s = tl.where(_visible(token[None, :], limit[:, None]), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        denom = denom * shrink + tl.sum(p, 1)
        if scales_ptr is not None:
            p *= tl.load(scale_at + 1, mask=exists, other=0.0)[None, :]
        value = tl.load(at + stride_kx, mask=exists[:, None], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(DOT), _number(value, DOT), acc, input_precision="ieee")
        m = m_new
        token += TILE

    # NaN differs from 0, so that it is passed on and not mistaken for an empty share.
    nonempty = denom != 0
    safe = tl.where(nonempty, denom, 1.0)
    lse = tl.where(nonempty, (m + tl.log2(safe)) * 0.6931471805599453, -float("inf"))
    line = (split.to(tl.int64) * num_rows + b) * T
    tl.store(lse_ptr + (line + t) * (K * R) + n, lse, mask=t < T)
    out_ptr += split.to(tl.int64) * stride_os + row * stride_ob
    out_ptr += t[:, None] * stride_ot + n[:, None] * stride_on + h[None, :]
    wanted = t < T
    if PARTS:
        wanted &= nonempty  # _combine reads no output of an empty share
    tl.store(out_ptr, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=wanted[:, None])


@triton.jit
def _share(tiles, split, splits, LEAST: tl.constexpr) -> tuple:
    """The first tile of a split, and the tile after its last one."""
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST)
    return split * share, tl.minimum(split * share + share, tiles)


@triton.jit
def _entry(token, C: tl.constexpr) -> tl.tensor:
    return token // C


@triton.jit
def _number(x, DOT: tl.constexpr) -> tl.tensor:
    """x in the products' type; bytes stand for float8."""
    if x.dtype == tl.uint8:
        return float8.decode(x).to(DOT)
    return x.to(DOT)


@triton.jit
def _visible(token, limit) -> tl.tensor:
    return token < limit


@triton.jit
def _combine(
    part_ptr,  # float32 [splits, B, T, N, H]
    part_lse_ptr,  # float32 [splits, B, T, N]
    out_ptr,  # [B, T, N, H]
    lse_ptr,  # float32 [B, T, N]
    stride_ob, stride_ot, stride_on,
    T, splits,
    H: tl.constexpr, Z: tl.constexpr,
) -> None:  # fmt: skip
    line, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_queries = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    at = line * tl.num_programs(1) + n
    s, h = tl.arange(0, Z), tl.arange(0, H)
    part = tl.load(part_lse_ptr + s * num_queries + at, mask=s < splits, other=-float("inf"))
    top = tl.maximum(tl.max(part, 0), LOWEST)
    weight = _weight(part, top)
    total = tl.sum(weight, 0)
    used = part != -float("inf")
    offset = (s * num_queries + at)[:, None] * H + h[None, :]
    parts = tl.load(part_ptr + offset, mask=used[:, None], other=0.0)
    safe = tl.where(total != 0, total, 1.0)
    acc = tl.sum(parts * weight[:, None], 0) / safe
    tl.store(lse_ptr + at, tl.where(total != 0, top + tl.log(safe), -float("inf")))
    out_ptr += (line // T) * stride_ob + (line % T) * stride_ot + n * stride_on
    tl.store(out_ptr + h, acc.to(out_ptr.dtype.element_ty))


@triton.jit
def _weight(lse, top) -> tl.tensor:
    return tl.exp(lse - top)


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The programs that gpu_compile compiles: one and four tokens per row; joining the splits.

    dtype: type of the cache in a Triton signature. For a float8 cache it is fp8e4nv where the
    architecture converts float8 (see _converts_float8), else u8, and queries are bf16.
    """
    from kernels_triton.gpu_compile import Program

    scaled = dtype in ("fp8e4nv", "u8")
    outer = "bf16" if scaled else dtype
    size = {"fp32": 4}.get(dtype, 1 if scaled else 2)
    tuning = tune_decode(size, head_dim, 64 * num_kv_heads, 256 * page)
    group = num_heads // num_kv_heads
    types = {
        "q_ptr": f"*{outer}", "kv_ptr": f"*{dtype}", "ids_ptr": "*i32", "scales_ptr": "*fp32",
        "start_ptr": "*i32", "length_ptr": "*i32", "out_ptr": "*fp32", "lse_ptr": "*fp32",
    }  # fmt: skip
    numbers = _attend.arg_names[len(types) : _attend.arg_names.index("K")]
    types |= dict.fromkeys(numbers, "i32") | {"scale": "fp32"}
    product = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[outer]
    for T in (1, 4):
        constants = {
            "K": num_kv_heads, "R": group, "C": page, "H": head_dim,
            "X": max(16, min(MAX_QUERIES, triton.next_power_of_2(T * group))),
            "TILE": tuning.tile, "LEAST": tuning.least, "PARTS": tuning.splits > 1, "DOT": product,
        }  # fmt: skip
        constants |= {} if scaled else {"scales_ptr": None}
        yield Program(
            f"sparse_decode, {T} x {group} queries", _attend, types, constants,
            tuning.num_warps, tuning.num_stages,
        )  # fmt: skip
    numbers = ("stride_ob", "stride_ot", "stride_on", "T", "splits")
    types = {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": f"*{outer}"}
    types |= {"lse_ptr": "*fp32"} | dict.fromkeys(numbers, "i32")
    yield Program("sparse_decode, splits", _combine, types, {"H": head_dim, "Z": 16}, 4, 3)
