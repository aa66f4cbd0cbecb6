"""Slots and pages of the paged engine, on a numpy device: no backend, no model."""

import numpy as np
import pytest

from common.rollout import paged_engine
from common.rollout.page_pool import PagePool
from common.schedule.schedule import Schedule
from common.types import Prompt
from tests.common.rollout.fake_device import VOCAB, FakeEngine, expected_response

LENGTHS = [1, 3, 4, 5, 8, 11, 12]
STOP = (3, 11)
WIDTH = 6  # pages of 4 tokens for 12 + 10
SMALLEST = 1 + 2 * WIDTH


def prompts(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [
        Prompt(prompt_id=5 + i, tokens=rng.integers(0, VOCAB, n), task="x", answer={})
        for i, n in enumerate(lengths)
    ]


def generate(engine, lengths=LENGTHS, num_samples=3, schedule=None, **how):
    return engine.generate(
        prompts(lengths), num_samples=num_samples, schedule=schedule, seed=9, **how
    )


def check_tokens(rollout, limit=10, stop_ids=STOP):
    """Every row is what a sampler without slots and pages gives."""
    for row, prompt in enumerate(rollout.prompts):
        want = expected_response(prompt, int(rollout.sample_B[row]), 9, limit, stop_ids)
        assert rollout.response(row).tolist() == want
        assert rollout.finished_B[row] == (want[-1] in stop_ids)
        assert rollout.tokens_BT[row, : rollout.prompt_len_B[row]].tolist() == list(prompt.tokens)


SETTINGS = {
    "slots are refilled": {},
    "one slot, one token at a time": {"num_slots": 1, "decode_chunk": 1, "prefill_chunk": 1},
    "everything at once": {"num_slots": 64, "decode_chunk": 50, "prefill_chunk": 12},
    "the smallest pool": {"cache_pages": SMALLEST},
    "slots without pages": {"num_slots": 64, "cache_pages": SMALLEST + 5},
    "pages of one token": {"page_size": 1, "num_slots": 5},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_do_not_depend_on_slots_chunks_and_pages(settings):
    engine = FakeEngine(stop_ids=STOP, **settings)
    rollout = generate(engine)
    check_tokens(rollout)
    assert 0 < rollout.finished_B.sum() < len(rollout.finished_B), "both ends must occur"
    (device,) = engine.devices
    assert rollout.stats["prefill_tokens"] == sum(LENGTHS) == np.sum(device.prefills)
    sampled = int((rollout.total_len_B - rollout.prompt_len_B).sum())
    assert rollout.stats["decode_tokens"] == sampled == rollout.response_mask_BT.sum()
    assert (rollout.version_BT == np.where(rollout.response_mask_BT, 7, -1)).all()


def test_a_slot_is_refilled_while_the_others_run_on():
    """Two slots and five samples of different lengths, one token per chunk."""
    engine = FakeEngine(num_slots=2, decode_chunk=1, stop_ids=tuple(range(0, VOCAB, 5)))
    rollout = generate(engine, lengths=[4], num_samples=5)
    lengths = rollout.total_len_B - rollout.prompt_len_B
    ends, started = [0, 0], []
    for n in lengths:  # each sample starts in the slot that is free first
        slot = int(np.argmin(ends))
        started.append(ends[slot])
        ends[slot] += int(n)
    running = [int(d.active_A.sum()) for d in engine.devices[0].decodings]
    assert running == [sum(step < end for end in ends) for step in range(max(ends))]
    assert len(set(started)) > 2, "samples must start at different times"


def test_samples_share_full_prompt_pages_and_copy_the_part_filled_one():
    """A prompt of 11 tokens: pages 0 and 1 are full, page 2 has 3 tokens; 3 pages more per row."""
    engine = FakeEngine(num_slots=3)
    generate(engine, lengths=[11])
    (device,) = engine.devices
    table = device.decodings[0].page_table_AP
    assert (table[:, :2] == table[0, :2]).all()
    own = table[:, 2:6].ravel()
    assert len(set(own)) == len(own) == 12 and not set(own) & set(table[0, :2])
    (starts,) = device.forks
    assert len({s.page_from for s in starts}) == 1 and starts[0].page_from not in own
    assert [s.page_to for s in starts] == table[:, 2].tolist()


def test_a_prompt_that_fills_its_pages_is_not_copied():
    engine = FakeEngine(num_slots=3)
    check_tokens(generate(engine, lengths=[8]), stop_ids=())
    (starts,) = engine.devices[0].forks
    assert [(s.page_from, s.page_to) for s in starts] == [(0, 0)] * 3


class Recorded(PagePool):
    """A pool that remembers itself, and the fewest pages that were ever free."""

    def __init__(self, num_pages):
        super().__init__(num_pages)
        self.least = self.num_free
        pools.append(self)

    def take(self, count):
        pages = super().take(count)
        self.least = min(self.least, self.num_free)
        return pages


pools: list[Recorded] = []


@pytest.mark.parametrize("cache_pages", [SMALLEST, SMALLEST + 1, 20, 0])
def test_an_exhausted_pool_makes_samples_wait_and_every_page_comes_back(monkeypatch, cache_pages):
    monkeypatch.setattr(paged_engine, "PagePool", Recorded)
    pools.clear()
    engine = FakeEngine(stop_ids=STOP, num_slots=8, cache_pages=cache_pages)
    check_tokens(generate(engine))
    (pool,) = pools
    assert pool.num_free == pool.num_pages - 1
    running = max(d.active_A.sum() for d in engine.devices[0].decodings)
    if cache_pages:
        assert running < 8, "fewer rows than slots, since there are no pages for more"
        assert pool.least < WIDTH, "not enough is left for one more of the longest samples"
    else:
        assert running == 8


def test_a_pool_too_small_for_one_sample_is_refused():
    with pytest.raises(ValueError, match=f"cache_pages={SMALLEST - 1}: .*need {SMALLEST} pages"):
        FakeEngine(cache_pages=SMALLEST - 1)


def test_stop_ids_end_a_response_and_are_part_of_it():
    rollout = generate(FakeEngine(stop_ids=STOP))
    for row in range(len(rollout.prompts)):
        response = rollout.response(row)
        assert not np.isin(response[:-1], STOP).any()
        assert rollout.finished_B[row] == (response[-1] in STOP)
        assert rollout.finished_B[row] or len(response) == 10


def test_ignore_eos_samples_up_to_the_limit():
    rollout = generate(FakeEngine(stop_ids=STOP, ignore_eos=True))
    check_tokens(rollout, stop_ids=())
    assert (rollout.total_len_B - rollout.prompt_len_B == 10).all()
    assert not rollout.finished_B.any()


def test_each_token_has_the_budget_of_its_query():
    """Bins of 4 tokens, budgets 3 1 2; the query of token t stands at t - 1."""
    schedule = Schedule(page_size=4, bin_tokens=4, budgets=(3, 1, 2))
    rollout = generate(FakeEngine(num_slots=2), lengths=[2, 6], num_samples=1, schedule=schedule)
    k = np.round(-1000 * rollout.logp_sparse_BT).astype(int)
    assert k[0, :12].tolist() == [0, 0, 0, 3, 3, 1, 1, 1, 1, 2, 2, 2]
    assert k[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]


def test_settings_of_a_call_reach_every_decode_chunk():
    engine = FakeEngine(temperature=0.6, top_p=0.9)
    generate(engine)
    generate(engine, temperature=0.0, top_p=1.0)
    for device, want in zip(engine.devices, [(0.6, 0.9), (0.0, 1.0)], strict=True):
        assert {(d.temperature, d.top_p) for d in device.decodings} == {want}
        assert {d.max_selected for d in device.decodings} == {0}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_device_is_closed_once_whatever_happens(error):
    def fault(device):
        if len(device.decodings) == 2:
            raise error

    engine = FakeEngine(fault=fault)
    with pytest.raises(error):
        generate(engine)
    engine.fault = None
    check_tokens(generate(engine), stop_ids=())
    assert [device.closed for device in engine.devices] == [1, 1]


def test_a_refused_call_opens_no_device():
    engine = FakeEngine()
    with pytest.raises(ValueError, match="prompt 5 has 13 tokens, expected 1 to 12"):
        generate(engine, lengths=[13])
    with pytest.raises(ValueError, match="num_samples=0"):
        generate(engine, num_samples=0)
    other = Schedule(page_size=8, bin_tokens=4, budgets=(1,))
    with pytest.raises(ValueError, match="schedule for pages of 8 tokens"):
        generate(engine, schedule=other)
    assert not engine.devices
