"""Writes new keys and values into the paged cache, and landmarks of completed pages, in place.

    page[x, t] = new[x, t - start]     for lo <= t < hi, all heads, x = key, value; the rest stays
    landmark   = float32 mean over t of page[key, t]                     if hi = C (page complete)

An item is one page of one row of the batch that receives its tokens lo .. hi - 1. A token is one
row of a tile of 16 x 128 numbers, and no DMA can write less than a tile. Pages are therefore read
into VMEM, changed and written back, all K heads of a page by one DMA (K x 8 KiB at H = 128, C = 16,
bfloat16). A page that is overwritten entirely is not read, and an item without tokens causes no
copy.

Grid (groups,), in sequence: program g owns the `rows` items of group g. A ring of SLOTS = 3 buffers
lets copies of the groups before and after overlap with its work:

    program        g - 1              g                g + 1
    slot 0   | change g - 1   | write g - 1    | read g + 2     |
    slot 1   | read g         | change g       | write g        |
    slot 2   | write g - 2    | read g + 1     | change g + 1   |

On chip: SLOTS x rows pages of all heads, at most GROUP_BYTES a slot, and two blocks of new tokens.

Numerics: pages are merged in float32, which holds every cache type exactly. The landmark is the
mean of the keys as the cache holds them, summed in float32 and rounded to the landmarks' type.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.layout import page_shape, touched_pages

SLOTS = 3
GROUP_BYTES = 2**19
PAGE, LO, HI = 0, 1, 2
"""Rows of an item."""
WROTE, MARKED = 1, 2
"""Copies out of a slot that are in flight: of a page; of its landmark too (sum of both)."""
READ, WRITE, MARK = 0, 1, 2
"""Kinds of copies, each with a semaphore per slot."""


def append_kv(
    kv_pages_LKM, landmarks_LMKH, layer, k_BTKH, v_BTKH, page_table_BP, start_B, num_new_B, *,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The pool and the landmarks with T new tokens per row, as reference.append_kv.

    Both are updated in place where the caller donates them. landmarks_LMKH is [L, M, K, H] or
    [L, M, K H / 128, 128]. No two rows may write to the same page. Unlike the reference, nothing is
    written to the null page. interpret: None = compile for a TPU; a pltpu.InterpretParams runs it
    on a CPU. Raises ValueError for arrays of different models.
    """
    B, T, K, H = k_BTKH.shape
    L, _, M = kv_pages_LKM.shape[:3]
    C = kv_pages_LKM.size // (L * K * M * 2 * H)
    E, W = page_shape(C, H)
    _check(kv_pages_LKM, landmarks_LMKH, k_BTKH, v_BTKH, C, E)
    items_I = _items(page_table_BP, start_B, num_new_B, T, C)
    new = jnp.stack([k_BTKH, v_BTKH], 2).astype(kv_pages_LKM.dtype)
    new = _one_token(new, W) if T == 1 else _staged(new, start_B, C, (E, W))
    rows = min(len(items_I), max(1, GROUP_BYTES // (K * E * W * kv_pages_LKM.dtype.itemsize)))
    pad = -len(items_I) % rows
    items = jnp.pad(items_I, ((0, pad), (0, 0))).reshape(-1, rows, 3).swapaxes(1, 2)
    new = jnp.pad(new, [(0, pad)] + [(0, 0)] * (new.ndim - 1))
    stored = kv_pages_LKM.reshape(L, K, M, E, W)
    lanes = W if K * H % W == 0 else H
    marks = landmarks_LMKH.reshape(L, M, -1, lanes)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    kv, marks = _call(layer, items, new, stored, marks, H, interpret)
    return kv.reshape(kv_pages_LKM.shape), marks.reshape(landmarks_LMKH.shape)


def _check(kv_pages_LKM, landmarks_LMKH, k_BTKH, v_BTKH, C, E) -> None:
    _, _, K, H = k_BTKH.shape
    L, heads, M = kv_pages_LKM.shape[:3]
    marks = L, M, K, H
    if v_BTKH.shape != k_BTKH.shape or heads != K:
        raise ValueError(
            f"{v_BTKH.shape=}, {kv_pages_LKM.shape=}: expected the shape of the keys {k_BTKH.shape}"
            f" and a pool [L, {K}, M, ...], pass keys, values and cache of one model"
        )
    if landmarks_LMKH.shape[:2] != (L, M) or landmarks_LMKH.size != L * M * K * H:
        raise ValueError(
            f"{landmarks_LMKH.shape=}: expected {marks} or the same in rows of 128 lanes for"
            f" {kv_pages_LKM.shape=}, pass the landmarks of this pool"
        )
    if E % 2:
        raise ValueError(
            f"{kv_pages_LKM.shape=}: pages of {C} tokens of {H} numbers put keys and values into"
            " one row of lanes, use a larger page"
        )


def _items(page_table_BP, start_B, num_new_B, T, C) -> jax.Array:
    """(physical page, lo, hi) of every page that T tokens can lie in, [B x touched_pages, 3]."""
    B, P = page_table_BP.shape
    page_BQ = start_B[:, None] // C + jnp.arange(touched_pages(T, C))
    first_BQ = start_B[:, None] - page_BQ * C
    lo, hi = jnp.clip(first_BQ, 0, C), jnp.clip(first_BQ + num_new_B[:, None], 0, C)
    used = (lo < hi) & (page_BQ < P)
    physical = jnp.take_along_axis(page_table_BP, jnp.minimum(page_BQ, P - 1), 1)
    items_BQ = jnp.where(used[..., None], jnp.stack([physical, lo, hi], -1), 0)
    return items_BQ.reshape(-1, 3).astype(jnp.int32)


def _one_token(new_B1xKH, W) -> jax.Array:
    """[B, 2, K, W]: the token repeated to W lanes; the kernel repeats it over a page's rows."""
    return jnp.tile(new_B1xKH[:, 0], W // new_B1xKH.shape[-1])


def _staged(new_BTxKH, start_B, C, page) -> jax.Array:
    """The new tokens at their places in the pages they go to, [B x touched_pages, K, E, W]."""
    B, T, _, K, H = new_BTxKH.shape
    touched = touched_pages(T, C)
    token_BX = jnp.arange(touched * C) - (start_B % C)[:, None]
    token_BX = jnp.clip(token_BX, 0, T - 1)[:, :, None, None, None]
    new = jnp.take_along_axis(new_BTxKH, token_BX, 1).reshape(B * touched, C, 2, K, H)
    return new.transpose(0, 3, 2, 1, 4).reshape(B * touched, K, *page)


def _call(layer, items, new, stored, marks, H, interpret) -> list[jax.Array]:
    _, K, _, E, W = stored.shape
    num_groups, _, rows = items.shape

    def smem(shift) -> pl.BlockSpec:
        def index(g, layer) -> tuple[Any, int, int]:
            return jnp.minimum(g + shift, num_groups - 1), 0, 0

        return pl.BlockSpec((1, 3, rows), index, memory_space=pltpu.SMEM)

    def block(g, layer) -> tuple[Any, ...]:
        return g, *[0] * (new.ndim - 1)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, H=H),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_groups,),
            in_specs=[smem(0), smem(1), pl.BlockSpec((rows, *new.shape[1:]), block), hbm, hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=[
                pltpu.VMEM((SLOTS, rows, K, E, W), stored.dtype),
                pltpu.VMEM((SLOTS, rows, *marks.shape[2:]), marks.dtype),
                pltpu.SMEM((SLOTS, rows), jnp.int32),
                pltpu.SemaphoreType.DMA((3, SLOTS)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (stored, marks)],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=False if interpret is None else interpret,
        name="append_kv",
    )(layer, items, items, new, stored, marks)


def _kernel(
    layer,  # SMEM [1]
    items,  # SMEM [1, 3, rows]: this group
    coming,  # SMEM [1, 3, rows]: the next group
    new,  # VMEM [rows, 2, K, W] (T = 1) or [rows, K, E, W]
    _kv, _marks,  # the inputs that kv and marks alias
    kv,  # HBM [L, K, M, E, W]
    marks,  # HBM [L, M, K H / W', W'], W' = 128 where heads fill the rows
    pages,  # VMEM [SLOTS, rows, K, E, W]
    means,  # VMEM [SLOTS, rows, K H / W', W']
    done,  # SMEM [SLOTS, rows]: 0, WROTE or WROTE + MARKED
    sems,  # DMA [3, SLOTS]: READ, WRITE, MARK
    *, H,
) -> None:  # fmt: skip
    g, num_groups = pl.program_id(0), pl.num_programs(0)
    _, rows, _, E, W = pages.shape
    slot, C = _slot(g), E * W // (2 * H)

    def each(visit) -> None:
        lax.fori_loop(0, rows, lambda r, _: (visit(r), 0)[1], 0)

    def page_copy(slot, r, page, kind) -> Any:
        there, here = kv.at[layer[0], :, page], pages.at[slot, r]
        source, target = (there, here) if kind == READ else (here, there)
        return pltpu.make_async_copy(source, target, sems.at[kind, slot])

    def mark_copy(slot, r, page) -> Any:
        return pltpu.make_async_copy(
            means.at[slot, r], marks.at[layer[0], page], sems.at[MARK, slot]
        )

    def reads(group, slot, act) -> None:
        def visit(r) -> None:
            lo, hi = group[0, LO, r], group[0, HI, r]

            @pl.when(_is_partial(lo, hi, C))
            def _() -> None:
                act(page_copy(slot, r, group[0, PAGE, r], READ))

        each(visit)

    def wait_writes(slot) -> None:
        def visit(r) -> None:
            @pl.when(done[slot, r] >= WROTE)
            def _() -> None:
                _wait_write(page_copy(slot, r, 0, WRITE))  # a wait needs the size of the copy only

            @pl.when(done[slot, r] > WROTE)
            def _() -> None:
                _wait_write(mark_copy(slot, r, 0))

            done[slot, r] = 0

        each(visit)

    def change(r) -> None:
        lo, hi, page = items[0, LO, r], items[0, HI, r], items[0, PAGE, r]

        @pl.when(lo < hi)
        def _() -> None:
            merged_KEW = _merge(pages[slot, r], new[r], lo, hi, H)
            pages[slot, r] = merged_KEW.astype(pages.dtype)
            page_copy(slot, r, page, WRITE).start()
            done[slot, r] = WROTE

            @pl.when(_completes(hi, C))
            def _() -> None:
                means[slot, r] = _mean_key(merged_KEW, H, means.shape[3]).astype(means.dtype)
                mark_copy(slot, r, page).start()
                done[slot, r] = WROTE + MARKED

    @pl.when(g == 0)
    def _() -> None:
        for s in range(SLOTS):
            each(lambda r, s=s: done.__setitem__((s, r), 0))
        reads(items, slot, lambda copy: copy.start())

    @pl.when(g + 1 < num_groups)
    def _() -> None:
        wait_writes(_slot(g + 1))  # of group g + 1 - SLOTS
        reads(coming, _slot(g + 1), lambda copy: copy.start())

    reads(items, slot, _wait_read)
    each(change)

    @pl.when(g + 1 == num_groups)
    def _() -> None:
        for s in range(SLOTS):
            wait_writes(s)


def _slot(group) -> jax.Array:
    return lax.rem(group, SLOTS)


def _is_partial(lo, hi, C) -> jax.Array:
    """Whether some old tokens of the page stay, so that it has to be read."""
    return (lo < hi) & ((lo > 0) | (hi < C))


def _completes(hi, C) -> jax.Array:
    return hi == C


def _wait_read(copy) -> None:
    copy.wait()


def _wait_write(copy) -> None:
    copy.wait()


def _merge(old_KEW, new, lo, hi, H) -> jax.Array:
    """The page with tokens lo .. hi - 1 replaced by new ones, in float32."""
    K, E, W = old_KEW.shape
    new = new.astype(jnp.float32)
    if new.shape == (2, K, W):  # one token
        keys, values = (jnp.broadcast_to(new[x][:, None], (K, E // 2, W)) for x in (0, 1))
        new = jnp.concatenate([keys, values], 1)
    row = lax.rem(lax.broadcasted_iota(jnp.int32, (E, W), 0), E // 2)
    token = row * (W // H) + lax.div(lax.broadcasted_iota(jnp.int32, (E, W), 1), H)
    fresh = (token >= lo) & (token < hi)
    return jnp.where(fresh, new, old_KEW.astype(jnp.float32))


def _mean_key(page_KEW, H, lanes) -> jax.Array:
    """The mean of the keys, which are the first half of a page's rows: [K H / lanes, lanes]."""
    K, E, W = page_KEW.shape
    mean_KW = page_KEW[:, : E // 2].sum(1) / (E * W // (2 * H))
    if lanes == H:
        return functools.reduce(jnp.add, [mean_KW[:, i : i + H] for i in range(0, W, H)])
    # A row of the page holds several tokens of one head: add them up, in every part of the row. A
    # row of landmarks holds several heads, part i that of head i: keep that part and add rows up.
    mean_KW = sum(pltpu.roll(mean_KW, i, 1) for i in range(H, W, H)) + mean_KW
    head = lax.rem(lax.broadcasted_iota(jnp.int32, (K, W), 0), W // H)
    part = lax.div(lax.broadcasted_iota(jnp.int32, (K, W), 1), H)
    mean_KW = jnp.where(head == part, mean_KW, 0)
    rows = [mean_KW[i : i + W // H].sum(0, keepdims=True) for i in range(0, K, W // H)]
    return jnp.concatenate(rows)
