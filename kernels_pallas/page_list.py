"""An exact top-k without a sort: steps 2 and 3 of select_pages, from scores to the list of pages.

    threshold = max {t: at least k keys are >= t}
    chosen    = pages with a key > threshold; then, of those with a key = threshold, the lowest
                pages until k are chosen
    list[j]   = the chosen page with j chosen pages before it

Keys are scores as order-preserving int32, [blocks of 128 pages, rows of heads, 128 lanes]; a page
that is not a candidate has the key LOWEST.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.tuning import LANES

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def page_of_lane(g, group, rows) -> jax.Array:
    """The logical page of every lane of group g, int32 [group, rows, 128]."""
    shape = (group, rows, LANES)
    block = g * group + lax.broadcasted_iota(jnp.int32, shape, 0)
    return block * LANES + lax.broadcasted_iota(jnp.int32, shape, 2)


def is_candidate(page, n) -> jax.Array:
    """Whether a page of a row of n pages competes: not page 0 or the last two, always read."""
    return (page >= 1) & (page < n - 2)


def ordered_key(score) -> jax.Array:
    """int32 in the order of the float32 scores; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return bits ^ (lax.shift_right_arithmetic(bits, 31) & HIGHEST)


def _count(keys_ref, thresholds, num_groups, group) -> list[jax.Array]:
    """For each threshold, the number of keys per head that reach it: float32 [rows, 1]."""

    def add(g, totals) -> tuple[jax.Array, ...]:
        keys = keys_ref[pl.ds(g * group, group)]
        reached = [jnp.where(keys >= t, 1.0, 0.0).sum(0) for t in thresholds]
        return tuple(total + r for total, r in zip(totals, reached, strict=True))

    zero = jnp.zeros(keys_ref.shape[1:], jnp.float32)
    totals = lax.fori_loop(0, num_groups, add, (zero,) * len(thresholds))
    return [t.sum(1, keepdims=True) for t in totals]


def find_threshold(keys_ref, k, num_groups, undecided, tuning) -> tuple[jax.Array, jax.Array]:
    """The k-th largest key of each head, and the number of larger keys: both int32 [rows, 1].

    The threshold is found from its highest bits down. It is HIGHEST if k = 0, so that no key is
    above it, and LOWEST if all candidates are chosen, so that all of them are.
    """
    rows, digit = keys_ref.shape[1], tuning.digit
    wanted = k.astype(jnp.float32)

    def add_digit(i, threshold) -> jax.Array:
        shift = 32 - digit * (i + 1)
        tries = [threshold + lax.shift_left(jnp.int32(m), shift) for m in range(1, 2**digit)]
        counts = _count(keys_ref, tries, num_groups, tuning.group)
        reached = sum(jnp.where(c >= wanted, 1, 0) for c in counts)
        return threshold + lax.shift_left(reached, shift)

    start = jnp.full((rows, 1), jnp.where(k == 0, HIGHEST, LOWEST), jnp.int32)
    threshold = lax.fori_loop(0, jnp.where(undecided, 32 // digit, 0), add_digit, start)
    # threshold + 1 overflows only if k = 0; the count is not used then.
    (above,) = _count(keys_ref, [threshold + 1], num_groups, tuning.group)
    return threshold, jnp.where(k == 0, 0, above.astype(jnp.int32))


def write_list(list_ref, keys_ref, ids_ref, threshold, room, n, num_groups, group) -> None:
    """Write the chosen pages of each head, and page 0 and the last two, which are always read.

    room: the number of pages to choose among those with a key equal to the threshold.
    """
    K, width = list_ref.shape[1:]
    rows = keys_ref.shape[1]
    before = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    upper = (before <= lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)).astype(jnp.bfloat16)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def some(g, carry) -> tuple[jax.Array, jax.Array]:
        equals, listed = carry
        keys = keys_ref[pl.ds(g * group, group)]
        page = page_of_lane(g, group, rows)
        equal = keys == threshold
        rank, equals = _ranks(equal, upper, equals)
        chosen = (keys > threshold) | (equal & (rank <= room))
        chosen |= ((page == 0) | (page >= n - 2)) & (page < n)
        rank, total = _ranks(chosen, upper, listed)
        found = []
        for i in range(group):
            base = listed if i == 0 else rank[i - 1, :, LANES - 1 :]
            end = rank[i, :, LANES - 1 :]
            # Entries base .. base + 127 of the list, each in the lane in which it is stored.
            entry = base + ((lane - base) & (LANES - 1))
            at = _search(rank[i], entry)
            ids = jnp.broadcast_to(ids_ref[0, pl.ds(g * group + i, 1)], (rows, LANES))
            found.append((jnp.where(entry < end, entry, -1), take(ids, at)))
        for first in range(0, width, LANES):
            old = list_ref[0, :, first : first + LANES]
            for entry, ids in found:
                here = (entry >= first) & (entry < first + LANES)
                old = jnp.where(here[:K], ids[:K], old)
            list_ref[0, :, first : first + LANES] = old
        return equals, total

    zero = jnp.zeros((rows, 1), jnp.int32)
    lax.fori_loop(0, num_groups, some, (zero, zero))


def _ranks(chosen, upper, before) -> tuple[jax.Array, jax.Array]:
    """The number of chosen pages up to each lane, plus `before`; and the total.

    A matrix product of zeros and ones, which is exact in bfloat16 with float32 sums.
    """
    group, rows, _ = chosen.shape
    ones = jnp.where(chosen, 1.0, 0.0).reshape(group * rows, LANES).astype(jnp.bfloat16)
    rank = jnp.dot(ones, upper, preferred_element_type=jnp.float32)
    rank = rank.reshape(chosen.shape).astype(jnp.int32)
    out = []
    for i in range(group):
        out.append(rank[i] + before)
        before = before + rank[i, :, LANES - 1 :]
    return jnp.stack(out), before


def _search(rank, entry) -> jax.Array:
    """The lane of list entry `entry`, which is the number of lanes with a rank <= entry."""
    at = jnp.zeros(entry.shape, jnp.int32)
    step = LANES // 2
    while step:
        at = jnp.where(take(rank, at + (step - 1)) <= entry, at + step, at)
        step //= 2
    return at


def take(x, lanes) -> jax.Array:
    """x[r, lanes[r, l]]: a gather along the lanes of each row."""
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")
