"""Decode attention over listed pages of the paged cache: output and log-sum-exp, on TPU.

    out = softmax(q k^T / sqrt(H)) v        over the first `length` tokens of the listed pages
    lse = log(sum(exp(q k^T / sqrt(H))))    query t reads the first min(start + t + 1, length)

Grid (K, B), heads in parallel, rows in sequence: one program owns one KV head of one row, with all
its T x R queries. The pool stays in HBM. A DMA per page copies the listed pages into a ring of
buffers in VMEM. A buffer holds a block of pages (tuning.DecodeTuning), and a block is one step of
the online softmax. While block i is multiplied, the next ring - 1 blocks are in flight. Behind the
last block of a row these are the first blocks of the next row, so that only the first row of a head
waits for its pages. With a ring of 4 and rows of 3 and 5 blocks:

    list of row b        | block 0 | block 1 | block 2 |
    list of row b + 1                                  | block 0 | block 1 | ...
    buffer                    0         1         2         3         0
                              |         |_________|_________|         |
                         multiplied now       in flight       starts when block 1 is multiplied

Buffers with an even and an odd number are separate arrays. The compiler then knows that a copy into
one and a product from the other are independent, and runs them side by side. If a block is full,
visible to every query, and followed by a full block, copies and products stand in one straight
piece of code (`hot`). Otherwise, at the end of a row or before a short one, the program starts as
many copies as there are pages and masks the rest, values included, since 0 x NaN is NaN.

On chip, per program: ring x block pages; q, output and state of at most 2 T R x 128 numbers; in
SMEM the lists of this row and the next (two windows of 2 J ids); with page scales, two windows of
the head's scales, 8 M bytes each. 32 pages in a block, ring 6, C = 16, H = 128, bfloat16: 1.6 MiB.

A page of W = 128 lanes holds C H / W lines of keys, then as many of values (layout.py). With H = 64
a line holds two tokens. The queries are then passed twice, as [q, 0] for even and [0, q] for odd
tokens, so that one product gives the scores of both; each half has its own softmax, and
decode_block.finish joins them.

Numerics: products take bfloat16 if query and cache are bfloat16 or narrower (float8 is exact in
it), else float32 at HIGHEST precision. Products, softmax and state accumulate in float32. Weights
are rounded to the products' type for the second product; the denominator sums them unrounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import decode_block
from kernels_pallas.decode_block import SCALED_PAGES, DecodeShape
from kernels_pallas.layout import page_shape
from kernels_pallas.reference import NEG
from kernels_pallas.tuning import LANES, DecodeTuning, tune_decode

MIN_LINES = 8  # sublanes: keys and values of a page must each fill them


def sparse_decode(
    q_BTNH,
    kv_pages_LKM,
    layer,
    page_ids,
    start_B,
    length_B,
    *,
    page_scales_LKM=None,
    tuning: DecodeTuning | None = None,
    chip: str | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over listed pages as reference.sparse_decode: (out_BTNH, lse_BTN).

    page_ids: [B, K, J], selected pages, or [B, P], the page table itself (dense decode).
    page_scales_LKM: float32 [L, K, M, 2], factors of the stored keys and values of each page
    (None = 1). Head dims 64 and 128. chip: jax's device_kind to tune for (None = the default
    device). interpret: None = compile for a TPU; a pltpu.InterpretParams runs it on a CPU. Raises
    ValueError for shapes that the kernel does not take.
    """
    B, T, N, H = q_BTNH.shape
    L, K, M = kv_pages_LKM.shape[:3]
    C = math.prod(kv_pages_LKM.shape[3:]) // (2 * H)
    _check(q_BTNH, kv_pages_LKM, page_ids, page_scales_LKM, C, interpret)
    tuning = tuning or tune_decode(kv_pages_LKM.dtype, H, C, chip)
    if tuning.num_buffers % 2:
        raise ValueError(f"{tuning.num_buffers=}: expected an even number; change tuning")
    shape = DecodeShape(T, N // K, H, C, M, K, tuning.pages_per_block, tuning.num_buffers)
    pool = kv_pages_LKM.reshape(L * K * M, *page_shape(C, H))
    scales = []
    if page_scales_LKM is not None:
        scales = [_scale_lines(jnp.asarray(page_scales_LKM)[layer])]
    lists = page_ids.reshape(B, -1, 1, page_ids.shape[-1])
    operands = _pack_queries(q_BTNH, pool.dtype, shape), lists, scales, pool
    call = _build(shape, operands, q_BTNH.dtype, interpret)
    out, lse = call(
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.asarray(start_B, jnp.int32),
        jnp.asarray(length_B, jnp.int32),
        *operands,
    )
    out = out[:, :, : T * shape.group].reshape(B, K, T, shape.group, H)
    lse = lse[:, :, : T * shape.group].reshape(B, K, T, shape.group)
    return out.swapaxes(1, 2).reshape(B, T, N, H), lse.swapaxes(1, 2).reshape(B, T, N)


def _check(q_BTNH, kv_pages_LKM, page_ids, page_scales_LKM, C, interpret) -> None:
    B, _, N, H = q_BTNH.shape
    K = kv_pages_LKM.shape[1]
    if H not in (64, 128):
        raise ValueError(f"{H=}: expected a head dim of 64 or 128; use the reference for others")
    if N % K:
        raise ValueError(f"{N=}: expected a multiple of the {K} KV heads; pass both of one model")
    if page_ids.shape[:-1] not in ((B,), (B, K)):
        raise ValueError(f"{page_ids.shape=}: expected [{B}, {K}, J] or [{B}, P]; pass one per row")
    if page_scales_LKM is not None and page_scales_LKM.shape != (*kv_pages_LKM.shape[:3], 2):
        expected = (*kv_pages_LKM.shape[:3], 2)
        raise ValueError(f"{page_scales_LKM.shape=}: expected {expected}; pass those of this pool")
    if not interpret and C * H % (MIN_LINES * LANES):
        least = MIN_LINES * LANES // H
        raise ValueError(f"{C=}: expected a multiple of {least} at head dim {H}; change page_size")


def _pack_queries(q_BTNH, cache_dtype, shape: DecodeShape) -> jax.Array:
    """Queries [B, K, fold X, W]: X = T R padded to sublanes, repeated for each token of a line."""
    B, T, N, H = q_BTNH.shape
    if jnp.dtype(cache_dtype).itemsize > 1:
        q_BTNH = q_BTNH.astype(jnp.promote_types(q_BTNH.dtype, cache_dtype))
    q = q_BTNH.reshape(B, T, shape.num_heads, shape.group, H).swapaxes(1, 2)
    q = q.reshape(B, shape.num_heads, T * shape.group, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -q.shape[2] % MIN_LINES), (0, 0)))
    if shape.fold == 1:
        return q
    none = jnp.zeros_like(q)
    return jnp.concatenate([jnp.concatenate([q, none], -1), jnp.concatenate([none, q], -1)], 2)


def _scale_lines(scales_KM2) -> jax.Array:
    """The scales as [K, ceil(M / 64), 128]: a line holds the two scales of 64 pages."""
    K, M, _ = scales_KM2.shape
    padded = jnp.pad(scales_KM2, ((0, 0), (0, -M % SCALED_PAGES), (0, 0)))
    return padded.reshape(K, -1, LANES)


def _build(shape: DecodeShape, operands, out_dtype, interpret) -> Callable[..., list[jax.Array]]:
    """The pallas_call for these shapes."""
    q, ids, scales, pool = operands
    B, K, rows, _ = q.shape
    X = rows // shape.fold
    listed = min(2, B)
    dense, width = ids.shape[1] == 1 and K > 1, ids.shape[-1]

    def lists(k, b, *_) -> tuple[Any, ...]:
        return jnp.minimum(b, B - listed), 0 if dense else k, 0, 0

    def own(k, b, *_) -> tuple[Any, ...]:
        return b, k, 0, 0

    window = tuple(map(pl.Element, (listed, 1, 1, width)))
    return pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K, B),
            in_specs=[
                pl.BlockSpec((1, 1, rows, LANES), own),
                pl.BlockSpec(window, lists, memory_space=pltpu.SMEM),
                [pl.BlockSpec((1, *s.shape[1:]), lambda k, b, *_: (k, 0, 0)) for s in scales],
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, X, shape.head_dim), own),
                pl.BlockSpec((1, 1, X, 1), own),
            ],
            scratch_shapes=[
                [pltpu.VMEM((shape.ring // 2, shape.block, *pool.shape[1:]), pool.dtype)] * 2,
                pltpu.SemaphoreType.DMA((shape.ring,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                [pltpu.VMEM((shape.block, LANES), jnp.float32) for _ in scales],
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, X, shape.head_dim), out_dtype),
            jax.ShapeDtypeStruct((B, K, X, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # a check per copy: starting copies limits the speed
        ),
        interpret=interpret or False,
        name="sparse_decode",
    )


def _kernel(
    layer_ref,  # SMEM [1]
    start_ref,  # SMEM [B]
    length_ref,  # SMEM [B]
    q_ref,  # VMEM [1, 1, fold X, W]
    ids_ref,  # SMEM [2, 1, 1, J]: the lists of this row and of the next
    scales_refs,  # [] or [VMEM [1, ceil(M / 64), W]]
    pool_ref,  # HBM [L K M, E, W]
    out_ref,  # VMEM [1, 1, X, H]
    lse_ref,  # VMEM [1, 1, X, 1]
    buf_refs,  # 2 x VMEM [ring / 2, block, E, W]: buffers 0, 2, .. and 1, 3, ..
    sem_ref,  # DMA [ring]
    ring_ref,  # SMEM [1]: buffer of the row's first block
    m_ref,  # VMEM [fold X, 1]
    denom_ref,  # VMEM [fold X, 1]
    acc_ref,  # VMEM [fold X, W]
    block_scales_refs,  # [] or [VMEM [block, W]]: scales of the block's pages in lanes 0 and 1
    *,
    shape: DecodeShape,
) -> None:
    k, b, num_rows = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    block, ring, ahead = shape.block, shape.ring, shape.ring - 1
    first = (layer_ref[0] * shape.num_heads + k) * shape.num_pages
    pool = pool_ref.at[pl.ds(first, shape.num_pages)]
    start, length = start_ref[b], length_ref[b]
    has_next = b + 1 < num_rows
    last_list = ids_ref.shape[0] - 1
    row = jnp.where(has_next, 0, last_list)
    pages = _ceil_div(length, shape.page)
    next_length = length_ref[jnp.where(has_next, b + 1, b)]
    next_pages = jnp.where(has_next, _ceil_div(next_length, shape.page), 0)
    blocks = _ceil_div(pages, block)

    def source(v) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(list, first entry, pages) of block v of this row, or block v - blocks of the next."""
        mine = v < blocks
        first = jnp.where(mine, v, v - blocks) * block
        count = jnp.clip(jnp.where(mine, pages, next_pages) - first, 0, block)
        return jnp.where(mine, row, jnp.minimum(row + 1, last_list)), first, count

    @pl.when(b == 0)
    def _() -> None:
        ring_ref[0] = 0

    base = ring_ref[0]  # block v lies in buffer (base + v) % ring

    def copy(page, slot, odd, j) -> Any:
        return _page_copy(pool.at[page], buf_refs, slot, odd, j, sem_ref)

    def start_block(v, slot, odd) -> None:
        listed, first, count = source(v)

        @pl.loop(0, count)
        def _(j) -> None:
            copy(_page_id(ids_ref.at[listed, 0, 0], first + j), slot, odd, j).start()

    # Start the blocks that the row before has not: all of the first row, those after a short row.
    @pl.loop(0, ring // 2)
    def _(pair) -> None:
        for odd in (0, 1):
            slot = 2 * pair + odd
            v = lax.rem(slot + ring - base, ring)
            missing = (v < ahead) & ((v >= blocks) | (b == 0))
            pl.when(missing)(functools.partial(start_block, v, slot, odd))

    m_ref[...] = jnp.full_like(m_ref, NEG)
    denom_ref[...] = jnp.zeros_like(denom_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    state = m_ref, denom_ref, acc_ref
    clear = lax.div(jnp.minimum(start + 1, length), shape.block_tokens)
    limits = start, length

    def attend(i, slot, odd, masked) -> None:
        scales = None
        if scales_refs:
            count = jnp.minimum(pages - i * block, block)
            ids = ids_ref.at[row, 0, 0]
            scales = decode_block.block_scales(
                scales_refs[0], block_scales_refs[0], ids, i * block, count, shape
            )
        buf_ref, mask = _buffer(buf_refs, slot, odd), limits if masked else None
        decode_block.attend(i, q_ref[0, 0], buf_ref, state, mask, scales, shape)

    def step(i, slot, odd) -> None:
        after = lax.rem(slot + ahead, ring)
        listed, first, count = source(i + ahead)
        hot = (i < clear) & (count == block)

        @pl.when(hot)
        def _() -> None:
            _wait(_buffer(buf_refs, slot, odd), sem_ref.at[slot])
            ids = ids_ref.at[listed, 0, 0, pl.ds(first, block)]
            for j in range(block):
                copy(_page_id(ids, j), after, 1 - odd, j).start()
            attend(i, slot, odd, False)

        @pl.when(jnp.logical_not(hot))
        def _() -> None:
            start_block(i + ahead, after, 1 - odd)

            @pl.loop(0, jnp.minimum(pages - i * block, block))
            def _(j) -> None:
                _wait(_buffer(buf_refs, slot, odd).at[j], sem_ref.at[slot])

            attend(i, slot, odd, True)

    @pl.loop(0, blocks)
    def _(i) -> None:
        slot = lax.rem(base + i, ring)
        for odd in (0, 1):
            pl.when(lax.rem(slot, 2) == odd)(functools.partial(step, i, slot, odd))

    ring_ref[0] = lax.rem(base + blocks, ring)
    decode_block.finish(state, out_ref, lse_ref, shape)


def _ceil_div(a, b) -> jax.Array:
    return lax.div(a + b - 1, b)


def _page_id(ids_ref, j) -> jax.Array:
    return ids_ref[j]


def _buffer(buf_refs, slot, odd) -> Any:
    """Buffer `slot` of the ring, from the half for its parity, which is known at tracing."""
    return buf_refs[odd].at[lax.div(slot, 2)]


def _page_copy(page_ref, buf_refs, slot, odd, j, sem_ref) -> Any:
    return pltpu.make_async_copy(page_ref, _buffer(buf_refs, slot, odd).at[j], sem_ref.at[slot])


def _wait(buf_ref, sem_ref) -> None:
    """Wait until the copies on this semaphore have brought as many bytes as buf_ref holds."""
    pltpu.make_async_copy(buf_ref, buf_ref, sem_ref).wait()
