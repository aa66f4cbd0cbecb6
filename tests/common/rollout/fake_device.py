"""A paged engine without a backend: its cache holds tokens, its model is a checksum, all in numpy.

The next token is a function of all tokens before it, as read through the row's page table, and of
the row's noise key. So a page that is wrong, shared by mistake or reused too early changes tokens.
The log-prob of a token is -k / 1000, where k is the budget of the query that produced it.
"""

import zlib

import numpy as np

from common.config import RolloutConfig
from common.rollout import noise
from common.rollout.device import PREFILL_ROWS, DecodeResult
from common.rollout.paged_engine import PagedEngine
from common.schedule.schedule import budget_at

VOCAB = 40


def next_token(context, key, position):
    """The token at `position` after the tokens of `context`."""
    word = int(noise.token_bits(key, np.uint32(position), np.arange(2, dtype=np.uint32))[0])
    return (zlib.crc32(np.array(context, np.int32).tobytes()) ^ word) % VOCAB


def expected_response(prompt, sample, seed, limit, stop_ids):
    """The response of one sample, from plain lists: no slots, no pages, no chunks."""
    key = noise.row_key(seed, np.uint32(prompt.prompt_id), np.uint32(sample))
    context = [int(t) for t in prompt.tokens]
    while len(context) < len(prompt.tokens) + limit:
        context.append(next_token(context, key, len(context)))
        if context[-1] in stop_ids:
            break
    return context[len(prompt.tokens) :]


class FakeDevice:
    """Device of common/rollout/device.py; `fault(device)` runs before each decode chunk."""

    def __init__(self, engine, fault):
        self.engine, self.fault, self.closed = engine, fault, 0
        self.page_size = engine.config.page_size
        self.pages = np.full((engine.num_pages, self.page_size), -1)
        self.prompt_context = [[] for _ in range(PREFILL_ROWS)]
        self.context, self.budget = {}, {}  # by slot: tokens before the next one, k of their query
        self.prefills, self.forks, self.decodings = [], [], []

    def write(self, table, position, token):
        page = table[position // self.page_size]
        assert page > 0, "page 0 belongs to nobody"
        self.pages[page, position % self.page_size] = token

    def read(self, table, length):
        return self.pages[table].reshape(-1)[:length].tolist()

    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP):
        self.prefills.append(num_new_B.copy())
        for b in np.flatnonzero(num_new_B):
            for t in range(num_new_B[b]):
                self.write(page_table_BP[b], start_B[b] + t, tokens_BT[b, t])
            self.prompt_context[b] = self.read(page_table_BP[b], start_B[b] + num_new_B[b])

    def fork(self, starts):
        self.forks.append(list(starts))
        for start in starts:
            self.pages[start.page_to] = self.pages[start.page_from]
            self.context[start.slot] = self.prompt_context[start.prompt_row]
            self.budget[start.slot] = 0  # the first token comes from the dense prefill

    def decode(self, d):
        if self.fault:
            self.fault(self)
        self.decodings.append(d._replace(page_table_AP=d.page_table_AP.copy()))
        A, T = len(d.active_A), self.engine.config.decode_chunk
        active, cached, count = d.active_A.copy(), d.cached_A.copy(), np.zeros(A, np.int32)
        tokens, logp = np.zeros((A, T), np.int32), np.zeros((A, T), np.float32)
        for s in np.flatnonzero(active):
            while active[s] and count[s] < T:
                key = (d.key_A[0][s], d.key_A[1][s])
                token = next_token(self.context[s], key, cached[s])
                tokens[s, count[s]], logp[s, count[s]] = token, -self.budget[s] / 1000
                count[s] += 1
                active[s] = token not in self.engine.stop_ids and cached[s] + 1 < d.limit_A[s]
                if active[s]:
                    self.write(d.page_table_AP[s], cached[s], token)
                    if d.max_selected:
                        self.budget[s] = int(budget_at(cached[s], d.budgets, d.bin_tokens))
                    cached[s] += 1
                    self.context[s] = self.read(d.page_table_AP[s], cached[s])
        return DecodeResult(
            active_A=active, cached_A=cached, tokens_AT=tokens, logp_AT=logp, num_sampled_A=count
        )

    def close(self):
        self.closed += 1


class FakeEngine(PagedEngine):
    """A paged engine with a fake device per generate call; `devices` keeps them all."""

    def __init__(self, *, stop_ids=(), fault=None, **settings):
        settings = {
            "page_size": 4, "max_prompt_tokens": 12, "max_response_tokens": 10, "num_slots": 4,
            "decode_chunk": 3, "prefill_chunk": 5,
        } | settings  # fmt: skip
        super().__init__(RolloutConfig(**settings), stop_ids)
        self.fault, self.devices = fault, []
        self.load_weights("weights", 7)

    def open(self):
        self.devices.append(FakeDevice(self, self.fault))
        return self.devices[-1]
