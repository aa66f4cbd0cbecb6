"""Samples a token per row: portable noise, argmax and log-prob in one pass over the logits, on GPU.

    word_v = threefry2x32(key, (position, v // 2))[v % 2],  u_v = ((word_v >> 9) + 0.5) 2^-23
    token  = argmax_v s_v - log(-log u_v),                   s_v = logits_v / temperature
    logp   = s_token - log sum_v exp s_v

The noise is Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), computed where it is used, so
that no array of noise exists. Words and u equal those of numpy and JAX bit for bit.

Grid (B, parts of the vocabulary): one program owns one part of one row and loops over its blocks.
Threefry returns two words at a time. The program keeps five numbers: the best score with its token
and logit, and the running maximum and sum of the softmax. A second launch, grid (B), joins the
parts; of tokens with equal scores the lowest is sampled. Parts occupy the card if there are few
rows:

    logits of a row   | block | block | block | block | block | block |
                      |______ part 0 _______| |______ part 1 ________|
                        5 numbers               5 numbers              --> token, logp

On chip: `block` logits, words and scores, in registers.

Numerics: 32-bit integers and float32, with the logarithm of the math library: near u = 1, where the
best scores are, the approximate instruction has no correct digit. The score does not subtract the
log-sum-exp, so that an implementation that does may order two scores within 1e-6 differently. A
logit of -inf is never sampled unless the whole row is -inf. A NaN in a row makes its log-prob NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels_triton.tuning import SampleTuning, tune_sample

if TYPE_CHECKING:
    from kernels_triton.gpu_compile import Program

LOWEST = tl.constexpr(-1e30)


def sample_tokens(
    logits_BV, key_B, position_B, temperature: float, *, tuning: SampleTuning | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64 [B], and their log-probs at the temperature, float32 [B].

    key_B: two int64 [B] that hold 32-bit words. position_B: int [B], the position of the sampled
    token. Temperature 0 means argmax, with the log-prob at temperature 1. The grid depends on
    shapes only, so that the launches need no host sync. Raises ValueError for shapes that do not
    fit.
    """
    B, V = logits_BV.shape
    if not len(key_B[0]) == len(key_B[1]) == len(position_B) == B:
        raise ValueError(
            f"{len(key_B[0])=}, {len(key_B[1])=}, {len(position_B)=}: expected {B} each, as many as"
            " rows of logits"
        )
    if V < 1 or logits_BV.stride(-1) != 1:
        raise ValueError(f"{logits_BV.shape=}, {logits_BV.stride()=}: expected rows of stride 1")
    device = logits_BV.device
    token_B = torch.empty(B, dtype=torch.int64, device=device)
    logp_B = torch.empty(B, device=device)
    if B == 0:
        return token_B, logp_B
    tuning = tuning or tune_sample(B, V)
    blocks = triton.cdiv(V, tuning.block)
    per_part = triton.cdiv(blocks, min(tuning.parts, blocks))
    parts = triton.cdiv(blocks, per_part)
    best = torch.empty((B, parts), dtype=torch.int32, device=device)
    numbers = torch.empty((4, B, parts), device=device)
    _draw[(B, parts)](
        logits_BV, *key_B, position_B, best, numbers, float(temperature or 1.0),
        logits_BV.stride(0), B, V, per_part,
        BLOCK=tuning.block, GREEDY=temperature == 0, num_warps=tuning.num_warps,
    )  # fmt: skip
    _join[(B,)](
        best, numbers, token_B, logp_B, B, parts,
        PARTS=max(2, triton.next_power_of_2(parts)), num_warps=2,
    )  # fmt: skip
    return token_B, logp_B


@triton.jit
def _draw(
    logits_ptr,  # [B, V]
    key0_ptr, key1_ptr, position_ptr,  # [B]
    best_ptr,  # int32 [B, parts]: token
    numbers_ptr,  # [4, B, parts]: its score and logit; maximum of s, sum of exp(s - maximum)
    temperature,
    stride_b, B, V, per_part,
    BLOCK: tl.constexpr, GREEDY: tl.constexpr,
) -> None:  # fmt: skip
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    key0 = tl.load(key0_ptr + b).to(tl.uint32)
    key1 = tl.load(key1_ptr + b).to(tl.uint32)
    position = tl.load(position_ptr + b).to(tl.uint32)
    top, token, own = -float("inf"), 0, -float("inf")
    m, total = tl.cast(LOWEST, tl.float32), 0.0
    first = part * per_part * BLOCK
    for start in range(first, tl.minimum(first + per_part * BLOCK, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        s = tl.load(logits_ptr + b * stride_b + v, mask=v < V, other=-float("inf"))
        s = s.to(tl.float32) / temperature
        m_new = tl.maximum(m, tl.max(s, 0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new), 0)
        m = m_new
        score = s
        if not GREEDY:
            score = s - tl.log(-tl.log(_uniform(_words(key0, key1, position, start, BLOCK))))
        high = tl.max(score, 0)
        found = tl.min(tl.where(score == high, v, V), 0)
        better = _better(high, top)
        logit = tl.max(tl.where(v == found, s, -float("inf")), 0)
        own = tl.where(better, logit, own)
        token = tl.where(better, found, token)
        top = tl.where(better, high, top)
    at = b * parts + part
    stride = tl.cast(B, tl.int64) * parts
    tl.store(best_ptr + at, token)
    tl.store(numbers_ptr + at, top)
    tl.store(numbers_ptr + stride + at, own)
    tl.store(numbers_ptr + 2 * stride + at, m)
    tl.store(numbers_ptr + 3 * stride + at, total)


@triton.jit
def _join(
    best_ptr, numbers_ptr,  # as in _draw
    token_ptr,  # int64 [B]
    logp_ptr,  # [B]
    B, parts, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    at, live = b * parts + part, part < parts
    stride = tl.cast(B, tl.int64) * parts
    score = tl.load(numbers_ptr + at, mask=live, other=-float("inf"))
    own = tl.load(numbers_ptr + stride + at, mask=live, other=-float("inf"))
    m = tl.load(numbers_ptr + 2 * stride + at, mask=live, other=LOWEST)
    total = tl.load(numbers_ptr + 3 * stride + at, mask=live, other=0.0)
    token = tl.load(best_ptr + at, mask=live, other=0)
    high = tl.max(m, 0)
    lse = high + tl.log(tl.sum(total * tl.exp(m - high), 0))
    # Of equal scores the first part wins.
    winner = tl.min(tl.where(score == tl.max(score, 0), part, PARTS - 1), 0)
    tl.store(token_ptr + b, tl.sum(tl.where(part == winner, token, 0), 0).to(tl.int64))
    logit = tl.max(tl.where(part == winner, own, -float("inf")), 0)
    tl.store(logp_ptr + b, logit - lse)


@triton.jit
def _better(high, top) -> tl.tensor:
    """Whether a block has a better token. Not with an equal score, and not with NaN."""
    return high > top


@triton.jit
def _words(key0, key1, position, start, BLOCK: tl.constexpr) -> tl.tensor:
    """The noise words of tokens start .. start + BLOCK - 1, uint32; start is even."""
    pair = (start // 2 + tl.arange(0, BLOCK // 2)).to(tl.uint32)
    key2 = key0 ^ key1 ^ tl.full([], 0x1BD11BDA, tl.uint32)
    x0 = tl.zeros_like(pair) + (position + key0)
    x1 = pair + key1
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _inject(x0, x1, key1, key2, 1)
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = _inject(x0, x1, key2, key0, 2)
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _inject(x0, x1, key0, key1, 3)
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = _inject(x0, x1, key1, key2, 4)
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _inject(x0, x1, key2, key0, 5)
    return tl.interleave(x0, x1)


@triton.jit
def _four_rounds(
    x0, x1, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr
) -> tuple:  # fmt: skip
    x0, x1 = _round(x0, x1, R0)
    x0, x1 = _round(x0, x1, R1)
    x0, x1 = _round(x0, x1, R2)
    return _round(x0, x1, R3)


@triton.jit
def _round(x0, x1, R: tl.constexpr) -> tuple:
    x0 = x0 + x1
    return x0, ((x1 << R) | (x1 >> (32 - R))) ^ x0


@triton.jit
def _inject(x0, x1, key_a, key_b, block: tl.constexpr) -> tuple:
    return x0 + key_a, x1 + (key_b + tl.full([], block, tl.uint32))


@triton.jit
def _uniform(words) -> tl.tensor:
    """u as float32 in (0, 1); every step is exact in 24 bits."""
    return (words >> 9).to(tl.int32).to(tl.float32) * 2.0**-23 + 2.0**-24


def programs(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, page: int
) -> Iterator[Program]:
    """The programs that gpu_compile compiles: 64 rows of Qwen3's vocabulary, for any heads."""
    from kernels_triton.gpu_compile import Program

    tuning = tune_sample(64, 151_936)
    types = {
        "logits_ptr": f"*{dtype}", "key0_ptr": "*i64", "key1_ptr": "*i64", "position_ptr": "*i32",
        "best_ptr": "*i32", "numbers_ptr": "*fp32", "temperature": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(("stride_b", "B", "V", "per_part"), "i32")
    for greedy in (False, True):
        constants = {"BLOCK": tuning.block, "GREEDY": greedy}
        name = "sample_tokens, greedy" if greedy else "sample_tokens"
        yield Program(name, _draw, types, constants, tuning.num_warps, 3)
    types = {"best_ptr": "*i32", "numbers_ptr": "*fp32", "token_ptr": "*i64", "logp_ptr": "*fp32"}
    types |= {"B": "i32", "parts": "i32"}
    yield Program("sample_tokens, join", _join, types, {"PARTS": 16}, 2, 1)
