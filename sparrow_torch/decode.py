"""The device programs of the engine: prefill a chunk, fork samples, decode a step.

    prefill  prompt tokens ---> pages of the cache, prompt_hidden (last hidden state of a prompt)
    fork     prompt_hidden ---> hidden_AD of a slot; copies the partly filled last page
    decode   hidden_AD -> logits -> token -> model.extend -> cache, hidden_AD   (repeated)

A decode step runs over the running samples, their number rounded up to a bucket (a power of 2), on
buffers of fixed address and shape. On a GPU each bucket is captured once as a CUDA graph and then
replayed, once per step. Lengths, budgets, pages and weights may change between replays, because the
graph reads them from device memory. All graphs share one pool of memory, because a step keeps
nothing but its buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from common.rollout.device import PREFILL_ROWS, DecodeResult, Decoding, Fork
from kernels_triton.cuda_graph import Capture
from sparrow_torch.model import Decoder
from sparrow_torch.sampling import fused_sample, nucleus_only, sample


def run_again(step: Callable[[], None]) -> Callable[[], None]:
    """The step itself: the capture of devices without CUDA graphs."""
    return step


class Shape(NamedTuple):
    """What is fixed when a step is captured; everything else it reads from its buffers."""

    rows: int
    num_budgets: int
    bin_tokens: int
    max_selected: int
    temperature: float
    top_p: float


def budget_at(position_B: torch.Tensor, budgets: torch.Tensor, bin_tokens: int) -> torch.Tensor:
    """Budget of the query at each position: `budget_at` of common/schedule/schedule.py in torch."""
    return budgets[(position_B // bin_tokens).clamp(max=len(budgets) - 1).long()]


def bucket(rows: int, most: int) -> int:
    """The smallest power of 2 that is at least `rows`, or `most` if that is smaller."""
    return min(1 << (rows - 1).bit_length(), most)


class DecodeStep:
    """One decode step on buffers of its own; run() executes it. Padding rows are never active."""

    def __init__(self, programs: Programs, shape: Shape):
        self.programs, self.shape = programs, shape
        B, place = shape.rows, {"device": programs.device}
        self.slot_B = torch.full((B,), programs.num_slots, **place)
        self.active_B = torch.zeros(B, dtype=torch.bool, **place)
        self.cached_B, self.limit_B, self.num_sampled_B, self.token_B = (
            torch.zeros(B, dtype=torch.int32, **place) for _ in range(4)
        )
        self.key_B = tuple(torch.zeros(B, dtype=torch.int64, **place) for _ in range(2))
        self.table_BP = torch.zeros((B, programs.table_width), dtype=torch.int32, **place)
        self.budgets = torch.zeros(shape.num_budgets, dtype=torch.int32, **place)
        self.logp_B = torch.zeros(B, **place)
        self.run = programs.capture(self._step)  # changes nothing, because no row is active

    def load(self, d: Decoding, slots) -> None:
        """Fill the buffers with the state of `slots`; the other rows of the bucket are padding."""
        count = len(slots)
        self.slot_B.fill_(self.programs.num_slots)
        self.active_B.fill_(False)
        self.num_sampled_B.zero_()
        self.slot_B[:count] = torch.as_tensor(slots)
        rows: list[tuple[torch.Tensor, Any]] = [
            (self.active_B, d.active_A), (self.cached_B, d.cached_A), (self.limit_B, d.limit_A),
            (self.table_BP, d.page_table_AP),
        ]  # fmt: skip
        rows += [(mine, key.astype("int64")) for mine, key in zip(self.key_B, d.key_A, strict=True)]
        for mine, x_A in rows:
            mine[:count] = torch.as_tensor(x_A[slots])
        self.budgets.copy_(torch.as_tensor(d.budgets))

    def _step(self) -> None:
        """Sample a token from the hidden state of each row, then run it through the model."""
        p, shape, cached = self.programs, self.shape, self.cached_B
        hidden_BD = p.hidden_AD[self.slot_B]
        token, logp = p.sample(
            p.model.logits(hidden_BD), self.key_B, cached, shape.temperature, shape.top_p
        )
        active = self.active_B
        self.token_B.copy_(torch.where(active, token, 0))
        self.logp_B.copy_(torch.where(active, logp, 0))
        self.num_sampled_B += active
        stops = (token[:, None] == p.stop_ids).any(1)
        active = active & ~stops & (cached + 1 < self.limit_B)
        sparse: dict[str, Any] = {}
        if shape.max_selected:
            k_B = budget_at(cached, self.budgets, shape.bin_tokens)
            sparse = {"k_B": k_B, "max_selected": shape.max_selected}
        out_BTD = p.model.extend(
            p.cache, token[:, None], cached, active.int(), self.table_BP, num_dense=p.num_dense,
            **sparse,
        )  # fmt: skip
        p.hidden_AD[self.slot_B] = torch.where(active[:, None], out_BTD[:, 0], hidden_BD)
        self.cached_B += active
        self.active_B.copy_(active)


class Programs:
    """Device of common/rollout/device.py: the cache, hidden states of slots, CUDA graphs."""

    def __init__(
        self, model: Decoder, cache, *, num_slots: int, table_width: int, chunk: int,
        num_dense: int, stop_ids: Sequence[int], capture: Capture,
    ):  # fmt: skip
        self.model, self.cache, self.capture = model, cache, capture
        self.sample = fused_sample if model.ops.name == "kernel" else sample
        self.num_slots, self.table_width = num_slots, table_width
        self.chunk, self.num_dense = chunk, num_dense
        embed_VD = model.embed_VD
        self.device = embed_VD.device
        self.stop_ids = torch.tensor(stop_ids, device=self.device)
        # The last row is for padding.
        self.hidden_AD = embed_VD.new_zeros(num_slots + 1, embed_VD.shape[1])
        self.prompt_hidden = embed_VD.new_zeros(PREFILL_ROWS, embed_VD.shape[1])
        self.steps: dict[Shape, DecodeStep] = {}
        if self.device.type == "cuda":
            self.fuse()

    def fuse(self, **options: Any) -> None:
        """Let torch.compile, with these options, fuse the small operations of a step."""
        options = {"dynamic": True, "fullgraph": True} | options
        compile: Any = torch.compile  # pyrefly: its overloads do not accept **options
        self.model.project = compile(self.model.project, **options)
        self.model.finish = compile(self.model.finish, **options)
        if self.sample is sample:
            self.sample = compile(sample, **options)
        else:  # the kernel does all but top-p
            nucleus = compile(nucleus_only, **options)
            self.sample = functools.partial(fused_sample, nucleus=nucleus)

    def _tensor(self, x) -> torch.Tensor:
        return torch.as_tensor(x, device=self.device)

    @torch.no_grad()
    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP) -> None:
        """Dense pass over the next tokens of up to PREFILL_ROWS prompts."""
        tokens_BT, start_B, num_new_B, page_table_BP = map(
            self._tensor, (tokens_BT, start_B, num_new_B, page_table_BP)
        )
        hidden_BTD = self.model.extend(self.cache, tokens_BT, start_B, num_new_B, page_table_BP)
        last = (num_new_B - 1).clamp(min=0).long()
        newest = hidden_BTD[torch.arange(len(last), device=self.device), last]
        self.prompt_hidden = torch.where((num_new_B > 0)[:, None], newest, self.prompt_hidden)

    @torch.no_grad()
    def fork(self, starts: Sequence[Fork]) -> None:
        """Start samples of the prompts that were prefilled last."""
        source, slot, page_from, page_to = self._tensor(starts).T
        self.hidden_AD[slot] = self.prompt_hidden[source]
        kv, _ = self.cache
        kv[:, :, page_to] = kv[:, :, page_from]

    @torch.no_grad()
    def decode(self, d: Decoding) -> DecodeResult:
        """Sample up to `chunk` tokens in every active slot."""
        slots = d.active_A.nonzero()[0]
        shape = Shape(
            bucket(len(slots), self.num_slots), len(d.budgets), d.bin_tokens, d.max_selected,
            d.temperature, d.top_p,
        )  # fmt: skip
        if shape not in self.steps:
            self.steps[shape] = DecodeStep(self, shape)
        step = self.steps[shape]
        step.load(d, slots)
        tokens, logps = [], []
        for _ in range(min(self.chunk, int((d.limit_A - d.cached_A)[slots].max()))):
            if self.device.type == "cpu" and not step.active_B.any():
                break  # on a GPU this check would force a host sync; finished rows are masked
            step.run()
            tokens.append(step.token_B.clone())
            logps.append(step.logp_B.clone())
        A, T = len(d.active_A), len(tokens)

        def by_slot(before_A: np.ndarray, rows: torch.Tensor) -> np.ndarray:
            before_A[slots] = rows[: len(slots)].cpu().numpy()
            return before_A

        return DecodeResult(
            active_A=by_slot(d.active_A.copy(), step.active_B),
            cached_A=by_slot(d.cached_A.copy(), step.cached_B),
            tokens_AT=by_slot(np.zeros((A, T), np.int32), torch.stack(tokens, 1)),
            logp_AT=by_slot(np.zeros((A, T), np.float32), torch.stack(logps, 1)),
            num_sampled_A=by_slot(np.zeros(A, np.int32), step.num_sampled_B),
        )

    def close(self) -> None:
        """Nothing to do: cache and graphs are kept for the next call."""
