"""Pages that sparse decode reads: landmark scores and an exact, deterministic top-k.

    score[b, k, p] = mean_r q[b, k R + r] . landmark[page_table[b, p], k]        (float32)
    chosen[b, k]   = {0, n - 2, n - 1} and the k_b best of 1 .. n - 3, ties to the lower page
    page_ids       = page_table[b, sorted(chosen)], then zeros

Grid (B,): one program owns one row with all its KV heads (heads in sublanes, pages in lanes), and
works in three steps.

1. Gather and score. Landmarks are copied from HBM in units of `unit` pages through a ring of
   buffers, of which all but one are in flight:

       pages of the row   | unit 0 | unit 1 | unit 2 | ... | unit ring - 1 | unit ring | ...
       buffer                 0        1        2               ring - 1         0
                           scored   |________ in flight _________________|  starts after unit 0

   A unit takes one DMA if its pages follow one another in the pool, as pages that were allocated
   together do, else one DMA of K x H numbers per page. Only the first n - 2 pages are fetched (to a
   multiple of `unit`), and none if k = 0 or every page is chosen. One product on the MXU of the
   queries with the rows of all pages and heads gives the score of every head with the landmarks of
   every head; a gather along lanes keeps each head's own.
2. Threshold. The k-th largest score as an order-preserving int32, found `digit` bits at a time from
   the highest bits by counting (a kernel has no sort). Pages with equal scores are then taken from
   the lowest page on.
3. List. A triangular matrix product ranks the chosen pages, 128 at a time. Entry j of a head is the
   page of rank j, found for 128 entries at once by binary search over the ranks (gathers along
   lanes), without a scalar loop.

Numerics: scores are float32 products. Against bfloat16 landmarks the query is split into three
bfloat16 parts with exactly its sum, which go through the MXU in the same pass. After that every
step is exact: keys and page ids are integers.

Heads of fewer than 128 numbers lie side by side in rows of 128 lanes ([L, M, K H / 128, 128], see
layout.landmark_shape), because XLA would copy [L, M, K, 64] into another layout.

On-chip bytes per program, with P pages padded to 512 (in brackets: P = 2,560, 8 heads of 128,
bfloat16). VMEM: the ring, 2 x ring x unit x K H (1 MiB); keys, 4 max(K, 8) P (80 KiB); two buffers
of page ids, 4 P each, of queries, and of the list, 4 K J (44 KiB). SMEM: the page table of this and
the next row, 2 x 4 P (20 KiB), their runs, 8 P / unit, and 8 B + 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import page_list
from kernels_pallas.reference import NUM_RESERVED
from kernels_pallas.tuning import LANES, SUBLANES, tune_select


def select_pages(
    q_BNH,
    landmarks_LMKH,
    layer,
    page_table_BP,
    num_pages_B,
    k_B,
    *,
    max_selected,
    tuning=None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """The physical pages that each (sequence, KV head) reads: (page_ids_BKJ, count_B).

    Arguments and results as in reference.select_pages; landmarks_LMKH is [L, M, K, H] or
    [L, M, K H / 128, 128]. tuning: a SelectTuning. interpret: None = compile for a TPU; a
    pltpu.InterpretParams runs it on a CPU. Raises ValueError for shapes or sizes that do not fit.
    """
    B, N, H = q_BNH.shape
    P = page_table_BP.shape[1]
    landmarks_LMEW = _rows_of_lanes(landmarks_LMKH, H)
    _, M, E, W = landmarks_LMEW.shape
    K = E * W // H
    tuning = tuning or tune_select(P, E)
    _check(q_BNH, landmarks_LMKH, page_table_BP, num_pages_B, k_B, max_selected, tuning)
    q_BKH = q_BNH.reshape(B, K, -1, H).astype(jnp.float32).mean(2)
    num_pages_B = jnp.asarray(num_pages_B, jnp.int32)
    taken_B = jnp.clip(k_B, 0, jnp.maximum(num_pages_B - NUM_RESERVED, 0)).astype(jnp.int32)
    room = max(max_selected - NUM_RESERVED, 0)

    padded = pl.cdiv(P, tuning.group * LANES) * tuning.group * LANES
    table_BP = _prepare_table(page_table_BP, num_pages_B, padded)
    width = pl.cdiv(max_selected, LANES) * LANES
    queries = _pack_queries(q_BKH, landmarks_LMEW.dtype, W)
    page_ids_BKJ = _call(K, width, padded, queries, landmarks_LMEW, tuning, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1),
        num_pages_B,
        jnp.minimum(taken_B, room),
        table_BP.reshape(B, 1, padded),
        _runs(table_BP, num_pages_B, tuning.unit, M)[:, None],
        table_BP.reshape(B, padded // LANES, LANES),
        queries,
        landmarks_LMEW,
    )
    return page_ids_BKJ[:, :, :max_selected], taken_B + jnp.minimum(num_pages_B, NUM_RESERVED)


def _call(K, width, padded, queries, landmarks_LMEW, tuning, interpret) -> Callable[..., jax.Array]:
    """The kernel as a function of (layer, pages, k, table, runs, table, queries, landmarks)."""
    B, blocks = queries.shape[0], padded // LANES

    def row(*shape, space=pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda b, *_: (b, 0, 0), memory_space=space)

    return pl.pallas_call(
        functools.partial(_kernel, tuning=tuning),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B,),
            in_specs=[
                row(1, padded, space=pltpu.SMEM),
                row(1, padded // tuning.unit, space=pltpu.SMEM),
                row(blocks, LANES),
                row(*queries.shape[1:]),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=row(K, width),
            scratch_shapes=[
                pltpu.VMEM((tuning.ring, tuning.unit, *landmarks_LMEW.shape[2:]), queries.dtype),
                pltpu.VMEM((blocks, max(K, SUBLANES), LANES), jnp.int32),
                pltpu.SemaphoreType.DMA((tuning.ring,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, width), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        interpret=False if interpret is None else interpret,
        name="select_pages",
    )


def _pack_queries(q_BKH, dtype, width) -> jax.Array:
    """Mean queries [B, parts x max(K, 8), W], each in the lanes in which its landmarks lie.

    Against bfloat16 landmarks a float32 query is the exact sum of three bfloat16 parts. They are
    made by reduce_precision, because XLA may remove a pair of casts.
    """
    B, K, H = q_BKH.shape
    heads = width // H
    own = jnp.arange(K)[:, None] % heads == jnp.arange(heads)
    q = jnp.where(own[:, :, None], q_BKH[:, :, None], 0).reshape(B, K, width)
    q = jnp.pad(q, ((0, 0), (0, max(SUBLANES - K, 0)), (0, 0)))
    if dtype != jnp.bfloat16:
        return q.astype(jnp.promote_types(dtype, jnp.float32))
    parts = []
    for _ in range(3):
        parts.append(lax.reduce_precision(q, 8, 7))
        q = q - parts[-1]
    return jnp.concatenate(parts, 1).astype(dtype)


def _rows_of_lanes(landmarks_LMKH, head_dim) -> jax.Array:
    """The landmarks as they are stored: [L, M, K H / 128, 128] if heads fill the rows."""
    L, M, rows, lanes = landmarks_LMKH.shape
    if lanes == head_dim < LANES and LANES % head_dim == 0 and rows * head_dim % LANES == 0:
        return landmarks_LMKH.reshape(L, M, rows * head_dim // LANES, LANES)
    return landmarks_LMKH


def _check(q_BNH, landmarks_LMKH, page_table_BP, num_pages_B, k_B, max_selected, tuning) -> None:
    B, N, H = q_BNH.shape
    _, _, rows, lanes = landmarks_LMKH.shape
    if lanes % H or N % (rows * lanes // H):
        raise ValueError(
            f"{landmarks_LMKH.shape=}: expected [L, M, K, {H}] or [L, M, K {H} / 128, 128] with K"
            f" dividing the {N} heads of {q_BNH.shape=}; pass both of the same model"
        )
    if not page_table_BP.shape[0] == num_pages_B.shape[0] == k_B.shape[0] == B:
        raise ValueError(
            f"{page_table_BP.shape=}, {num_pages_B.shape=}, {k_B.shape=}: expected {B} rows each,"
            " as many as queries"
        )
    if max_selected < 1:
        raise ValueError(f"{max_selected=}: expected at least 1 page; widen the list")
    unit, ring, group, digit = tuning
    if LANES % unit or ring < 2 or ring & (ring - 1) or group < 1 or 32 % digit:
        raise ValueError(
            f"{tuning=}: expected a unit that divides 128, a ring of a power of 2, a group of at"
            " least 1 and a digit that divides 32; change tuning"
        )


def _prepare_table(page_table_BP, num_pages_B, padded) -> jax.Array:
    """The page table, padded: unused entries are the row's first page, which exists."""
    used = jnp.arange(page_table_BP.shape[1]) < num_pages_B[:, None]
    table_BP = jnp.where(used, page_table_BP, page_table_BP[:, :1]).astype(jnp.int32)
    return jnp.pad(table_BP, ((0, 0), (0, padded - table_BP.shape[1])), mode="edge")


def _runs(table_BP, num_pages_B, unit, num_physical) -> jax.Array:
    """The first page of each unit with pages that follow one another in the pool, else -1.

    Returns [B, units]. Entries past the row's last page may hold anything: whatever page lies there
    is read and ignored.
    """
    B, P = table_BP.shape
    table_Bnu = table_BP.reshape(B, -1, unit)
    first_Bn = table_Bnu[:, :, 0]
    follows = table_Bnu == first_Bn[..., None] + jnp.arange(unit)
    unused = (jnp.arange(P) >= num_pages_B[:, None]).reshape(table_Bnu.shape)
    whole_Bn = (follows | unused).all(-1) & (first_Bn + unit <= num_physical)
    return jnp.where(whole_Bn, first_Bn, -1)


def _kernel(
    layer_ref,  # [1] int32, SMEM
    num_pages_ref,  # [B] int32, SMEM
    k_ref,  # [B] int32, SMEM: number of candidates to choose
    table_ref,  # [1, 1, P] int32, SMEM
    runs_ref,  # [1, 1, P / unit] int32, SMEM: _runs
    ids_ref,  # [1, P / 128, 128] int32, VMEM: the table again
    q_ref,  # [1, parts x max(K, 8), W], VMEM: mean queries, from _pack_queries
    landmarks_ref,  # [L, M, E, W], HBM
    list_ref,  # [1, K, J] int32, VMEM
    buffer_ref,  # [ring, unit, E, W], VMEM
    keys_ref,  # [P / 128, max(K, 8), 128] int32, VMEM: scores, order-preserving
    sem,  # [ring] DMA semaphores, one per buffer
    *,
    tuning,
) -> None:
    b, group = pl.program_id(0), tuning.group
    n, k = num_pages_ref[b], k_ref[b]
    num_groups = pl.cdiv(n, group * LANES)
    undecided = (k > 0) & (k < n - NUM_RESERVED)
    num_units = pl.cdiv(jnp.where(undecided, n - 2, 0), tuning.unit)

    def clear(g, _) -> int:
        """Give every candidate the same score, which is enough if none or all are chosen."""
        page = page_list.page_of_lane(g, group, keys_ref.shape[1])
        candidate = page_list.is_candidate(page, n)
        keys_ref[pl.ds(g * group, group)] = jnp.where(candidate, 0, page_list.LOWEST)
        return 0

    lax.fori_loop(0, num_groups, clear, 0)
    landmarks = landmarks_ref.at[layer_ref[0]]
    fetch = functools.partial(_fetch, landmarks, table_ref, runs_ref, buffer_ref, sem)

    def first(unit, _) -> int:
        fetch(unit)
        return 0

    def score(unit, _, more) -> int:
        _wait(unit, buffer_ref, sem)
        pages = buffer_ref[_slot(unit, tuning.ring)]  # before a DMA, as no load is moved over one
        if more:
            fetch(unit + tuning.ring - 1)
        _score(unit, n, pages, q_ref[0], keys_ref, list_ref.shape[1])
        return 0

    ahead = jnp.minimum(num_units, tuning.ring - 1)
    lax.fori_loop(0, ahead, first, 0)
    lax.fori_loop(0, num_units - ahead, functools.partial(score, more=True), 0)
    lax.fori_loop(num_units - ahead, num_units, functools.partial(score, more=False), 0)
    threshold, above = page_list.find_threshold(keys_ref, k, num_groups, undecided, tuning)
    list_ref[0] = jnp.zeros(list_ref.shape[1:], jnp.int32)
    page_list.write_list(list_ref, keys_ref, ids_ref, threshold, k - above, n, num_groups, group)


def _slot(unit, ring) -> jax.Array:
    return unit & (ring - 1)


def _fetch(landmarks_MEW, table_ref, runs_ref, buffer_ref, sem, unit) -> None:
    ring, pages = buffer_ref.shape[:2]
    slot, first = _slot(unit, ring), runs_ref[0, 0, unit]

    @pl.when(first >= 0)
    def _() -> None:
        run = landmarks_MEW.at[pl.ds(first, pages)]
        pltpu.make_async_copy(run, buffer_ref.at[slot], sem.at[slot]).start()

    @pl.when(first < 0)
    def _() -> None:
        for i in range(pages):
            page = landmarks_MEW.at[table_ref[0, 0, unit * pages + i]]
            pltpu.make_async_copy(page, buffer_ref.at[slot, i], sem.at[slot]).start()


def _wait(unit, buffer_ref, sem) -> None:
    """Wait for the bytes of all pages of a unit."""
    slot = _slot(unit, buffer_ref.shape[0])
    pltpu.make_async_copy(buffer_ref.at[slot], buffer_ref.at[slot], sem.at[slot]).wait()


def _score(unit, n, pages_uEW, q_XW, keys_ref, num_heads) -> None:
    """Write the order-preserving scores of a unit into the lanes of their pages in keys_ref."""
    num, E, W = pages_uEW.shape
    rows = keys_ref.shape[1]
    exact = lax.Precision.HIGHEST if q_XW.dtype == jnp.float32 else None
    products = lax.dot_general(
        q_XW, pages_uEW.reshape(num * E, W), (((1,), (1,)), ((), ())),
        precision=exact, preferred_element_type=jnp.float32,
    )  # fmt: skip
    parts = [products[first : first + rows] for first in range(0, len(q_XW), rows)]
    scores = sum(parts[-2::-1], parts[-1])  # [rows, pages x E], the smallest part first
    units = LANES // num  # in a block of 128 pages
    block, part = unit >> (units.bit_length() - 1), unit & (units - 1)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    place = lane - part * num
    row = lax.div(lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) * E, num_heads)
    score = _take_from(scores, place * E + row)
    candidate = page_list.is_candidate(block * LANES + lane, n)
    key = jnp.where(candidate, page_list.ordered_key(score), page_list.LOWEST)
    keys_ref[block] = jnp.where((place >= 0) & (place < num), key, keys_ref[block])


def _take_from(x, at) -> jax.Array:
    """x[r, at[r, l]] of an x of more than 128 lanes; undefined where `at` is outside."""
    out = jnp.zeros(at.shape, x.dtype)
    for first in range(0, x.shape[1], LANES):
        piece = x[:, first : first + LANES]
        piece = jnp.pad(piece, ((0, 0), (0, LANES - piece.shape[1])))
        here = (at >= first) & (at < first + LANES)
        out = jnp.where(here, page_list.take(piece, at & (LANES - 1)), out)
    return out
