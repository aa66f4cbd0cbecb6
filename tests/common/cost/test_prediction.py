"""Predicted speed: rows in flight, the batch that fits, the bounds that the paper states."""

import dataclasses

import numpy as np
import pytest

from common.cost import chips, cost_report, decode_cost, prediction
from common.errors import UserError
from common.model.geometry import QWEN3
from tests.common.cost.test_decode_cost import ONE, TINY

CHIP = chips.Chip(
    name="c", bytes_per_second=1e6, flops_per_second=1e12, memory_bytes=1e6, source="a test"
)
BOUNDS = {"qwen3-1.7b": 3.36, "qwen3-4b": 2.95, "qwen3-8b": 2.57, "qwen3-14b": 1.85}


def published(name, tau="0.86"):
    return cost_report.read_schedule(f"{name}-{tau}")


def h200(**changes):
    return prediction.Setting(chip=chips.CHIPS["h200"], **changes)


def speedup(name, schedule, rows, setting):
    g = QWEN3[name]
    batch = prediction.batch_that_fits(g, rows, schedule.page_size, setting)
    dense, sparse = (prediction.predict(g, s, rows, batch, setting) for s in (None, schedule))
    return sparse["tokens_per_second"] / dense["tokens_per_second"]


def test_rows_in_flight_by_hand():
    """R = 1, 2, 3, 4 in equal parts: P(R > t) = 1, 3/4, 1/2, 1/4."""
    rows = prediction.histogram_lengths([0, 2, 4], [5, 5], prompt=10)
    assert rows.weights.tolist() == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rows.cached.tolist() == [10, 11, 12, 13]
    assert rows.mean_response == pytest.approx(2.5)
    assert rows.mean_cached == pytest.approx(10 + (0.75 + 1 + 0.75) / 2.5)
    assert prediction.fixed_lengths(3).weights.tolist() == [1, 1, 1]
    late = prediction.histogram_lengths([4, 5, 9], [1, 0])
    assert late.weights.tolist() == pytest.approx([1] * 5) and late.longest_response == 5


def test_rows_in_flight_are_those_of_a_simulated_engine():
    """A slot that is refilled at once passes through every length of one response after another."""
    rng = np.random.default_rng(0)
    rows = prediction.histogram_lengths([0, 20, 100], [30, 10])
    short = rng.random(40_000) < 0.75
    ends = np.where(short, rng.integers(1, 21, 40_000), rng.integers(21, 101, 40_000))
    seen = np.concatenate([np.arange(n) for n in ends])
    assert ends.mean() == pytest.approx(rows.mean_response, rel=0.02)
    assert seen.mean() == pytest.approx(rows.mean_cached, rel=0.02)
    assert (
        rows.mean_cached > 1.8 * prediction.fixed_lengths(23).mean_cached
    )  # long ones are seen more often
    late = rows.weights[50:].sum() / rows.weights.sum()
    assert np.mean(seen >= 50) == pytest.approx(late, rel=0.05)


def test_batch_by_hand():
    """33 KB of weights and rows of 64 tokens: 4 pages of 3 x (2,048 + 64) = 6,336 bytes."""
    setting = prediction.Setting(chip=CHIP, samples=1, memory_share=0.5, reserve=True)
    rows = prediction.fixed_lengths(64)
    assert prediction.row_memory(TINY, rows, 16, setting) == 4 * 6336
    room = 0.5 * 1e6 - 2 * decode_cost.num_parameters(TINY)
    assert prediction.batch_that_fits(TINY, rows, 16, setting) == room // (4 * 6336) > 10
    growing = dataclasses.replace(setting, reserve=False)  # 1, 2, 3 and 4 pages in equal parts
    assert prediction.row_memory(TINY, rows, 16, growing) == 2.5 * 6336
    shared = dataclasses.replace(setting, samples=4)  # 40 tokens: 2 full pages, a quarter each
    prompt = prediction.fixed_lengths(24, prompt=40)
    assert prediction.row_memory(TINY, prompt, 16, shared) == (4 - 0.75 * 2) * 6336
    asked = dataclasses.replace(setting, batch=3)
    assert prediction.batch_that_fits(TINY, rows, 16, asked) == 3
    for fault in ({"batch": 1000}, {"memory_share": 0.01}):
        with pytest.raises(UserError, match="do not fit: .* give more --chips"):
            prediction.batch_that_fits(TINY, rows, 16, dataclasses.replace(setting, **fault))


def test_prediction_by_hand():
    """One row that stays at 0 cached tokens, at 1 MB/s: bytes are microseconds."""
    setting = prediction.Setting(chip=CHIP, samples=1)
    rows = prediction.Lengths(prompt=0, weights=np.ones(1))
    got = prediction.predict(TINY, None, rows, 1, setting)
    size = sum(decode_cost.step_bytes(TINY, None, np.array([0])).values())
    assert got["step_seconds"] == pytest.approx(size / 1e6)
    assert got["tokens_per_second"] == pytest.approx(1e6 / size)
    slow = dataclasses.replace(CHIP, flops_per_second=1e5)
    bound = prediction.predict(TINY, None, rows, 5, dataclasses.replace(setting, chip=slow))[
        "seconds"
    ]
    assert bound["weights"] == pytest.approx(2 * decode_cost.step_weights(TINY) * 5 / 1e5)
    # 4 heads of 16: 4 x 4 x 16 operations a layer for a key and its value
    assert bound["kv_dense_layers"] == pytest.approx(2 * 5 * 256 / 1e5)
    rows = prediction.Lengths(prompt=10, weights=np.ones(20))
    flops = 2 * decode_cost.layer_weights(TINY) * 10 + 3 * (4 * 4 * 16) * 10 * 10 / 2
    prefill = prediction.predict(TINY, ONE, rows, 5, dataclasses.replace(setting, samples=2))
    assert prefill["seconds"]["prefill"] == pytest.approx(5 / (20 * 2) * flops / 1e12)


@pytest.mark.parametrize(("share", "tolerance"), [(0.75, 0.011), (prediction.MEMORY_SHARE, 0.025)])
@pytest.mark.parametrize("name", QWEN3)
def test_byte_bounds_of_the_paper(name, share, tolerance):
    """One H200, cache full, schedule 0.86, responses of 32K: rows in flight at all lengths, no
    prompt, `share` of 141 GB for weights and cache, landmarks in it; embedding not read."""
    got = speedup(name, published(name), prediction.fixed_lengths(32_768), h200(memory_share=share))
    assert got == pytest.approx(BOUNDS[name], rel=tolerance)


def test_the_bounds_depend_on_each_part_of_the_model():
    """Without dense layers or landmarks, or with rows all at their end, they are missed."""
    g, schedule, rows = QWEN3["qwen3-4b"], published("qwen3-4b"), prediction.fixed_lengths(32_768)
    setting = h200(memory_share=0.75)
    assert speedup("qwen3-4b", schedule, rows, dataclasses.replace(setting, num_dense_layers=0)) > (
        1.05 * BOUNDS["qwen3-4b"]
    )
    batch = prediction.batch_that_fits(g, rows, 16, setting)
    sparse = prediction.predict(g, schedule, rows, batch, setting)
    dense = prediction.predict(g, None, rows, batch, setting)["step_seconds"]
    without = sparse["step_seconds"] - sparse["seconds"]["landmarks"]
    assert dense / without > 1.05 * BOUNDS["qwen3-4b"]
    last = prediction.Lengths(prompt=32_767, weights=np.ones(1))
    assert abs(speedup("qwen3-4b", schedule, last, setting) / BOUNDS["qwen3-4b"] - 1) > 0.05


def test_speedup_falls_with_the_size_of_the_model():
    """At 32K: with the models' own schedules and with one for all, in both cost models. At 8K 4B
    gains more than 1.7B, whose schedule is denser there."""
    rows = prediction.fixed_lengths(32_768, prompt=1024)
    options = {"prompt": 1024, "response": 32_768, "samples": 8}
    options["intensity"] = chips.CHIPS["h200"].intensity
    for one in (None, published("qwen3-4b")):
        own = {name: one or published(name) for name in QWEN3}
        by_bytes = [speedup(name, own[name], rows, h200()) for name in QWEN3]
        by_eflops = [
            decode_cost.eflops_speedup(g, own[name], **options) for name, g in QWEN3.items()
        ]
        for values in (by_bytes, by_eflops):
            assert values == sorted(values, reverse=True) and values[0] > 1.1 * values[-1]
    short = prediction.fixed_lengths(8192, prompt=1024)
    small, larger = (speedup(n, published(n), short, h200()) for n in ("qwen3-1.7b", "qwen3-4b"))
    assert larger > small


def test_whole_step_by_the_papers_measurements():
    """2.21x of the rollout was 1.97x of the step, 2.41x was 2.11x: a tenth is not rollout."""
    assert prediction.whole_step_speedup(2.21, 0.1) == pytest.approx(1.97, abs=0.01)
    assert prediction.whole_step_speedup(2.41, 0.1) == pytest.approx(2.11, abs=0.02)
    assert prediction.whole_step_speedup(2.21, 0) == pytest.approx(2.21)
