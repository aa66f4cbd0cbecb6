"""One step of sparse_decode: a block of pages joins the online softmax.

    s     = q k^T / sqrt(H),   m' = max(m, max s),   p = exp(s - m')
    denom = denom exp(m - m') + sum p,               acc = acc exp(m - m') + p v

A block is a number of pages of E lines of 128 lanes; the first half of a page's lines are keys, the
second half values. With heads of 64 a line holds two tokens (fold = 2) and queries are passed
twice; see sparse_decode.py, also for the numerics.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.reference import NEG
from kernels_pallas.tuning import LANES

SCALED_PAGES = LANES // 2
"""Pages in a line of scales, two scales each."""


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Sizes of one call, known at compile time."""

    num_tokens: int  # T
    group: int  # R
    head_dim: int  # H
    page: int  # C
    num_pages: int  # M
    num_heads: int  # K
    block: int  # pages per block
    ring: int  # buffers

    @property
    def fold(self) -> int:
        """Tokens in a line."""
        return LANES // self.head_dim

    @property
    def lines(self) -> int:
        """Lines of keys in a page."""
        return self.page // self.fold

    @property
    def block_tokens(self) -> int:
        return self.block * self.page


def attend(i, q, buf_ref, state, limits, scales, shape: DecodeShape) -> None:
    """Add block i of the row's tokens to the state (max, denominator, weighted values).

    q [fold X, W], buf_ref [block, E, W]. limits: (start, length) of the row, or None if every query
    reads all of the block. scales: None or two rows [1, lines of the block].
    """
    m_ref, denom_ref, acc_ref = state
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(
        lax.dot_general, preferred_element_type=jnp.float32, precision=exact
    )
    keys, values = (
        buf_ref[:, x * shape.lines : (x + 1) * shape.lines, :].reshape(-1, LANES).astype(q.dtype)
        for x in (0, 1)
    )
    if limits is not None:
        start, length = limits
        past_end = length - i * shape.block_tokens <= _token(keys.shape, shape)
        values = jnp.where(past_end, 0, values)  # a buffer may hold NaN there, and 0 x NaN is NaN
        if shape.fold > 1:  # a line may hold a token of the row and one past its end
            keys = jnp.where(past_end, 0, keys)
    s = product(q, keys, (((1,), (1,)), ((), ()))) * shape.head_dim**-0.5
    if scales is not None:
        s = s * scales[0]
    if limits is not None:
        mask = visible(i, s.shape, start, length, shape)
        s = jnp.where(mask, s, NEG)
    m = m_ref[...]
    m_new = jnp.maximum(m, s.max(-1, keepdims=True))
    p = jnp.exp(s - m_new)
    if limits is not None:
        p = jnp.where(mask, p, 0)
    shrink = jnp.exp(m - m_new)
    m_ref[...] = m_new
    denom_ref[...] = denom_ref[...] * shrink + p.sum(-1, keepdims=True)
    if scales is not None:
        p = p * scales[1] if limits is None else jnp.where(mask, p * scales[1], 0)
    more = product(p.astype(q.dtype), values, (((1,), (0,)), ((), ())))
    acc_ref[...] = acc_ref[...] * shrink + more


def _token(shape_lines, shape: DecodeShape) -> jax.Array:
    """Index in the block of the token that each number of the keys belongs to: [lines, W]."""
    token = lax.broadcasted_iota(jnp.int32, shape_lines, 0) * shape.fold
    if shape.fold > 1:
        lane = lax.broadcasted_iota(jnp.int32, shape_lines, 1)
        token += jnp.where(lane >= shape.head_dim, 1, 0)
    return token


def visible(i, scores_shape, start, length, shape: DecodeShape) -> jax.Array:
    """Mask of the scores [fold X, lines of the block]: whether the query reads the token."""
    rows = scores_shape[0]
    x = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    token = i * shape.block_tokens
    token += lax.broadcasted_iota(jnp.int32, scores_shape, 1) * shape.fold
    if shape.fold > 1:
        odd = x >= rows // 2
        token += jnp.where(odd, 1, 0)
        x = jnp.where(odd, x - rows // 2, x)
    query = jnp.zeros_like(x)
    for t in range(1, shape.num_tokens):
        query += jnp.where(x >= t * shape.group, 1, 0)
    return token < jnp.minimum(start + query + 1, length)


def block_scales(
    scales_ref, block_ref, ids_ref, first, count, shape: DecodeShape
) -> list[jax.Array]:
    """Scales of keys and of values for each line of the block, two rows [1, block lines].

    The two scales of page j lie side by side in a line of scales_ref. A rotation brings them to
    lanes 0 and 1 of line j of block_ref, from where they are repeated for the page's lines. Entries
    from `count` on get the scales of page 0.
    """
    for j in range(shape.block):
        page = jnp.where(j < count, ids_ref[jnp.where(j < count, first + j, 0)], 0)
        line = scales_ref[0, pl.ds(lax.div(page, SCALED_PAGES), 1), :]
        shift = lax.rem(LANES - 2 * lax.rem(page, SCALED_PAGES), LANES)
        block_ref[pl.ds(j, 1), :] = pltpu.roll(line, shift, 1)
    spread = (shape.block, shape.block * shape.lines)
    page = lax.broadcasted_iota(jnp.int32, spread, 0)
    ahead = lax.broadcasted_iota(jnp.int32, spread, 1) - page * shape.lines
    here = (ahead >= 0) & (ahead < shape.lines)
    both = block_ref[...]
    return [jnp.where(here, both[:, x : x + 1], 0).sum(0, keepdims=True) for x in (0, 1)]


def finish(state, out_ref, lse_ref, shape: DecodeShape) -> None:
    """Write output and log-sum-exp; with two tokens in a line, first join even and odd tokens."""
    m, denom, acc = (ref[...] for ref in state)
    if shape.fold > 1:
        X = m.shape[0] // 2
        top = jnp.maximum(m[:X], m[X:])
        even, odd = jnp.exp(m[:X] - top), jnp.exp(m[X:] - top)
        acc = even * acc[:X] + odd * pltpu.roll(acc[X:], shape.head_dim, 1)
        m, denom = top, even * denom[:X] + odd * denom[X:]
    nonempty = denom > 0
    denom = jnp.where(nonempty, denom, 1)
    out_ref[0, 0] = (acc / denom)[:, : shape.head_dim].astype(out_ref.dtype)
    lse_ref[0, 0] = jnp.where(nonempty, m + jnp.log(denom), -jnp.inf)
