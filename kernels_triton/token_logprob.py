"""Log-prob and entropy of tokens, and the acceptance rate, from hidden states and head, on GPU.

    s_xv    = (hidden_x . head_v) / temperature         blocks [x, v], never all of [X, V]
    logp_x  = s_x,(token x) - lse_x,    lse_x = log sum_v exp s_xv
    ent_x   = lse_x - sum_v p_xv s_xv (entropy),         p_xv = exp(s_xv - lse_x)
    alpha_x = sum_v min(p_dense_xv, p_sparse_xv)
    ds_xv   = dlogp_x (1[v = token_x] - p_xv) - dent_x p_xv (log p_xv + ent_x)    (backward)

Grid (X / x, parts of the vocabulary): one program owns x tokens and one part of the vocabulary. It
loops over blocks of v rows of the head, and within a block over d columns at a time. It keeps the
running maximum, sum of e^z, sum of z e^z (z = s - max) and the logit of the token, which a second
kernel joins over the parts:

                  part 0 of the head    part 1
    tokens 0..x   | v | v | v |         | v | v | v |    --> 4 numbers per token and part
    tokens x..2x  | v | v | v |         | v | v | v |    --> joined to logp, entropy, lse

The programs of one part are consecutive, so that they read the same rows of the head from L2 at
about the same time. Parts occupy the card if there are few tokens. The overlap needs both
normalisers first, and therefore a second pass.

Backward, in chunks of the vocabulary: Triton recomputes the logits and writes ds [X, chunk] in the
type of the head, at most CHUNK_BYTES. torch.matmul then computes dhead[chunk] = ds^T hidden and
adds ds head[chunk] to the float32 sum dhidden. A single kernel would not fit on chip: sums [x, D]
of 64 tokens take 0.5 MiB at D = 2,048, and an SM has 256 KiB of registers; a program for a slice of
D would have to recompute the logits for each slice.

On chip per program: num_stages (x + v) d a bytes of shared memory for inputs of a bytes a number;
x v float32 logits in registers, twice that in the overlap.

Numerics: float32 logits and statistics, in powers of 2 (log2 e is part of the scale). float32
inputs multiply at full precision. ds is rounded to the inputs' type before it multiplies, and the
product of each chunk for dhidden is rounded once. float16 gradients below 6e-8 become 0; scale the
loss to avoid it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels_triton.tuning import HeadTuning, tune_head

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEG: tl.constexpr = tl.constexpr(-1e30)
CHUNK_BYTES = 2**26


def token_logprob(
    hidden_XD, head_VD, token_X, *, temperature=1.0, tuning=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each token, entropy) in float32 and nats, as reference.token_logprob.

    Differentiable in hidden_XD and head_VD; the temperature, a number or a tensor of one number, is
    a constant. tuning: a HeadTuning. Raises ValueError for shapes or types that do not fit.
    """
    _check(head_VD, token_X, hidden_XD)
    tuning = tuning or _tuning(hidden_XD, head_VD)
    hidden_XD, head_VD = _rows(hidden_XD), _rows(head_VD)
    return _TokenLogprob.apply(
        hidden_XD, head_VD, token_X.contiguous(), _scale(temperature, head_VD), tuning
    )


@torch.no_grad()
def acceptance_overlap(
    hidden_dense_XD, hidden_sparse_XD, head_VD, token_X, *, temperature=1.0, tuning=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(alpha, log p_sparse of each token), as reference.acceptance_overlap; no gradient.

    A first pass over dense and sparse hidden states together gives both normalisers.
    """
    _check(head_VD, token_X, hidden_dense_XD, hidden_sparse_XD)
    X = len(token_X)
    both_XD = torch.cat((hidden_dense_XD, hidden_sparse_XD))
    tuning = tuning or _tuning(both_XD, head_VD)
    head_VD, scale = _rows(head_VD), _scale(temperature, head_VD)
    logp, _, lse = _forward(both_XD, head_VD, token_X.repeat(2), scale, tuning)
    return _overlap(both_XD, head_VD, lse, scale, tuning), logp[X:]


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The programs that gpu_compile compiles, for any heads. dtype: bf16, fp16 or fp32."""
    from kernels_triton.gpu_compile import Program

    tuning = tune_head(4 if dtype == "fp32" else 2, 8192, 151_936)
    common = {"hidden": f"*{dtype}", "head": f"*{dtype}", "token": "*i32", "scale": "*fp32"}
    sizes = dict.fromkeys(("X", "V", "D", "s_hidden", "s_head"), "i32")
    blocks = {"x": tuning.tokens, "v": tuning.vocabulary, "d": tuning.columns, "EVEN": True}
    launch = tuning.num_warps, tuning.num_stages
    rows = dict.fromkeys(("lse", "entropy", "d_logp", "d_entropy"), "*fp32")
    forward = {**common, "parts": "*fp32", **sizes, "per_part": "i32"}
    yield Program("token_logprob", _forward_kernel, forward, blocks, *launch)
    sizes = {"num_parts": "i32", "X": "i32"}
    combine = {"parts": "*fp32", "out": "*fp32", **sizes}
    yield Program("token_logprob_combine", _combine_kernel, combine, {"p": 16, "x": 64}, 4, 1)
    del common["token"]
    sizes = dict.fromkeys(("X", "V", "D", "s_hidden", "s_head"), "i32")
    overlap = {**common, "lse": "*fp32", "parts": "*fp32", **sizes, "per_part": "i32"}
    yield Program("acceptance_overlap", _overlap_kernel, overlap, blocks, *launch)
    gradient = {**common, "token": "*i32", **rows, "out": f"*{dtype}", **sizes}
    gradient |= {"first": "i32", "last": "i32"}
    yield Program("token_logprob_gradient", _gradient_kernel, gradient, blocks, *launch)


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
    """The block sizes for these shapes on the device of the tensors."""
    shape = hidden_XD.element_size(), len(hidden_XD), len(head_VD)
    if not hidden_XD.is_cuda:
        return tune_head(*shape)
    device = torch.cuda.get_device_properties(hidden_XD.device)
    return tune_head(*shape, device.multi_processor_count)


def _rows(x_XD) -> torch.Tensor:
    """x, or a copy in which the numbers of a row are contiguous, as the kernels need."""
    return x_XD if x_XD.stride(1) == 1 else x_XD.contiguous()


def _scale(temperature, like) -> torch.Tensor:
    """1 / temperature as float32 [1] on the device; needs no host sync and no recompilation."""
    if isinstance(temperature, torch.Tensor):
        return temperature.detach().to(like.device, torch.float32).reshape(1).reciprocal()
    return torch.full((1,), 1 / temperature, device=like.device)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_XD, head_VD, token_X, scale, tuning
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy, lse = _forward(hidden_XD, head_VD, token_X, scale, tuning)
        ctx.save_for_backward(hidden_XD, head_VD, token_X, scale, lse, entropy)
        ctx.tuning = tuning
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp, d_entropy) -> tuple[Any, ...]:
        hidden_XD, head_VD, token_X, scale, lse, entropy = ctx.saved_tensors
        rows = token_X, lse, entropy, d_logp.contiguous(), d_entropy.contiguous()
        needed = ctx.needs_input_grad[:2]
        grads = _gradients(hidden_XD, head_VD, scale, rows, ctx.tuning, *needed)
        return *grads, None, None, None


def _forward(hidden_XD, head_VD, token_X, scale, tuning) -> tuple[torch.Tensor, ...]:
    """Log-prob, entropy and log-sum-exp, float32 [X] each."""
    (X, D), V = hidden_XD.shape, len(head_VD)
    per_part, num_parts = _parts(V, tuning)
    parts = torch.empty((4, num_parts, X), device=head_VD.device)
    out = torch.empty((3, X), device=head_VD.device)
    _forward_kernel[triton.cdiv(X, tuning.tokens), num_parts](
        hidden_XD, head_VD, token_X, scale, parts, X, V, D, hidden_XD.stride(0), head_VD.stride(0),
        per_part, **_blocks(tuning, D),
    )  # fmt: skip
    p = max(2, triton.next_power_of_2(num_parts))
    x = max(1, min(64, 4096 // p))
    _combine_kernel[(triton.cdiv(X, x),)](parts, out, num_parts, X, p=p, x=x, num_warps=4)
    return out.unbind()


def _overlap(both_XD, head_VD, lse_2X, scale, tuning) -> torch.Tensor:
    """alpha [X] from hidden states [2 X, D], dense and then sparse."""
    X, D, V = len(both_XD) // 2, both_XD.shape[1], len(head_VD)
    per_part, num_parts = _parts(V, tuning)
    parts = torch.empty((num_parts, X), device=head_VD.device)
    _overlap_kernel[triton.cdiv(X, tuning.tokens), num_parts](
        both_XD, head_VD, scale, lse_2X, parts, X, V, D, both_XD.stride(0), head_VD.stride(0),
        per_part, **_blocks(tuning, D),
    )  # fmt: skip
    return parts.sum(0)


def _gradients(
    hidden_XD, head_VD, scale, rows, tuning, of_hidden, of_head
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of hidden states and head in their types, None where not needed."""
    (X, D), V = hidden_XD.shape, len(head_VD)
    chunk = CHUNK_BYTES // (X * hidden_XD.element_size()) // tuning.vocabulary
    chunk = max(1, chunk) * tuning.vocabulary
    d_hidden = hidden_XD.new_zeros((X, D), dtype=torch.float32) if of_hidden else None
    d_head = torch.empty((V, D), dtype=head_VD.dtype, device=head_VD.device) if of_head else None
    for first in range(0, V, chunk):
        last = min(first + chunk, V)
        d_Xc = hidden_XD.new_empty((X, last - first))
        grid = triton.cdiv(X, tuning.tokens), triton.cdiv(last - first, tuning.vocabulary)
        _gradient_kernel[grid](
            hidden_XD, head_VD, scale, *rows, d_Xc, X, V, D, hidden_XD.stride(0), head_VD.stride(0),
            first, last, **_blocks(tuning, D),
        )  # fmt: skip
        if d_hidden is not None:
            d_hidden += d_Xc @ head_VD[first:last]
        if d_head is not None:
            torch.mm(d_Xc.mT, hidden_XD, out=d_head[first:last])
    return None if d_hidden is None else d_hidden.to(hidden_XD.dtype), d_head


def _parts(V, tuning) -> tuple[int, int]:
    """(blocks of the vocabulary per part, number of parts); no part is empty."""
    num_blocks = triton.cdiv(V, tuning.vocabulary)
    per_part = triton.cdiv(num_blocks, min(tuning.parts, num_blocks))
    return per_part, triton.cdiv(num_blocks, per_part)


def _blocks(tuning, D) -> dict[str, int]:
    x, v, d, _, num_warps, num_stages = tuning
    return dict(x=x, v=v, d=d, EVEN=D % d == 0, num_warps=num_warps, num_stages=num_stages)


@triton.jit
def _forward_kernel(
    hidden,  # [X, D]
    head,  # [V, D]
    token,  # [X]
    scale,  # [1]: 1 / temperature
    parts,  # [4, parts, X]: maximum and logit of the token, times log2 e; sum e^z; sum z e^z
    X, V, D, s_hidden, s_head, per_part,
    x: tl.constexpr, v: tl.constexpr, d: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    part, row_x = tl.program_id(1), tl.program_id(0) * x + tl.arange(0, x)
    token_x = tl.load(token + row_x, mask=row_x < X, other=-1)
    scale2 = tl.load(scale) * LOG2E
    m_x = tl.full([x], NEG, tl.float32)
    denom_x = tl.zeros([x], tl.float32)
    moment_x = tl.zeros([x], tl.float32)
    picked_x = tl.zeros([x], tl.float32)
    for j in range(part * per_part, tl.minimum((part + 1) * per_part, tl.cdiv(V, v))):
        vocab_v = _vocab(j * v, v)
        s = _logits(hidden, head, row_x, vocab_v, X, V, D, s_hidden, s_head, x, v, d, EVEN) * scale2
        s = tl.where(vocab_v[None, :] < V, s, NEG)
        m_new = tl.maximum(m_x, tl.max(s, 1))
        z = s - m_new[:, None]
        p = tl.exp2(z)
        keep, shift = _rescale(m_x, m_new)
        moment_x = keep * (moment_x + denom_x * shift) + tl.sum(p * z, 1)
        denom_x = keep * denom_x + tl.sum(p, 1)
        picked_x += tl.sum(tl.where(vocab_v[None, :] == token_x[:, None], s, 0.0), 1)
        m_x = m_new
    stride = tl.num_programs(1).to(tl.int64) * X
    parts += part.to(tl.int64) * X + row_x
    tl.store(parts, m_x, mask=row_x < X)
    tl.store(parts + stride, picked_x, mask=row_x < X)
    tl.store(parts + 2 * stride, denom_x, mask=row_x < X)
    tl.store(parts + 3 * stride, moment_x, mask=row_x < X)


@triton.jit
def _combine_kernel(
    parts,  # [4, parts, X], as in _forward_kernel
    out,  # [3, X]: log-prob, entropy, log-sum-exp
    num_parts, X, p: tl.constexpr, x: tl.constexpr,
) -> None:  # fmt: skip
    row_x, part_p = tl.program_id(0) * x + tl.arange(0, x), tl.arange(0, p)
    live = (part_p[:, None] < num_parts) & (row_x[None, :] < X)
    parts += part_p.to(tl.int64)[:, None] * X + row_x[None, :]
    stride = tl.cast(num_parts, tl.int64) * X
    m_px = tl.load(parts, mask=live, other=NEG)
    picked_x = tl.sum(tl.load(parts + stride, mask=live, other=0.0), 0)
    denom_px = tl.load(parts + 2 * stride, mask=live, other=1.0)  # of weight 0, since m is NEG
    moment_px = tl.load(parts + 3 * stride, mask=live, other=0.0)
    m_x = tl.max(m_px, 0)
    keep, shift = _rescale(m_px, m_x[None, :])
    denom_x = tl.sum(keep * denom_px, 0)
    moment_x = tl.sum(keep * (moment_px + denom_px * shift), 0)
    log_x = tl.log2(denom_x)
    tl.store(out + row_x, (picked_x - m_x - log_x) * LN2, mask=row_x < X)
    tl.store(out + X + row_x, (log_x - moment_x / denom_x) * LN2, mask=row_x < X)
    tl.store(out + 2 * X + row_x, (m_x + log_x) * LN2, mask=row_x < X)


@triton.jit
def _overlap_kernel(
    hidden,  # [2 X, D]: dense, then sparse
    head,  # [V, D]
    scale,  # [1]
    lse,  # [2 X]
    parts,  # [parts, X]: the sum of minima of a part
    X, V, D, s_hidden, s_head, per_part,
    x: tl.constexpr, v: tl.constexpr, d: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    part, row_x = tl.program_id(1), tl.program_id(0) * x + tl.arange(0, x)
    scale2 = tl.load(scale) * LOG2E
    lse_dense = tl.load(lse + row_x, mask=row_x < X, other=0.0) * LOG2E
    lse_sparse = tl.load(lse + X + row_x, mask=row_x < X, other=0.0) * LOG2E
    alpha_x = tl.zeros([x], tl.float32)
    sparse = hidden + tl.cast(X, tl.int64) * s_hidden
    for j in range(part * per_part, tl.minimum((part + 1) * per_part, tl.cdiv(V, v))):
        vocab_v = _vocab(j * v, v)
        a = _logits(hidden, head, row_x, vocab_v, X, V, D, s_hidden, s_head, x, v, d, EVEN)
        b = _logits(sparse, head, row_x, vocab_v, X, V, D, s_hidden, s_head, x, v, d, EVEN)
        # min(p) = exp(min(log p))
        p = tl.exp2(tl.minimum(a * scale2 - lse_dense[:, None], b * scale2 - lse_sparse[:, None]))
        alpha_x += tl.sum(tl.where(vocab_v[None, :] < V, p, 0.0), 1)
    tl.store(parts + part.to(tl.int64) * X + row_x, alpha_x, mask=row_x < X)


@triton.jit
def _gradient_kernel(
    hidden,  # [X, D]
    head,  # [V, D]
    scale,  # [1]
    token, lse, entropy, d_logp, d_entropy,  # [X]
    out,  # [X, last - first]: gradient of hidden . head for rows first .. last - 1 of the head
    X, V, D, s_hidden, s_head, first, last,
    x: tl.constexpr, v: tl.constexpr, d: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    row_x = tl.program_id(0) * x + tl.arange(0, x)
    live = row_x < X
    token_x = tl.load(token + row_x, mask=live, other=-1)
    lse_x = tl.load(lse + row_x, mask=live, other=0.0)
    entropy_x = tl.load(entropy + row_x, mask=live, other=0.0)
    d_logp_x = tl.load(d_logp + row_x, mask=live, other=0.0)
    d_entropy_x = tl.load(d_entropy + row_x, mask=live, other=0.0)
    factor = tl.load(scale)
    column_v = tl.program_id(1) * v + tl.arange(0, v)
    vocab_v = _vocab(first + tl.program_id(1) * v, v)
    s = _logits(hidden, head, row_x, vocab_v, X, V, D, s_hidden, s_head, x, v, d, EVEN) * factor
    logp = s - lse_x[:, None]
    own = vocab_v[None, :] == token_x[:, None]
    ds = _d_logits(logp, own, entropy_x, d_logp_x, d_entropy_x) * factor
    out += row_x.to(tl.int64)[:, None] * (last - first) + column_v[None, :]
    inside = live[:, None] & (column_v[None, :] < last - first)
    tl.store(out, ds.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _logits(
    hidden, head, row_x, vocab_v, X, V, D, s_hidden, s_head,
    x: tl.constexpr, v: tl.constexpr, d: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """hidden . head, float32 [x, v]; rows past the end repeat the last one."""
    column_d = tl.arange(0, d)
    row_x, vocab_v = tl.minimum(row_x, X - 1), tl.minimum(vocab_v, V - 1)
    hidden += row_x.to(tl.int64)[:, None] * s_hidden + column_d[None, :]
    head += vocab_v.to(tl.int64)[:, None] * s_head + column_d[None, :]
    s = tl.zeros([x, v], tl.float32)
    for k in range(0, D, d):
        if EVEN:
            a, b = tl.load(hidden + k), tl.load(head + k)
        else:
            inside = column_d[None, :] < D - k
            a = tl.load(hidden + k, mask=inside, other=0.0)
            b = tl.load(head + k, mask=inside, other=0.0)
        s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    return s


@triton.jit
def _vocab(first, v: tl.constexpr) -> tl.tensor:
    """Token ids first, first + 1, ... of the rows of a block of the head."""
    return first + tl.arange(0, v)


@triton.jit
def _rescale(m, m_new) -> tuple:
    """For a new maximum: the factor of the old sums, and what to add to their z."""
    return tl.exp2(m - m_new), m - m_new


@triton.jit
def _d_logits(logp, own, entropy_x, d_logp_x, d_entropy_x) -> tl.tensor:
    """The gradient of s = logits / temperature, [x, v]."""
    d = tl.where(own, d_logp_x[:, None], 0.0)
    inner = d_logp_x[:, None] + d_entropy_x[:, None] * (logp + entropy_x[:, None])
    return d - tl.exp2(logp * LOG2E) * inner
