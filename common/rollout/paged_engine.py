"""The host's half of a rollout engine: slots, pages and samples; a backend runs the programs.

Each prompt is prefilled once and densely, whatever the group size. Its samples enter free slots as
other sequences finish. A slot's row owns its pages from admission to its last token.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.config import RolloutConfig
from common.errors import UserError
from common.protocols import Progress
from common.records import stopping
from common.rollout import noise
from common.rollout.page_pool import PagePool, pages_for
from common.schedule.schedule import NUM_RESERVED, Schedule
from common.types import Prompt, Rollout

PREFILL_ROWS = 8
BUDGET_BINS = 32


class Decoding(NamedTuple):
    """What a decode program is told: state of the slots (S), budgets, sampling.

    max_selected = 0 decodes densely; otherwise the budget of a row is
    budgets[min(position // bin_tokens, last)].
    """

    active_S: np.ndarray
    cached_S: np.ndarray
    limit_S: np.ndarray
    key_S: tuple[np.ndarray, np.ndarray]
    page_table_SP: np.ndarray
    budgets: np.ndarray
    bin_tokens: int
    max_selected: int
    temperature: float
    top_p: float


class Drawn(NamedTuple):
    """What it returns, in numpy: slots still running, tokens in the cache, and what was sampled."""

    active_S: np.ndarray
    cached_S: np.ndarray
    tokens_ST: np.ndarray
    logp_ST: np.ndarray
    num_drawn_S: np.ndarray


class Device(Protocol):
    """The programs of one generate call, with the cache and hidden states that they work on."""

    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP) -> None:
        """Dense pass over the next tokens of PREFILL_ROWS prompts."""

    def fork(self, starts: Sequence[tuple[int, int, int, int]]) -> None:
        """Start samples: (prompt row, slot, page from, page to) each; pages 0, 0 = no copy."""

    def decode(self, decoding: Decoding) -> Drawn:
        """Sample up to config.decode_chunk tokens in every active slot."""

    def close(self) -> None:
        """The call is over; what outlives it may be kept for the next one."""


@dataclasses.dataclass
class _Group:
    """A prefilled prompt whose samples wait for slots."""

    index: int
    tokens: np.ndarray
    pages: list[int]
    hidden_row: int
    waiting: collections.deque[int]


@dataclasses.dataclass
class _Slot:
    """A running sample."""

    row: int
    pages: list[int]
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logps: list[np.ndarray] = dataclasses.field(default_factory=list)


class PagedEngine(abc.ABC):
    """Paged, slot-refilling sampler of one policy (RolloutEngine of common/protocols.py)."""

    def __init__(self, config: RolloutConfig, stop_ids):
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
        """The programs of the next call."""

    def load_weights(self, params, version: int) -> None:
        """Weights for the next rollouts. No page outlives a generate call: none gets stale."""
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
        run = _Run(self, prompts, num_samples, schedule, seed)
        run.temperature, run.top_p = temperature, top_p
        start = time.perf_counter()
        while run.unfinished:
            stopping.check()
            run.admit()
            run.decode_chunk()
            if progress:
                progress(run.num_done, len(run.rows))
        run.stats["decode_seconds"] = time.perf_counter() - start
        run.device.close()
        return run.collect()

    def _check(self, prompts, num_samples, schedule, temperature, top_p) -> None:
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


class BudgetPlan(NamedTuple):
    """What a schedule is to a decode program; see Decoding."""

    budgets: np.ndarray
    bin_tokens: int
    max_selected: int


def plan_budgets(schedule: Schedule | None, table_width: int) -> BudgetPlan:
    """Budgets by bin and width of the page list, at most the table's; dense: width 0.

    A width is a program. Whatever budgets a schedule takes up to its `sized_for`, its width is one
    and the same; with a dense bin it is the table's.
    """
    if schedule is None or schedule.is_dense:
        return BudgetPlan(np.zeros(1, np.int32), 1, 0)
    budgets = np.minimum(np.array(schedule.budgets, np.int32), table_width)
    # The last budget holds beyond its bin; a padded table is one shape for all schedules.
    budgets = np.pad(budgets, (0, -len(budgets) % BUDGET_BINS), mode="edge")
    wanted = max(int(budgets.max()), schedule.sized_for) + NUM_RESERVED
    width = min(table_width, -(-wanted // 16) * 16)
    return BudgetPlan(budgets, schedule.bin_tokens, width)


class _Run:
    """State of one generate call."""

    def __init__(self, engine: PagedEngine, prompts, num_samples: int, schedule, seed: int):
        self.engine, self.prompts, self.config = engine, prompts, engine.config
        self.rows = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
        self.num_samples = num_samples
        S, P = self.config.num_slots, engine.table_width
        self.pool = PagePool(engine.num_pages)
        self.device = engine.open()
        self.prompt_queue = collections.deque(range(len(prompts)))
        self.groups: list[_Group] = []
        self.slots: list[_Slot | None] = [None] * S
        self.table_SP = np.zeros((S, P), np.int32)
        self.cached_S, self.limit_S = np.zeros(S, np.int32), np.zeros(S, np.int32)
        self.key_S = np.zeros((2, S), np.uint32)
        ids = np.array([prompts[p].prompt_id for p, _ in self.rows], np.uint32)
        self.row_keys = noise.row_key(seed, ids, np.array([s for _, s in self.rows], np.uint32))
        self.done: dict[int, _Slot] = {}
        self.stats = {"prefill_tokens": 0.0, "decode_tokens": 0.0, "decode_steps": 0.0}
        self.plan = plan_budgets(schedule, engine.table_width)
        self.temperature, self.top_p = 1.0, 1.0

    @property
    def unfinished(self) -> bool:
        return len(self.done) < len(self.rows)

    @property
    def num_done(self) -> int:
        return len(self.done)

    def admit(self) -> None:
        """Fill free slots: samples of prefilled prompts first, then prefill further prompts."""
        free = [i for i, slot in enumerate(self.slots) if slot is None]
        self._flush(self._start_samples(free))
        while free and self.prompt_queue and not self.groups and self._prefill(len(free)):
            self._flush(self._start_samples(free))

    def _start_samples(self, free: list[int]) -> list[tuple[int, int, int, int]]:
        """Give slots and pages to waiting samples; (hidden row, slot, page from, page to) each."""
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
                self.table_SP[slot] = 0
                self.table_SP[slot, : len(shared) + own] = shared + pages
                self.cached_S[slot], self.limit_S[slot] = n, n + self.config.max_response_tokens
                self.key_S[:, slot] = [k[row] for k in self.row_keys]
                part = (group.pages[-1], pages[0]) if n % C else (0, 0)
                starts.append((group.hidden_row, slot, *part))
        return starts

    def _flush(self, starts: list[tuple[int, int, int, int]]) -> None:
        """Run the planned copies, then let go of prompts without waiting samples."""
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
        """Decode on the device for a while, then take what was sampled and free finished slots."""
        active = np.array([slot is not None for slot in self.slots])
        assert active.any(), "no runnable row: the page pool is too small"
        drawn = self.device.decode(
            Decoding(
                active, self.cached_S, self.limit_S, (self.key_S[0], self.key_S[1]), self.table_SP,
                *self.plan, self.temperature, self.top_p,
            )
        )  # fmt: skip
        self.cached_S = np.array(drawn.cached_S)
        self.stats["decode_tokens"] += float(drawn.num_drawn_S.sum())
        self.stats["decode_steps"] += float(drawn.num_drawn_S.max())
        for i in np.flatnonzero(active):
            slot = self.slots[i]
            assert slot is not None, "active"
            slot.tokens.append(drawn.tokens_ST[i, : drawn.num_drawn_S[i]])
            slot.logps.append(drawn.logp_ST[i, : drawn.num_drawn_S[i]])
            if not drawn.active_S[i]:
                self.pool.release(slot.pages)
                self.done[slot.row] = slot
                self.slots[i] = None

    def collect(self) -> Rollout:
        """Padded arrays in row order."""
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
            prompt_len_B=prompt_len,
            total_len_B=total_len,
            finished_B=finished,
            version_BT=np.where(mask, self.engine.version, -1).astype(np.int32),
            stats=self.stats,
        )
