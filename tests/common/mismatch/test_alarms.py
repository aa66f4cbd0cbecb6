"""Alarms about the course of a run: when they are raised, when not, and after a resume."""

import json

import numpy as np
import pytest

from common.mismatch import alarms
from common.mismatch.alarms import EARLY_STEPS, IDLE_STEPS, K3_STEPS, RECENT_STEPS, Watch


def record(length=300.0, k3=1e-3):
    return {"response/len_mean": length, "mismatch/k3": k3}


def raised(records):
    """The alarms of each step of a run."""
    watch = Watch([])
    return [watch.alarms(r) for r in records]


def noise(n, seed=0):
    rng = np.random.default_rng(seed)
    return [record(300 * rng.lognormal(0, 0.1), 1e-3 * rng.lognormal(0, 0.3)) for _ in range(n)]


def test_noise_and_steady_growth_raise_nothing():
    assert not any(raised(noise(500)))
    slow = [record(300 * 0.99**i) for i in range(200)]  # 33 % in 40 steps, more with time: no cliff
    assert not any(raised(slow))
    assert not any(raised([record(100 + 10 * i, 1e-3) for i in range(200)]))


def test_length_collapse():
    steps = [record(300)] * 20 + [record(151), record(149), record(300)]
    found = raised(steps)
    assert not any(found[:21]) and not found[22]
    assert found[21] == [
        "length collapse: 149 tokens on average, 300 is the median of the last 21 steps"
    ]
    # a collapse that goes on is told until half of the recent steps have it
    found = raised([record(300)] * 50 + [record(100)] * 40)
    assert [bool(f) for f in found] == [False] * 50 + [True] * 20 + [False] * 20
    assert RECENT_STEPS == 40
    assert not any(raised([record(300)] * (EARLY_STEPS - 1) + [record(1)]))  # too early to say


def test_k3_rising_needs_several_steps_in_a_row():
    high, quiet = record(k3=3.1e-3), record(k3=2.9e-3)
    found = raised(noise(0) + [record()] * EARLY_STEPS + [high] * (K3_STEPS - 1) + [quiet])
    assert not any(found)
    found = raised([record()] * EARLY_STEPS + [quiet] * 30 + [high] * (K3_STEPS + 2))
    assert [bool(f) for f in found[-4:]] == [False, True, True, True]
    assert found[-1] == [
        "k3-KL rising: 0.0031 nats per token, 0.001 at the start, over 3 times that for 7 steps"
    ]
    # rounding of a dense rollout is no drift, whatever the factor
    assert not any(raised([record(k3=1e-9)] * EARLY_STEPS + [record(k3=9e-8)] * 20))
    assert alarms.K3_FACTOR == 3


def test_a_resumed_run_goes_on_from_its_records():
    steps = noise(15) + [record(140, 4e-3)] * 8
    whole = raised(steps)
    assert any("length" in a for f in whole for a in f) and any("k3" in a for f in whole for a in f)
    for cut in (3, 15, 18, 21):
        kept = [json.loads(json.dumps(r)) for r in steps[:cut]]
        watch = Watch(kept)
        assert [watch.alarms(r) for r in steps[cut:]] == whole[cut:]
    fresh = Watch([])  # forgetting the records would lose the alarms
    assert not any(fresh.alarms(r) for r in steps[18:])


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_values_that_are_not_finite_are_no_alarm_of_their_own(bad):
    steps = [record()] * 20 + [record(bad, bad)] * 10
    assert not any(raised(steps))


def test_steps_that_learn_nothing():
    idle, busy = record() | {"grpo/grad_norm": 0.0}, record() | {"grpo/grad_norm": 1e-9}
    found = raised([idle] * (IDLE_STEPS - 1) + [busy] + [idle] * (IDLE_STEPS + 1) + [busy])
    assert [bool(f) for f in found] == [False] * (2 * IDLE_STEPS - 1) + [True, True, False]
    assert found[-2][0].startswith("nothing learnt for 6 steps: the gradient was exactly 0")
    # the steps before a restart count
    assert Watch([idle] * (IDLE_STEPS - 1)).alarms(idle)
    assert not raised([record()] * 20)[-1]  # a record without the number says nothing
