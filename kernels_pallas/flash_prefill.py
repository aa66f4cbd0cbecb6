"""Causal attention over whole sequences, dense or by pages (replay), with backward, for TPU.

    s = k q^T / sqrt(H),  p = exp(s - lse),  lse = log sum_keys exp(s),  out = p^T v
    delta = sum_h(out do),  ds = p (v do^T - delta),  dv = p do,  dk = ds q / sqrt(H),
    dq = ds^T k / sqrt(H)

Grid (U, pairs), pairs in sequence. U = B x K groups of R query heads with one KV head: q is
[U, R, T, H], k and v are [U, S, H]. A pair is a block of queries and a block of keys that some of
the queries see. One program adds the keys of its pair to the state of the queries (forward, dq), or
its queries to the gradients of the keys (dk, dv); the state stays on chip while its block does:

              keys 0   keys 1   keys 2         order of the pairs
    queries 0   0                              forward, dq: by rows, as numbered
    queries 1   1        2                     dk, dv: by columns, 0 1 3 2 4 5
    queries 2   3        4        5            above the diagonal: no pair, no time

The table of pairs is prefetched to SMEM: 8 bytes a pair, 33 KiB at 32K tokens if R = 4.
Only blocks that the diagonal crosses compare positions.

The R x queries rows of a block are one matrix (X), so that one product serves the whole group, and
dk and dv sum over it. Scores are held transposed, [keys, X]: sums over keys then run over sublanes,
and maximum, denominator, lse and delta are rows of lanes, not columns that fill one lane of a
register.

On chip per program, with n = 4 x keys x R x queries bytes of scores (2 MiB at 512 x 1,024): forward
about 3 n, backward about 5 n, and two buffers for each block of at most X x H numbers.

Replay: the pages that each query reads are packed into bits outside the kernel (page_words.py); a
program expands the words of its block to a bias of 0 or NEG.

Numerics: float32 softmax and accumulators. float32 inputs multiply at HIGHEST precision. For
bfloat16 inputs p and ds are rounded to bfloat16 before they multiply, as in the reference.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import reference
from kernels_pallas.page_words import page_words, word_span
from kernels_pallas.tuning import LANES, tune_prefill

NEG = reference.NEG
HIGHEST = lax.Precision.HIGHEST
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


class _Spec(NamedTuple):
    """Sizes known at compile time: heads in a group, tokens in blocks and pages (0 = dense)."""

    ratio: int
    queries: int
    keys: int
    page: int
    interpret: Any


def flash_prefill(
    q_BTNH, k_BTKH, v_BTKH, *, budget_T=None, sparse_BT=None, page=16,
    chunk=reference.QUERY_BLOCK, interpret=None, tuning=None,
) -> jax.Array:  # fmt: skip
    """Causal attention over whole sequences, dense or with the pages of sparse decode (replay).

    Returns out_BTNH = softmax(q k^T / sqrt(H)) v over the keys up to the query. With budget_T
    (int32 [T], the budget at each query position) only over the pages that decode would have read
    there. sparse_BT: bool [B, T], the queries for which this holds; all others read all pages.
    Differentiable in q, k and v; the choice of pages is a constant. chunk: queries that
    choose their pages together. tuning: a PrefillTuning.
    interpret: None = compile for a TPU. Raises ValueError for shapes or blocks that do not fit.
    """
    B, T, N, H = q_BTNH.shape
    kinds = budget_T, sparse_BT, page, chunk
    packed = _prepare(q_BTNH, k_BTKH, v_BTKH, *kinds, interpret, tuning)
    return _attend(*packed).reshape(B, N, -1, H).swapaxes(1, 2)[:, :T]


def _prepare(
    q_BTNH, k_BTKH, v_BTKH, budget_T, sparse_BT, page, chunk, interpret, tuning
) -> tuple[Any, ...]:
    """The arguments of _attend: q [U, R, T, H], k and v [U, S, H], words or None, and the spec."""
    T, N = q_BTNH.shape[1:3]
    K = k_BTKH.shape[2]
    tuning = tuning or tune_prefill(T, N // K)
    spec = _Spec(N // K, *tuning, 0 if budget_T is None else page, interpret)
    _check(q_BTNH, k_BTKH, v_BTKH, spec)
    words = None
    if budget_T is not None:
        if sparse_BT is None or sparse_BT.shape != q_BTNH.shape[:2] or page < 1:
            raise ValueError(
                f"{sparse_BT=} {page=}: expected the queries that choose pages, bool [B, T], "
                "and tokens in a page beside budget_T; pass both"
            )
        q, k = lax.stop_gradient((q_BTNH, k_BTKH))
        words = page_words(
            q, k, jnp.asarray(budget_T), jnp.asarray(sparse_BT, bool), page, chunk,
            queries=spec.queries, keys=spec.keys,
        )  # fmt: skip
    k_USH, v_USH = (_pack(x, K, spec.keys)[:, 0] for x in (k_BTKH, v_BTKH))
    return _pack(q_BTNH, K, spec.queries), k_USH, v_USH, words, spec


def _check(q_BTNH, k_BTKH, v_BTKH, spec) -> None:
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    if k_BTKH.shape != (B, T, K, H) or v_BTKH.shape != k_BTKH.shape or N % K:
        raise ValueError(
            f"{q_BTNH.shape=} {k_BTKH.shape=} {v_BTKH.shape=}: expected [B, T, N, H] and twice "
            "[B, T, K, H] with N a multiple of K; reshape"
        )
    if spec.page and (spec.keys % spec.page or spec.keys % word_span(spec.keys, spec.page)):
        raise ValueError(
            f"{spec.keys=} {spec.page=}: expected a block of keys of whole pages, and of whole "
            "words of 32 pages if it has more than one; change tuning"
        )
    if spec.interpret is None and (spec.queries % LANES or spec.keys % LANES or spec.page % 8):
        raise ValueError(
            f"{spec.queries=} {spec.keys=} {spec.page=}: expected blocks of multiples of {LANES} "
            "tokens and a page of a multiple of 8; change tuning or page"
        )


def _pack(x_BTNH, num_groups, block) -> jax.Array:
    """[B, T, N, H] -> [U, N / K, T, H], padded to whole blocks."""
    B, T, _, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    return x.swapaxes(1, 2).reshape(B * num_groups, -1, x.shape[1], H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_URTH, k_USH, v_USH, words, spec) -> jax.Array:
    return _forward(q_URTH, k_USH, v_USH, words, spec)[0]


def _attend_fwd(q_URTH, k_USH, v_USH, words, spec) -> tuple[jax.Array, tuple[Any, ...]]:
    out_URTH, lse_U1X = _forward(q_URTH, k_USH, v_USH, words, spec)
    return out_URTH, (q_URTH, k_USH, v_USH, words, out_URTH, lse_U1X)


def _attend_bwd(spec, saved, do_URTH) -> tuple[Any, ...]:
    q_URTH, k_USH, v_USH, words, out_URTH, lse_U1X = saved
    delta_URT = (out_URTH.astype(jnp.float32) * do_URTH.astype(jnp.float32)).sum(-1)
    delta = delta_URT.reshape(*delta_URT.shape[:2], -1, spec.queries).swapaxes(1, 2)
    arrays = [q_URTH, k_USH, v_USH, do_URTH, lse_U1X, delta.reshape(lse_U1X.shape)]
    return _query_gradient(arrays, words, spec), *_key_gradients(arrays, words, spec), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(q_URTH, k_USH, v_USH, words, spec) -> list[jax.Array]:
    """Output [U, R, T, H] and lse [U, 1, R x T], ordered by (block, head, query in the block)."""
    U, R, T, H = q_URTH.shape
    rows = R * spec.queries
    lse_U1X = jax.ShapeDtypeStruct((U, 1, R * T), jnp.float32)
    state, out = [(1, rows), (1, rows), (H, rows)], [(q_URTH, "query"), (lse_U1X, "lane")]
    return _call(_forward_kernel, spec, state, [q_URTH, k_USH, v_USH], words, out)


def _query_gradient(arrays, words, spec) -> jax.Array:
    """dq from q, k, v, do [U, R, T, H], and lse and delta [U, 1, R x T]."""
    state, out = [(arrays[0].shape[3], spec.ratio * spec.queries)], [(arrays[0], "query")]
    return _call(_query_gradient_kernel, spec, state, arrays, words, out)[0]


def _key_gradients(arrays, words, spec) -> list[jax.Array]:
    """dk and dv from the same arrays."""
    state, out = [(spec.keys, arrays[0].shape[3])] * 2, [(x, "key") for x in arrays[1:3]]
    return _call(_key_gradients_kernel, spec, state, arrays, words, out)


INPUTS = ["query", "key", "key", "query", "lane", "lane"]


def _call(kernel, spec, state, arrays, words, out) -> list[jax.Array]:
    """One pallas_call over the pairs of blocks, in the order of the first result's blocks."""
    U, R, T, H = arrays[0].shape
    num_queries, num_keys = T // spec.queries, arrays[1].shape[1] // spec.keys
    pairs = _pairs(num_queries, num_keys, spec, out[0][1])
    query, key = (None, R, spec.queries, H), (None, spec.keys, H)
    blocks = {
        "query": pl.BlockSpec(query, lambda g, n, pairs: (g, 0, pairs[0, n], 0)),
        "key": pl.BlockSpec(key, lambda g, n, pairs: (g, pairs[1, n], 0)),
        "lane": pl.BlockSpec((None, 1, R * spec.queries), lambda g, n, pairs: (g, 0, pairs[0, n])),
    }
    in_specs = [blocks[kind] for kind in INPUTS[: len(arrays)]]
    if words is not None:
        arrays, block = [*arrays, words], (None, None, words.shape[2], spec.queries)
        index = lambda g, n, pairs: (g, pairs[1, n], 0, pairs[0, n])  # noqa: E731
        in_specs.append(pl.BlockSpec(block, index))
    return pl.pallas_call(
        functools.partial(kernel, spec=spec, last=(num_queries - 1, num_keys - 1)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(U, pairs.shape[1]),
            in_specs=in_specs,
            out_specs=[blocks[kind] for _, kind in out],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in state],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=False if spec.interpret is None else spec.interpret,
        name=kernel.__name__.strip("_"),
    )(pairs, *arrays)


def _pairs(num_queries, num_keys, spec, major) -> np.ndarray:
    """Pairs (block of queries, block of keys) with a visible key, `major` outside: [2, pairs]."""
    i, j = np.meshgrid(np.arange(num_queries), np.arange(num_keys), indexing="ij")
    if major == "key":
        i, j = i.T, j.T
    visible = j * spec.keys < (i + 1) * spec.queries
    return np.stack([i[visible], j[visible]]).astype(np.int32)


def _dot(a, b, contract) -> jax.Array:
    exact = HIGHEST if a.dtype == jnp.float32 else None
    dims = contract, ((), ())
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _block(pairs) -> tuple[jax.Array, jax.Array]:
    """The block of queries and the block of keys of this program."""
    return pairs[0, pl.program_id(1)], pairs[1, pl.program_id(1)]


def _rows(x_RTH) -> jax.Array:
    """The heads of a group one after another: [R x queries, H]."""
    return x_RTH[...].reshape(-1, x_RTH.shape[2])


def _positions(i, j, spec) -> tuple[jax.Array, jax.Array]:
    """Positions of the keys and of the queries of a block, both int32 [keys, queries]."""
    shape = spec.keys, spec.queries
    key = j * spec.keys + lax.broadcasted_iota(jnp.int32, shape, 0)
    return key, i * spec.queries + lax.broadcasted_iota(jnp.int32, shape, 1)


def _bias(words, i, j, spec, diagonal) -> jax.Array | None:
    """0 where a query reads a key, else NEG: [keys, queries], or None if all keys are read."""
    bias = None
    if words is not None:
        num, queries = words.shape  # [words, queries]
        bits = word_span(spec.keys, spec.page) // spec.page
        word = jnp.broadcast_to(words[...][:, None], (num, bits, queries))
        bit = lax.shift_right_logical(word, lax.broadcasted_iota(jnp.int32, word.shape, 1)) & 1
        bias = jnp.where(bit == 1, 0.0, NEG).reshape(num * bits, 1, queries)
        bias = jnp.broadcast_to(bias, (num * bits, spec.page, queries)).reshape(-1, queries)
    if diagonal:
        key, query = _positions(i, j, spec)
        bias = jnp.where(key <= query, 0.0 if bias is None else bias, NEG)
    return bias


def _scores(q_RTH, k_SH, words, i, j, spec, diagonal) -> jax.Array:
    """s [keys, R x queries], NEG where a query does not read a key."""
    s = _dot(k_SH[...], _rows(q_RTH), NT) * k_SH.shape[1] ** -0.5
    if (bias := _bias(words, i, j, spec, diagonal)) is None:
        return s
    heads = [s[:, r * spec.queries : (r + 1) * spec.queries] + bias for r in range(spec.ratio)]
    return jnp.concatenate(heads, 1)


def _on_block(i, j, spec, add) -> None:
    """Call add(diagonal); diagonal = False if every query of the block sees every key of it."""
    whole = (j + 1) * spec.keys <= i * spec.queries + 1
    pl.when(whole)(lambda: add(False))
    pl.when(jnp.logical_not(whole))(lambda: add(True))


def _forward_kernel(pairs, q_RTH, k_SH, v_SH, *refs, spec, last) -> None:
    """pairs: [2, n] in SMEM. q: [R, queries, H]. k, v: [keys, H]. Replay: words [words, queries].

    Results: out as q, lse [1, X]. State: maximum and denominator [1, X], acc [H, X].
    """
    *words, out_RTH, lse_1X, max_1X, sum_1X, acc_HX = refs
    i, j = _block(pairs)

    @pl.when(j == 0)
    def _() -> None:
        max_1X[...] = jnp.full_like(max_1X, NEG)
        sum_1X[...] = jnp.zeros_like(sum_1X)
        acc_HX[...] = jnp.zeros_like(acc_HX)

    def add(diagonal) -> None:
        # Every query reads key 0, so the maximum is a real score after the first block.
        s = _scores(q_RTH, k_SH, words[0] if words else None, i, j, spec, diagonal)
        top = jnp.maximum(max_1X[...], s.max(0, keepdims=True))
        p = jnp.exp(s - top)
        keep = jnp.exp(max_1X[...] - top)
        max_1X[...] = top
        sum_1X[...] = sum_1X[...] * keep + p.sum(0, keepdims=True)
        acc_HX[...] = acc_HX[...] * keep + _dot(v_SH[...], p.astype(v_SH.dtype), TN)

    _on_block(i, j, spec, add)

    @pl.when(j == _last_key_block(i, spec, last))
    def _() -> None:
        out_XH = (acc_HX[...] / sum_1X[...]).T
        out_RTH[...] = out_XH.reshape(out_RTH.shape).astype(out_RTH.dtype)
        lse_1X[...] = max_1X[...] + jnp.log(sum_1X[...])


def _last_key_block(i, spec, last) -> jax.Array:
    return jnp.minimum(lax.div((i + 1) * spec.queries - 1, spec.keys), last[1])


def _weights(s, lse_1X) -> jax.Array:
    """p from the saved log-sum-exp of the forward pass."""
    return jnp.exp(s - lse_1X[...])


def _query_gradient_kernel(
    pairs, q_RTH, k_SH, v_SH, do_RTH, lse_1X, delta_1X, *refs, spec, last
) -> None:
    """Inputs as forward; do as q; lse and delta [1, X]. Result: dq as q. State: acc [H, X]."""
    *words, dq_RTH, acc_HX = refs
    i, j = _block(pairs)

    @pl.when(j == 0)
    def _() -> None:
        acc_HX[...] = jnp.zeros_like(acc_HX)

    def add(diagonal) -> None:
        s = _scores(q_RTH, k_SH, words[0] if words else None, i, j, spec, diagonal)
        ds = _weights(s, lse_1X) * (_dot(v_SH[...], _rows(do_RTH), NT) - delta_1X[...])
        acc_HX[...] += _dot(k_SH[...], ds.astype(k_SH.dtype), TN)

    _on_block(i, j, spec, add)

    @pl.when(j == _last_key_block(i, spec, last))
    def _() -> None:
        dq_XH = (acc_HX[...] * k_SH.shape[1] ** -0.5).T
        dq_RTH[...] = dq_XH.reshape(dq_RTH.shape).astype(dq_RTH.dtype)


def _key_gradients_kernel(
    pairs, q_RTH, k_SH, v_SH, do_RTH, lse_1X, delta_1X, *refs, spec, last
) -> None:
    """Inputs as for dq; keys stay on chip, queries change. Results and state: dk, dv [keys, H]."""
    *words, dk_SH, dv_SH, dk_acc, dv_acc = refs
    i, j = _block(pairs)

    @pl.when(i == lax.div(j * spec.keys, spec.queries))
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def add(diagonal) -> None:
        s = _scores(q_RTH, k_SH, words[0] if words else None, i, j, spec, diagonal)
        p = _weights(s, lse_1X)
        dv_acc[...] += _dot(p.astype(do_RTH.dtype), _rows(do_RTH), NN)
        ds = p * (_dot(v_SH[...], _rows(do_RTH), NT) - delta_1X[...])
        dk_acc[...] += _dot(ds.astype(q_RTH.dtype), _rows(q_RTH), NN)

    _on_block(i, j, spec, add)

    @pl.when(i == last[0])
    def _() -> None:
        dk_SH[...] = (dk_acc[...] * k_SH.shape[1] ** -0.5).astype(dk_SH.dtype)
        dv_SH[...] = dv_acc[...].astype(dv_SH.dtype)
