"""Compares every kernel with float64, on the device and in the types in which it is timed.

Inputs are random and differ in every run. Before a kernel runs, the memory that it has to write is
filled with NaN, and so is what it must not read: the null page, free pages, slots past the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernels_triton.layout import landmark_shape, page_shape
from kernels_triton.ops import Ops

PAGE = 16
NARROW = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float8_e4m3fn: 2**-6}
"""Accepted error of an output by type: two roundings of numbers up to 4."""
EXACT = 1e-5
OUTER = {torch.float8_e4m3fn: torch.bfloat16}
"""Type of queries, new tokens and landmarks, if it is not the cache's."""


class Result(NamedTuple):
    """One comparison: the largest error, and the largest accepted error."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for NaN


class Pool(NamedTuple):
    """Sequences in a paged cache of one layer; keys and values hold them in order, [S, K, H]."""

    kv: torch.Tensor
    marks: torch.Tensor
    table: torch.Tensor
    length: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_pool(lengths: Sequence[int], kv_heads: int, head_dim: int, dtype, device) -> Pool:
    """Normal keys and values, rounded to dtype, in scattered pages; NaN everywhere else."""
    width = -(-max(lengths) // PAGE) + 1
    num = 1 + len(lengths) * width + 3
    wide = {"dtype": torch.float32, "device": device}
    kv = torch.full((1, kv_heads, num, *page_shape(PAGE, head_dim)), torch.nan, **wide)
    marks = torch.full((1, num, *landmark_shape(kv_heads, head_dim)), torch.nan, **wide)
    table = 1 + torch.randperm(num - 1, device=device)[: len(lengths) * width]
    table = table.int().reshape(-1, width)
    keys, values = [], []
    for pages, n in zip(table.long(), lengths, strict=True):
        k, v = torch.randn(2, n, kv_heads, head_dim, device=device).to(dtype).float()
        at = torch.arange(n, device=device)
        kv[0, :, pages[at // PAGE], 0, at % PAGE] = k.transpose(0, 1)
        kv[0, :, pages[at // PAGE], 1, at % PAGE] = v.transpose(0, 1)
        whole = n // PAGE
        mean = k[: whole * PAGE].reshape(whole, PAGE, kv_heads, head_dim).mean(1)
        marks[0, pages[:whole]] = mean
        keys.append(k.double())
        values.append(v.double())
    marks = marks.to(OUTER.get(dtype, dtype))
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Pool(kv.to(dtype), marks, table, length, keys, values)


def poison(device) -> None:
    """Fill free memory with NaN, so that the next outputs are allocated in it."""
    blocks = [torch.full((2**i,), torch.nan, device=device) for i in range(7, 24)]
    del blocks


def attention(q_TNH, k_SKH, v_SKH, visible_KTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64; the mask [K, T, S] is True where a query reads a key."""
    T, N, H = q_TNH.shape
    K = k_SKH.shape[1]
    q = q_TNH.double().reshape(T, K, -1, H)
    s = torch.einsum("tkrh,skh->ktrs", q, k_SKH.double()) * H**-0.5
    s = s.masked_fill(~visible_KTS[:, :, None], -torch.inf)
    out = torch.einsum("ktrs,skh->tkrh", s.softmax(-1), v_SKH.double())
    return out.reshape(T, N, H), s.logsumexp(-1).transpose(0, 1).reshape(T, N)


def best_pages(scores_P, k: int) -> torch.Tensor:
    """The first page, the last two and the k best of the others, sorted, from all scores."""
    n = len(scores_P)
    if n <= k + 3:
        return torch.arange(n)
    best = 1 + scores_P[1 : n - 2].topk(k).indices.cpu()
    return torch.cat([torch.tensor([0]), best.sort().values, torch.tensor([n - 2, n - 1])])


def decode_checks(ops: Ops, heads: int, kv_heads: int, H: int, dtype, device) -> Iterator[Result]:
    """Dense attention of 1 and 4 new tokens; selection; attention over the selected pages."""
    pool = make_pool([5 * PAGE * 13 + 3, PAGE * 9, 5, 1], kv_heads, H, dtype, device)
    scales = {}
    if dtype == torch.float8_e4m3fn and ops.name == "kernel":
        pool, scales["page_scales_LKM"] = scaled(pool)
    name, limit = f"{heads}/{kv_heads} heads, {str(dtype)[6:]}", NARROW.get(dtype, EXACT)
    for T in (1, 4):
        q = torch.randn(len(pool.keys), T, heads, H, device=device).to(OUTER.get(dtype, dtype))
        poison(device)
        start = (pool.length - T).clamp(min=0)
        out, lse = ops.sparse_decode(q, pool.kv, 0, pool.table, start, pool.length, **scales)
        errors = []
        for b, (key, value) in enumerate(zip(pool.keys, pool.values, strict=True)):
            position = int(start[b]) + torch.arange(min(T, len(key)), device=device)
            visible = torch.arange(len(key), device=device) <= position[:, None]
            visible = visible.expand(kv_heads, *visible.shape)
            want = attention(q[b, : len(position)], key, value, visible)
            errors.append(_errors((out[b, : len(position)], lse[b, : len(position)]), want))
        yield from _attention_results(f"dense decode, {T} new, {name}", errors, limit)
    yield from _sparse_checks(ops, pool, q[:, :1], scales, name, limit)


def scaled(pool: Pool) -> tuple[Pool, torch.Tensor]:
    """The pool with random scales of its pages applied to keys and values, and the scales."""
    _, K, M, *_ = pool.kv.shape
    scale = 0.5 + torch.rand(1, K, M, 2, device=pool.kv.device)
    keys, values = (
        [
            x * scale[0, :, pages[torch.arange(len(x)) // PAGE], i].T[:, :, None].double()
            for x, pages in zip(rows, pool.table.long(), strict=True)
        ]
        for i, rows in enumerate((pool.keys, pool.values))
    )
    return pool._replace(keys=keys, values=values), scale


def _errors(got, want) -> list[float]:
    return [
        float((a.detach().double() - b.detach()).abs().max())
        for a, b in zip(got, want, strict=True)
    ]


def _relative(got, want) -> float:
    """The largest error over the largest number."""
    return _errors((got,), (want,))[0] / float(want.detach().abs().max())


def _attention_results(name, errors, limit) -> tuple[Result, Result]:
    """Results for the worst output and log-sum-exp of all rows; a NaN is passed on."""
    out, lse = torch.tensor(errors).amax(0).tolist()
    return Result(f"{name}: output", out, limit), Result(f"{name}: log-sum-exp", lse, 1e-4)


def _sparse_checks(ops, pool, q_B1NH, scales, name, limit) -> Iterator[Result]:
    k, J, H = [12, 4, 7, 0], 16, q_B1NH.shape[-1]
    device, kv_heads = pool.kv.device, pool.kv.shape[1]
    pages = (pool.length + PAGE - 1) // PAGE
    budget = torch.tensor(k, dtype=torch.int32, device=device)
    poison(device)
    ids, count = ops.select_pages(
        q_B1NH[:, 0], pool.marks, 0, pool.table, pages, budget, max_selected=J
    )
    listed_B = pool.length - (pages - count) * PAGE
    poison(device)
    out, lse = ops.sparse_decode(q_B1NH, pool.kv, 0, ids, listed_B - 1, listed_B, **scales)
    wrong, errors = 0.0, []
    for b, n in enumerate(pages.tolist()):
        mean = q_B1NH[b, 0].double().reshape(kv_heads, -1, H).mean(1)
        marks = pool.marks[0, pool.table[b, :n].long()].double().nan_to_num()
        scores = torch.einsum("kh,pkh->kp", mean, marks)
        listed = torch.stack([best_pages(s, k[b]) for s in scores]).to(device)
        want = torch.nn.functional.pad(pool.table[b].long()[listed], (0, J - listed.shape[1]))
        wrong = max(wrong, float((ids[b] != want).double().mean()))
        read = torch.zeros(kv_heads, n, dtype=torch.bool, device=device).scatter(1, listed, True)
        read = read.repeat_interleave(PAGE, 1)[:, None, : len(pool.keys[b])]
        expected = attention(q_B1NH[b], pool.keys[b], pool.values[b], read)
        errors.append(_errors((out[b], lse[b]), expected))
    yield Result(f"selected pages, {name}: share that differs", wrong, 0.0)
    yield from _attention_results(f"sparse decode, {name}", errors, limit)


def append_checks(ops: Ops, kv_heads: int, H: int, dtype, device) -> Iterator[Result]:
    """The pool, which must match bit by bit, and the landmark of the completed page."""
    pool = make_pool([PAGE + 7, 40], kv_heads, H, dtype, device)
    new = torch.randn(2, 2, 3 * PAGE, kv_heads, H, device=device).to(pool.marks.dtype)
    count = torch.tensor([PAGE - 7, 0], dtype=torch.int32, device=device)
    kv, marks = pool.kv.clone(), pool.marks.clone()
    table = torch.cat([pool.table, pool.table[:, :1] * 0], 1)
    ops.append_kv(kv, marks, 0, *new, table, pool.length, count)
    want, page = pool.kv.float(), table[0, 1].long()
    want[0, :, page, :, 7:] = new[:, 0, : PAGE - 7].to(dtype).float().permute(2, 0, 1, 3)
    differ = (kv.float()[:, :, 1:] - want[:, :, 1:]).abs().nan_to_num(0.0).max()
    same = (kv.isnan() == want.to(dtype).isnan())[:, :, 1:].all()
    name = f"append, {str(dtype)[6:]}"
    yield Result(f"{name}: pool", float(differ) if same else torch.nan, 0.0)
    mean = want[0, :, page, 0].double().mean(1)
    error = float((marks[0, page].double() - mean).abs().max())
    yield Result(f"{name}: landmark", error, NARROW.get(pool.marks.dtype, EXACT))


def training_checks(ops: Ops, dtype, device) -> Iterator[Result]:
    """Prefill, dense and replayed, log-prob, entropy and overlap: outputs and gradients."""
    name, limit = str(dtype)[6:], 4 * NARROW.get(dtype, EXACT)
    T, N, K, H = 75, 4, 2, 64
    # Keys in quarters, constant over a page: landmarks are exact in every type.
    keys = (4 * torch.randn(1, -(-T // 4), K, H, device=device)).round() / 4
    q, v = (torch.randn(1, T, n, H, device=device).to(dtype) for n in (N, K))
    k = keys.repeat_interleave(4, 1)[:, :T].to(dtype)
    do = torch.randn(1, T, N, H, device=device).to(dtype)
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril().expand(K, T, T)
    replay = {"budget_T": torch.full((T,), 3, device=device), "page": 4}
    replay["sparse_BT"] = torch.arange(T, device=device)[None] >= 20
    for kind, options, visible in (
        ("dense", {}, causal), ("replay", replay, causal & _replayed(q, k, 20, 3, 4)),
    ):  # fmt: skip
        args = [x.clone().requires_grad_() for x in (q, k, v)]
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        poison(device)
        out = ops.flash_prefill(*args, **options)
        want, _ = attention(*(x[0] for x in wide), visible)
        out.backward(do)
        want.backward(do[0].double())
        pairs = [(out[0], want), *((a.grad, b.grad) for a, b in zip(args, wide, strict=True))]
        for what, (a, b) in zip(("output", "dq", "dk", "dv"), pairs, strict=True):
            yield Result(f"prefill, {kind}, {name}: {what}, relative", _relative(a, b), limit)
    yield from _head_checks(ops, dtype, device, name, limit)


def _replayed(q, k, prompt_len, budget, page) -> torch.Tensor:
    """Mask [K, T, S] of the keys that decode would read at each position."""
    _, T, N, H = q.shape
    K = k.shape[2]
    mean = q[0].double().reshape(T, K, -1, H).mean(2)
    marks = [k[0, i : i + page].double().mean(0) for i in range(0, T, page)]
    scores = torch.einsum("tkh,pkh->ktp", mean, torch.stack(marks))
    mask = torch.ones(K, T, T, dtype=torch.bool)
    for t in range(prompt_len, T):
        for head in range(K):
            pages = best_pages(scores[head, t, : t // page + 1], budget)
            mask[head, t] = torch.isin(torch.arange(T) // page, pages)
    return mask.to(q.device)


def _head_checks(ops, dtype, device, name, limit) -> Iterator[Result]:
    X, V, D = 150, 1003, 192
    hidden = torch.randn(2, X, D, device=device).to(dtype)
    head = (torch.randn(V, D, device=device) * 0.3).to(dtype)
    token = torch.randint(V, (X,), device=device)
    args = [x.clone().requires_grad_() for x in (hidden[0], head)]
    wide = [x.double().requires_grad_() for x in (hidden[0], head)]
    poison(device)
    logp, entropy = ops.token_logprob(*args, token, temperature=0.8)
    log_V = (wide[0] @ wide[1].T / 0.8).log_softmax(-1)
    want = log_V.gather(1, token[:, None])[:, 0], -(log_V.exp() * log_V).sum(-1)
    weight = torch.randn(2, X, device=device)
    (logp * weight[0] + entropy * weight[1]).sum().backward()
    (want[0] * weight[0] + want[1] * weight[1]).sum().backward()
    yield Result(f"log-prob, {name}", _errors((logp,), want[:1])[0], 5e-5)
    yield Result(f"entropy, {name}", _errors((entropy,), want[1:])[0], 5e-5)
    for what, a, b in zip(("hidden", "head"), args, wide, strict=True):
        error = _relative(a.grad, b.grad)
        yield Result(f"log-prob, {name}: gradient of {what}, relative", error, limit)
    alpha, _ = ops.acceptance_overlap(*hidden, head, token, temperature=0.8)
    p = [(x.double() @ head.double().T / 0.8).softmax(-1) for x in hidden]
    error = float((alpha - torch.minimum(*p).sum(-1)).abs().max())
    yield Result(f"acceptance overlap, {name}", error, 5e-5)


def checks(ops: Ops, device, dtypes, heads=((16, 8), (32, 8), (40, 8)), H=128) -> Iterator[Result]:
    """All comparisons, for every type of the cache; seeded by the clock."""
    torch.manual_seed(time.time_ns() % 2**32)
    for dtype in dtypes:
        for N, K in heads if dtype == dtypes[0] else heads[:1]:
            yield from decode_checks(ops, N, K, H, dtype, device)
        yield from append_checks(ops, heads[0][1], H, dtype, device)
        if dtype != torch.float8_e4m3fn:
            yield from training_checks(ops, dtype, device)
