"""The host's half of a rollout engine: it plans slots and pages, a backend runs the programs.

Each prompt is prefilled once and densely, whatever the group size. Its samples enter free slots as
other sequences finish, and a sample owns its pages from admission to its last token.

    prompts -> prefill -> prompt pages, last hidden state
                              |  fork: share full pages, copy the part-filled one
                              v
    free slot <- finished   slot: page table, cached tokens, noise key   -> decode a chunk -> tokens
        ^                     |
        +---------------------+  a stop id, or the token limit
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.config import RolloutConfig
from common.errors import UserError
from common.protocols import Progress
from common.records import stopping
from common.rollout import noise
from common.rollout.budgets import plan_budgets
from common.rollout.device import PREFILL_ROWS, Decoding, Device, Fork
from common.rollout.page_pool import PagePool, pages_for
from common.schedule.schedule import Schedule
from common.types import Prompt, Rollout


@dataclasses.dataclass
class _Group:
    """A prefilled prompt with samples that wait for slots."""

    index: int
    tokens: np.ndarray
    pages: list[int]
    prompt_row: int
    waiting: collections.deque[int]


@dataclasses.dataclass
class _Slot:
    """A running or finished sample."""

    row: int
    pages: list[int]
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logps: list[np.ndarray] = dataclasses.field(default_factory=list)


class PagedEngine(abc.ABC):
    """RolloutEngine of common/protocols.py with a paged cache and slots that are refilled."""

    def __init__(self, config: RolloutConfig, stop_ids: Sequence[int]) -> None:
        self.config = config
        self.stop_ids = () if config.ignore_eos else tuple(int(i) for i in stop_ids)
        context = config.max_prompt_tokens + config.max_response_tokens
        self.table_width = pages_for(context, config.page_size)
        prompts = min(PREFILL_ROWS, config.num_slots)
        enough = 1 + (config.num_slots + prompts) * self.table_width
        self.num_pages = config.cache_pages or enough
        if self.num_pages < 1 + 2 * self.table_width:
            raise UserError(
                f"rollout.cache_pages={config.cache_pages}: one prompt and one sample of {context} "
                f"tokens need {1 + 2 * self.table_width} pages; raise it or set 0"
            )
        self.params: Any = None
        self.version = -1

    @abc.abstractmethod
    def open(self) -> Device:
        """The programs of the next generate call."""

    def load_weights(self, params: Any, version: int) -> None:
        """Weights for the next rollouts. No page outlives a generate call, so none gets stale."""
        self.params, self.version = params, version

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        schedule: Schedule | None,
        seed: int,
        temperature: float | None = None,
        top_p: float | None = None,
        progress: Progress | None = None,
    ) -> Rollout:
        """See RolloutEngine; temperature 0 decodes greedily."""
        temperature = self.config.temperature if temperature is None else temperature
        top_p = self.config.top_p if top_p is None else top_p
        self._check(prompts, num_samples, schedule, temperature, top_p)
        device = self.open()
        try:
            run = _Run(
                self, device, prompts, num_samples=num_samples, schedule=schedule, seed=seed,
                temperature=temperature, top_p=top_p,
            )  # fmt: skip
            start = time.perf_counter()
            while run.unfinished:
                stopping.check()
                run.admit()
                run.decode_chunk()
                if progress:
                    progress(run.num_done, len(run.rows))
            run.stats["decode_seconds"] = time.perf_counter() - start
        finally:
            device.close()
        return run.collect()

    def _check(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        schedule: Schedule | None,
        temperature: float,
        top_p: float,
    ) -> None:
        assert self.params is not None, "generate before load_weights"
        if num_samples < 1 or not prompts:
            raise ValueError(f"{num_samples=}, {len(prompts)=}: expected at least one of each")
        if not temperature >= 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"{temperature=}, {top_p=}: expected temperature >= 0 (0 = greedy), 0 < top_p <= 1"
            )
        for p in prompts:
            limit = self.config.max_prompt_tokens
            if not 1 <= len(p.tokens) <= limit:
                raise ValueError(
                    f"prompt {p.prompt_id} has {len(p.tokens)} tokens, expected 1 to {limit}; "
                    "raise rollout.max_prompt_tokens or drop it"
                )
        if schedule is not None and schedule.page_size != self.config.page_size:
            raise ValueError(
                f"schedule for pages of {schedule.page_size} tokens, "
                f"engine has rollout.page_size={self.config.page_size}"
            )


class _Run:
    """State of one generate call."""

    def __init__(
        self, engine: PagedEngine, device: Device, prompts: Sequence[Prompt], *, num_samples: int,
        schedule: Schedule | None, seed: int, temperature: float, top_p: float,
    ) -> None:  # fmt: skip
        self.engine, self.device, self.config = engine, device, engine.config
        self.prompts, self.num_samples = prompts, num_samples
        self.temperature, self.top_p = temperature, top_p
        self.plan = plan_budgets(schedule, engine.table_width)
        self.rows = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
        A, P = self.config.num_slots, engine.table_width
        self.pool = PagePool(engine.num_pages)
        self.prompt_queue = collections.deque(range(len(prompts)))
        self.groups: list[_Group] = []
        self.slots: list[_Slot | None] = [None] * A
        self.table_AP = np.zeros((A, P), np.int32)
        self.cached_A, self.limit_A = np.zeros(A, np.int32), np.zeros(A, np.int32)
        self.key_A = np.zeros((2, A), np.uint32)
        ids = np.array([prompts[p].prompt_id for p, _ in self.rows], np.uint32)
        self.row_keys = noise.row_key(seed, ids, np.array([s for _, s in self.rows], np.uint32))
        self.done: dict[int, _Slot] = {}
        self.stats = {"prefill_tokens": 0.0, "decode_tokens": 0.0, "decode_steps": 0.0}

    @property
    def unfinished(self) -> bool:
        return len(self.done) < len(self.rows)

    @property
    def num_done(self) -> int:
        return len(self.done)

    def admit(self) -> None:
        """Fill free slots: samples of prefilled prompts first, then prefill further prompts."""
        free = [i for i, slot in enumerate(self.slots) if slot is None]
        self._fork(self._start_samples(free))
        while free and self.prompt_queue and not self.groups and self._prefill(len(free)):
            self._fork(self._start_samples(free))

    def _start_samples(self, free: list[int]) -> list[Fork]:
        """Give slots and pages to waiting samples, as far as there are any."""
        starts, C = [], self.config.page_size
        for group in self.groups:
            n = len(group.tokens)
            shared = group.pages[: n // C]
            own = pages_for(n + self.config.max_response_tokens, C) - len(shared)
            while free and group.waiting and self.pool.num_free >= own:
                slot, sample = free.pop(0), group.waiting.popleft()
                pages = self.pool.take(own)
                self.pool.share(shared)
                row = group.index * self.num_samples + sample
                self.slots[slot] = _Slot(row=row, pages=shared + pages)
                self.table_AP[slot] = 0
                self.table_AP[slot, : len(shared) + own] = shared + pages
                self.cached_A[slot], self.limit_A[slot] = n, n + self.config.max_response_tokens
                self.key_A[:, slot] = [k[row] for k in self.row_keys]
                page_from, page_to = (group.pages[-1], pages[0]) if n % C else (0, 0)
                starts.append(Fork(group.prompt_row, slot, page_from, page_to))
        return starts

    def _fork(self, starts: list[Fork]) -> None:
        """Start the planned samples, then release the pages of prompts without waiting samples."""
        if starts:
            self.device.fork(starts)
        for group in [g for g in self.groups if not g.waiting]:
            self.pool.release(group.pages)
            self.groups.remove(group)

    def _prefill(self, num_free: int) -> int:
        """Prefill the next prompts, as many as have a free slot and pages for one sample each."""
        C, Tc = self.config.page_size, self.config.prefill_chunk
        batch: list[_Group] = []
        reserved = 0
        while self.prompt_queue and len(batch) < min(PREFILL_ROWS, num_free):
            tokens = np.asarray(self.prompts[self.prompt_queue[0]].tokens, np.int32)
            need = pages_for(len(tokens), C)
            sample = pages_for(len(tokens) + self.config.max_response_tokens, C)
            if self.pool.num_free - reserved < need + sample:
                break
            reserved += sample
            waiting = collections.deque(range(self.num_samples))
            pages = self.pool.take(need)
            batch.append(_Group(self.prompt_queue.popleft(), tokens, pages, len(batch), waiting))
        table = np.zeros((PREFILL_ROWS, self.engine.table_width), np.int32)
        for i, group in enumerate(batch):
            table[i, : len(group.pages)] = group.pages
        for start in range(0, max((len(g.tokens) for g in batch), default=0), Tc):
            stopping.check()
            tokens, count = np.zeros((PREFILL_ROWS, Tc), np.int32), np.zeros(PREFILL_ROWS, np.int32)
            for i, group in enumerate(batch):
                piece = group.tokens[start : start + Tc]
                tokens[i, : len(piece)], count[i] = piece, len(piece)
            self.device.prefill(tokens, np.full(PREFILL_ROWS, start, np.int32), count, table)
            self.stats["prefill_tokens"] += float(count.sum())
        self.groups += batch
        return len(batch)

    def decode_chunk(self) -> None:
        """Decode a chunk on the device, keep the sampled tokens and free finished slots."""
        active = np.array([slot is not None for slot in self.slots])
        assert active.any(), "no runnable row: the page pool is too small"
        result = self.device.decode(
            Decoding(
                active_A=active,
                cached_A=self.cached_A,
                limit_A=self.limit_A,
                key_A=(self.key_A[0], self.key_A[1]),
                page_table_AP=self.table_AP,
                **self.plan._asdict(),
                temperature=self.temperature,
                top_p=self.top_p,
            )
        )
        count_A = result.num_sampled_A
        self.cached_A = np.array(result.cached_A)
        self.stats["decode_tokens"] += float(count_A.sum())
        self.stats["decode_steps"] += float(count_A.max())
        for i in np.flatnonzero(active):
            slot = self.slots[i]
            assert slot is not None, "active"
            slot.tokens.append(result.tokens_AT[i, : count_A[i]])
            slot.logps.append(result.logp_AT[i, : count_A[i]])
            if not result.active_A[i]:
                self.pool.release(slot.pages)
                self.done[slot.row] = slot
                self.slots[i] = None

    def collect(self) -> Rollout:
        """The finished samples as padded arrays, in row order."""
        B = len(self.rows)
        prompts = [self.prompts[p] for p, _ in self.rows]
        tokens = [np.concatenate(self.done[r].tokens) for r in range(B)]
        prompt_len = np.array([len(p.tokens) for p in prompts], np.int32)
        total_len = prompt_len + np.array([len(t) for t in tokens], np.int32)
        T = int(total_len.max())
        out = np.zeros((B, T), np.int32)
        logp = np.zeros((B, T), np.float32)
        for r in range(B):
            n = prompt_len[r]
            out[r, :n] = prompts[r].tokens
            out[r, n : total_len[r]] = tokens[r]
            logp[r, n : total_len[r]] = np.concatenate(self.done[r].logps)
        position = np.arange(T)
        mask = (position >= prompt_len[:, None]) & (position < total_len[:, None])
        finished = np.array([t[-1] in self.engine.stop_ids for t in tokens])
        return Rollout(
            prompts=prompts,
            group_B=np.array([p for p, _ in self.rows], np.int32),
            sample_B=np.array([s for _, s in self.rows], np.int32),
            tokens_BT=out,
            response_mask_BT=mask,
            logp_sparse_BT=logp,
            sparse_BT=mask & (position > prompt_len[:, None]) & (self.plan.max_selected > 0),
            prompt_len_B=prompt_len,
            total_len_B=total_len,
            finished_B=finished,
            version_BT=np.where(mask, self.engine.version, -1).astype(np.int32),
            stats=self.stats,
        )
