"""Log-prob and entropy of tokens, and the acceptance rate, from hidden states and head, on TPU.

    s_vx    = (head_v . hidden_x) / temperature         blocks [v, x], never all of [V, X]
    logp_x  = s_(token x),x - lse_x,    lse_x = log sum_v exp s_vx
    ent_x   = lse_x - sum_v p_vx s_vx (entropy),         p_vx = exp(s_vx - lse_x)
    alpha_x = sum_v min(p_dense_vx, p_sparse_vx)
    ds_vx   = dlogp_x (1[v = token_x] - p_vx) - dent_x p_vx (log p_vx + ent_x)    (backward)

Grid (X / x, V / v), the vocabulary in sequence: a program owns x tokens, keeps their hidden states
on chip, and adds one block of v rows of the head to running statistics (max, sum e^z, sum z e^z
with z = s - max, and the logit of the token). The gradient of the head has the grid (V / v, X / x)
and keeps v rows of the head instead. Both gradients recompute the logits.

                 head rows 0..v   v..2v   2v..3v
    tokens 0..x       ------------------------->     forward, overlap, gradient of hidden states
    tokens x..2x      ------------------------->     gradient of the head: downwards instead

Logits are held as [v, x], so that sums over the vocabulary run over sublanes and a statistic of the
tokens is a row of lanes; values per token are [X / c, 1, c]. V and X need not be multiples of the
blocks.

On chip per program, in bytes, with a = 2 or 4 bytes of an input number: 2 a D (x + v) for blocks of
inputs; products of chunks of c x c (c = CHUNK), 4 c c for the logits and for each of about 4
temporaries; for the gradients 4 x D or 4 v D of sums and 2 a x D or 2 a v D of results.

Numerics: float32 logits and statistics. float32 inputs multiply at HIGHEST precision; for bfloat16
inputs ds is rounded to bfloat16 before it multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tuning import HeadTuning, tune_head

NEG = -1e30
CHUNK = 256
VMEM_BYTES = 48 * 2**20
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


def token_logprob(
    hidden_XD, head_VD, token_X, *, temperature=1.0, interpret=None, tuning=None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(log-prob of each token, entropy) in float32 and nats, as reference.token_logprob.

    Differentiable in hidden_XD and head_VD; the temperature is a constant. tuning: a HeadTuning.
    interpret: None = compile for a TPU. Raises ValueError for shapes or types that do not fit.
    """
    _check(head_VD, token_X, hidden_XD)
    blocks = tuning or _tuning(hidden_XD, head_VD)
    X = len(token_X)
    hidden_XD, token_X1c = _pad(blocks[0], token_X, hidden_XD)
    scale = _scale(temperature)
    logp, entropy = _logprob(hidden_XD, head_VD, token_X1c, scale, blocks, interpret)
    return logp.reshape(-1)[:X], entropy.reshape(-1)[:X]


def acceptance_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, token_X, *, temperature=1.0, interpret=None,
    tuning=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(alpha, log p_sparse of each token), as reference.acceptance_overlap; no gradient.

    Takes three passes over the vocabulary: one for each normaliser, then the sum of minima.
    """
    _check(head_VD, token_X, hidden_dense_XD, hidden_sparse_XD)
    arrays = map(lax.stop_gradient, (hidden_dense_XD, hidden_sparse_XD, head_VD))
    hidden_dense_XD, hidden_sparse_XD, head_VD = arrays
    blocks = tuning or _tuning(hidden_dense_XD, head_VD)
    X = len(token_X)
    dense, sparse, token_X1c = _pad(blocks[0], token_X, hidden_dense_XD, hidden_sparse_XD)
    scale = _scale(temperature)
    _, _, lse_dense = _forward(dense, head_VD, token_X1c, scale, blocks, interpret)
    logp, _, lse_sparse = _forward(sparse, head_VD, token_X1c, scale, blocks, interpret)
    alpha = _overlap(dense, sparse, head_VD, lse_dense, lse_sparse, scale, blocks, interpret)
    return alpha.reshape(-1)[:X], logp.reshape(-1)[:X]


def _check(head_VD, token_X, *hidden) -> None:
    for hidden_XD in hidden:
        if hidden_XD.shape != (*token_X.shape, head_VD.shape[1]):
            raise ValueError(
                f"{hidden_XD.shape=}: expected {(*token_X.shape, head_VD.shape[1])}, pass one row"
                f" of the head's width {head_VD.shape=} for each token"
            )
        if hidden_XD.dtype != head_VD.dtype:
            raise ValueError(
                f"{hidden_XD.dtype=}: expected the head's {head_VD.dtype}, cast one of them"
            )


def _tuning(hidden_XD, head_VD) -> HeadTuning:
    (X, D), V = hidden_XD.shape, head_VD.shape[0]
    return tune_head(hidden_XD.dtype, X, V, D, CHUNK)


def _pad(x, token_X, *hidden) -> tuple[jax.Array, ...]:
    """Hidden states padded to whole blocks of x, and their tokens as [X / c, 1, c]."""
    pad = -len(token_X) % x
    token_X1c = jnp.pad(token_X.astype(jnp.int32), (0, pad)).reshape(-1, 1, min(CHUNK, x))
    return *(jnp.pad(h, ((0, pad), (0, 0))) for h in hidden), token_X1c


def _scale(temperature) -> jax.Array:
    return (1 / lax.stop_gradient(jnp.asarray(temperature, jnp.float32))).reshape(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _logprob(hidden_XD, head_VD, token_X1c, scale, blocks, interpret) -> list[jax.Array]:
    return _forward(hidden_XD, head_VD, token_X1c, scale, blocks, interpret)[:2]


def _logprob_fwd(hidden_XD, head_VD, token_X1c, scale, blocks, interpret) -> tuple[Any, Any]:
    logp, *rest = _forward(hidden_XD, head_VD, token_X1c, scale, blocks, interpret)
    return (logp, rest[0]), (hidden_XD, head_VD, token_X1c, scale, *rest)


def _logprob_bwd(blocks, interpret, saved, gradients) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_XD, head_VD, token_X1c, scale, entropy, lse = saved
    rows = (token_X1c, lse, entropy, *gradients)
    args = scale, hidden_XD, head_VD, rows, blocks, interpret
    d_hidden, d_head = _gradient("hidden", *args), _gradient("head", *args)
    return d_hidden, d_head, None, None


_logprob.defvjp(_logprob_fwd, _logprob_bwd)


def _forward(hidden_XD, head_VD, token_X1c, scale, blocks, interpret) -> list[jax.Array]:
    """Log-prob, entropy and log-sum-exp, each [X / c, 1, c]."""
    scratch = [pltpu.VMEM((blocks[0] // token_X1c.shape[2], *token_X1c.shape[1:]), jnp.float32)] * 4
    out = [("row", jax.ShapeDtypeStruct(token_X1c.shape, jnp.float32))] * 3
    return _call(
        _forward_kernel, scale, (hidden_XD,), head_VD, (token_X1c,), out, scratch, blocks, interpret
    )


def _overlap(dense, sparse, head_VD, lse_dense, lse_sparse, scale, blocks, interpret) -> jax.Array:
    out = [("row", jax.ShapeDtypeStruct(lse_dense.shape, jnp.float32))]
    rows = (lse_dense, lse_sparse)
    return _call(
        _overlap_kernel, scale, (dense, sparse), head_VD, rows, out, [], blocks, interpret
    )[0]


def _gradient(kind, scale, hidden_XD, head_VD, rows, blocks, interpret) -> jax.Array:
    """The gradient of the hidden states or of the head, in their type."""
    of_head = kind == "head"
    kernel, like = (_head_kernel, head_VD) if of_head else (_hidden_kernel, hidden_XD)
    scratch = [pltpu.VMEM((blocks[of_head], like.shape[1]), jnp.float32)]
    out = [(kind, jax.ShapeDtypeStruct(like.shape, like.dtype))]
    return _call(
        kernel, scale, (hidden_XD,), head_VD, rows, out, scratch, blocks, interpret, of_head
    )[0]


def _call(
    kernel, scale, hidden, head_VD, rows, out, scratch, blocks, interpret, head_outside=False
) -> list[jax.Array]:
    """Run a kernel over the grid (X / x, V / v), or (V / v, X / x) if head_outside."""
    (X, D), (x, v), V, c = hidden[0].shape, blocks, head_VD.shape[0], rows[0].shape[2]
    grid = X // x, pl.cdiv(V, v)

    def spec(shape, index) -> pl.BlockSpec:
        def at(a, b, scale) -> tuple[Any, ...]:
            return index(b, a) if head_outside else index(a, b)

        return pl.BlockSpec(shape, at)

    specs = {
        "hidden": spec((x, D), lambda i, j: (i, 0)),
        "head": spec((v, D), lambda i, j: (j, 0)),
        "row": spec((x // c, 1, c), lambda i, j: (i, 0, 0)),
    }
    return pl.pallas_call(
        functools.partial(kernel, V=V),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid[::-1] if head_outside else grid,
            in_specs=[specs["hidden"]] * len(hidden) + [specs["head"]] + [specs["row"]] * len(rows),
            out_specs=[specs[kind] for kind, _ in out],
            scratch_shapes=scratch,
        ),
        out_shape=[shape for _, shape in out],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=False if interpret is None else interpret,
        name=kernel.__name__.strip("_"),
    )(scale, *hidden, head_VD, *rows)


def _forward_kernel(
    scale,  # SMEM [1]: 1 / temperature
    hidden,  # VMEM [x, D]
    head,  # VMEM [v, D]
    token,  # VMEM [x / c, 1, c]
    logp, entropy, lse,  # results, VMEM [x / c, 1, c]
    m, denom, moment, picked,  # state, VMEM [x / c, 1, c]: max, sum e^z, sum z e^z, s of the token
    *, V,
) -> None:  # fmt: skip
    j, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(j == 0)
    def _() -> None:
        m[...] = jnp.full_like(m, NEG)
        for ref in (denom, moment, picked):
            ref[...] = jnp.zeros_like(ref)

    def add(i, tokens, vocabs) -> None:
        s = _logits(head[vocabs], hidden[tokens], scale[0])
        vocab = _vocab(j * head.shape[0] + vocabs.start, s.shape)
        s = jnp.where(vocab < V, s, NEG)
        m_new = jnp.maximum(m[i], s.max(0, keepdims=True))
        z = s - m_new
        p = jnp.exp(z)
        old, shift = _rescale(m[i], m_new)
        moment[i] = old * (moment[i] + denom[i] * shift) + _sum(p * z)
        denom[i] = old * denom[i] + _sum(p)
        picked[i] += _sum(jnp.where(vocab == token[i], s, 0))
        m[i] = m_new

    _each_chunk(hidden, head, token, add)

    @pl.when(j == last)
    def _() -> None:
        log_denom = jnp.log(denom[...])
        lse[...] = m[...] + log_denom
        logp[...] = picked[...] - m[...] - log_denom
        entropy[...] = log_denom - moment[...] / denom[...]


def _overlap_kernel(
    scale,  # SMEM [1]
    dense, sparse,  # VMEM [x, D]
    head,  # VMEM [v, D]
    lse_dense, lse_sparse,  # VMEM [x / c, 1, c]
    alpha,  # result, VMEM [x / c, 1, c]: the running sum
    *, V,
) -> None:  # fmt: skip
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        alpha[...] = jnp.zeros_like(alpha)

    def add(i, tokens, vocabs) -> None:
        logp_dense = _logits(head[vocabs], dense[tokens], scale[0]) - lse_dense[i]
        logp_sparse = _logits(head[vocabs], sparse[tokens], scale[0]) - lse_sparse[i]
        p = jnp.exp(jnp.minimum(logp_dense, logp_sparse))  # min(p) = exp(min(log p))
        vocab = _vocab(j * head.shape[0] + vocabs.start, p.shape)
        alpha[i] += _sum(jnp.where(vocab < V, p, 0))

    _each_chunk(dense, head, alpha, add)


def _hidden_kernel(
    scale,  # SMEM [1]
    hidden,  # VMEM [x, D]
    head,  # VMEM [v, D]
    token, lse, entropy, d_logp, d_entropy,  # VMEM [x / c, 1, c]
    out,  # result, VMEM [x, D]
    total,  # VMEM [x, D] float32
    *, V,
) -> None:  # fmt: skip
    rows = token, lse, entropy, d_logp, d_entropy
    j, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(j == last)
    def _() -> None:
        _clear_tail(head, V)

    def add(i, tokens, vocabs) -> None:
        first = j * head.shape[0] + vocabs.start
        d_vx = _d_logits(head[vocabs], hidden[tokens], scale[0], rows, i, first, V)
        total[tokens] += _dot(d_vx.astype(head.dtype), head[vocabs], TN)  # rounded for the MXU

    _each_chunk(hidden, head, token, add)

    @pl.when(j == last)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _head_kernel(
    scale,  # SMEM [1]
    hidden,  # VMEM [x, D]
    head,  # VMEM [v, D]
    token, lse, entropy, d_logp, d_entropy,  # VMEM [x / c, 1, c]
    out,  # result, VMEM [v, D]
    total,  # VMEM [v, D] float32
    *, V,
) -> None:  # fmt: skip
    rows = token, lse, entropy, d_logp, d_entropy
    j, block, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(block == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def add(i, tokens, vocabs) -> None:
        first = j * head.shape[0] + vocabs.start
        d_vx = _d_logits(head[vocabs], hidden[tokens], scale[0], rows, i, first, V)
        total[vocabs] += _dot(d_vx.astype(hidden.dtype), hidden[tokens], NN)  # rounded for the MXU

    _each_chunk(hidden, head, token, add)

    @pl.when(block == last)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _each_chunk(hidden, head, row, add) -> None:
    """Call add(i, tokens, vocabs) for every chunk of c tokens and c rows of the head.

    The loop keeps the program small: one product of whole blocks would be unrolled into 16,000
    instruction bundles.
    """
    (num, _, c), v = row.shape, head.shape[0]
    c_vocab = min(c, v)

    def visit(t, _) -> int:
        i, k = lax.div(t, v // c_vocab), lax.rem(t, v // c_vocab)
        add(i, _slice(i, c), _slice(k, c_vocab))
        return 0

    lax.fori_loop(0, num * (v // c_vocab), visit, 0)


def _slice(i, size) -> Any:
    return pl.ds(pl.multiple_of(i * size, size), size)


def _dot(a, b, dims) -> jax.Array:
    """Product with float32 sums, at full precision for float32 inputs."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _logits(head_vD, hidden_xD, scale) -> jax.Array:
    return _dot(head_vD, hidden_xD, NT) * scale


def _vocab(first, shape) -> jax.Array:
    """Token ids first, first + 1, ... of the rows of a chunk [v, x]."""
    return first + lax.broadcasted_iota(jnp.int32, shape, 0)


def _rescale(m, m_new) -> tuple[jax.Array, jax.Array]:
    """For a new maximum: the factor of the old sums, and what to add to their z."""
    return jnp.exp(m - m_new), m - m_new


def _sum(values_vx) -> jax.Array:
    return values_vx.sum(0, keepdims=True)


def _d_logits(head_vD, hidden_xD, scale, rows, i, first, V) -> jax.Array:
    """The gradient of head . hidden, [v, x], for chunk i of tokens; 0 past the vocabulary."""
    token, lse, entropy, d_logp, d_entropy = (row[i] for row in rows)
    logp = _logits(head_vD, hidden_xD, scale) - lse
    vocab = _vocab(first, logp.shape)
    d = jnp.where(vocab == token, d_logp, 0)
    d -= jnp.exp(logp) * (d_logp + d_entropy * (logp + entropy))
    return jnp.where(vocab < V, d, 0) * scale


def _clear_tail(head, V) -> None:
    """Clear the rows past the vocabulary, which may hold NaN: 0 x NaN is NaN."""
    v = head.shape[0]
    if V % v:
        head[V % v :] = jnp.zeros((v - V % v, head.shape[1]), head.dtype)
