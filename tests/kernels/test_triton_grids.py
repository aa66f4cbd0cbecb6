"""Grids of every launch at sizes that no machine here could run: CUDA takes 65,535 on axes 1, 2.

The launchers run on tensors without storage (torch's meta device), with kernels that only keep the
grid they were asked for. Qwen3-14B has 40 query and 8 KV heads of 128: 2,000 rows x 40 heads =
80,000 programs, which axis 1 would not take; nor 9,000 rows x 8 blocks of queries.
"""

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this machine")
from kernels_triton import append_kv, flash_prefill, select_pages, sparse_decode, token_logprob

LIMIT = 65_535
N, K, H, C = 40, 8, 128, 16


class Grids:
    """Stands for a kernel: kernel[grid](...) keeps the grid."""

    def __init__(self, kept, name):
        self.kept, self.name = kept, name

    def __getitem__(self, grid):
        self.kept[self.name] = tuple(grid)
        return lambda *args, **kwargs: None


@pytest.fixture
def grids(monkeypatch):
    kept = {}
    for module in (append_kv, flash_prefill, select_pages, sparse_decode, token_logprob):
        for name, value in vars(module).copy().items():
            if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                label = f"{module.__name__.split('.')[1]}.{name}"
                monkeypatch.setattr(module, name, Grids(kept, label))
    return kept


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return meta(*shape, dtype=torch.int32)


def check(grids, **axis_0):
    for name, grid in grids.items():
        assert all(n <= LIMIT for n in grid[1:]) and grid[0] < 2**31, (name, grid)
    for name, programs in axis_0.items():
        assert grids[name.replace("__", ".")][0] == programs, (name, grids)


def test_prefill_and_its_backward(grids):
    q, k, v = (meta(2000, 65, heads, H).requires_grad_() for heads in (N, K, K))
    flash_prefill.flash_prefill(q, k, v).sum().backward()
    # 65 tokens: one block of 128 queries, two of 64 (dq), two of 64 keys (dk, dv).
    check(
        grids,
        flash_prefill___forward_kernel=2000 * 40,
        flash_prefill___query_gradient_kernel=2000 * 40 * 2,
    )
    assert grids["flash_prefill._key_gradient_kernel"][0] % (2000 * 8) == 0


@pytest.mark.parametrize(("rows", "T", "blocks"), [(2000, 1, 1), (9000, 96, 8), (70_000, 1, 1)])
def test_decode(grids, rows, T, blocks):
    """96 tokens x 5 heads of a group = 480 queries: 8 blocks of 64."""
    pages = 64
    kv, marks = meta(1, K, 100, 2, C, H), meta(1, 100, K, H)
    table, row = ints(rows, pages), ints(rows)
    q, new = meta(rows, T, N, H), meta(rows, T, K, H)
    sparse_decode.sparse_decode(q, kv, 0, table, row, row)
    select_pages.select_pages(q[:, 0], marks, 0, table, row, row, max_selected=19)
    append_kv.append_kv(kv, marks, 0, new, new, table, row, row)
    # T tokens touch (T + 14) // 16 + 1 pages: 1 token 1 page (15 // 16 + 1), 96 tokens 7.
    touched = {1: 1, 96: 7}[T]
    check(
        grids,
        sparse_decode___attend=K * rows * blocks,
        select_pages___score=K * rows,
        select_pages___list=K * rows,
        append_kv___append=K * rows * touched,
    )


@pytest.mark.parametrize("splits", [1, 64])
def test_the_sum_over_splits(grids, splits):
    out, lse = meta(2000, 96, N, H), meta(2000, 96, N)
    parts = meta(splits, 2000, 96, N, H), meta(splits, 2000, 96, N)
    sparse_decode.join_splits(*parts, out, lse)
    check(grids, sparse_decode___combine=2000 * 96)


@pytest.mark.parametrize("tokens", [1, 2000, 5_000_000])
def test_scoring(grids, tokens):
    hidden, head = meta(tokens, 64).requires_grad_(), meta(151_936, 64)
    logp, _ = token_logprob.token_logprob(hidden, head, ints(tokens))
    token_logprob.acceptance_overlap(hidden.detach(), hidden.detach(), head, ints(tokens))
    if tokens <= 2000:
        logp.sum().backward()
    check(grids)
    assert len(grids) == (4 if tokens <= 2000 else 3)


def test_a_grid_of_rows_on_axis_1_is_seen(grids):
    """A planted fault: rows x heads on the second axis, as it was."""
    flash_prefill._forward_kernel[1, 2000 * N]
    with pytest.raises(AssertionError, match="80000"):
        check(grids)
