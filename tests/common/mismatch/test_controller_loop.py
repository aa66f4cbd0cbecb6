"""The controller in the loop: what it decides about, refusals, and the same record after a stop."""

import dataclasses
import json

import numpy as np
import pytest

from common.errors import UserError
from common.records import metrics
from common.schedule import schedule
from common.types import Replay, Scored
from tests.common.fake_backend import Fake, make_config


def controlled(**rollout):
    """(config, fake): alpha is 1 where the schedule says k = 3 or more, else 0.3."""
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, **rollout}
    config = make_config(num_steps=8, rollout=rollout, grpo={"baseline": "greedy"})
    watched = dataclasses.replace(
        config.mismatch, controller=True, budgets=(1, 2, 3, 6), num_rows=8, controller_patience=3
    )
    config = dataclasses.replace(config, mismatch=watched)
    fake = Fake(config)

    def replay(rollout, rows, schedule, *, temperature=None):
        logp = rollout.logp_sparse_BT[rows]
        k = np.broadcast_to(schedule.budgets_at(np.arange(logp.shape[1])), logp.shape)
        return Replay(rows=rows, alpha_BT=np.where(k >= 3, 1.0, 0.3), logp_replay_BT=logp)

    fake.replay = replay
    return config, fake


def test_the_controller_decides_about_the_next_rollout_and_goes_on_after_a_stop(train, tmp_path):
    config, fake = controlled()
    whole = metrics.comparable(train(config, fake))
    used = [call["schedule"].budgets for call in fake.calls]
    assert used[::2] == used[1::2]  # rollout and greedy baseline
    bin_ = whole[0]["bins"][0]["bin"]
    assert [budgets[bin_] for budgets in used[::2]] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert [r["bins"][0]["k"] for r in whole] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert whole[0]["controller/changes"] > 0 and whole[7]["controller/changes"] == 0
    assert "100.0% of its tokens under tau=0.86" in whole[0]["controller/moves"][0]
    kept = (fake.path / "schedule-adapted.json").read_bytes()
    adapted = schedule.load(fake.path / "schedule-adapted.json", page_size=4)
    assert adapted.budgets[bin_] == 3
    assert json.loads((fake.path / "schedule.json").read_text())["bins"][0]["k"] == 1
    (tmp_path / "run").rename(tmp_path / "whole")

    config, fake = controlled()
    save = fake.save
    for stop_at in (2, 5):

        def stop(step, extra, stop_at=stop_at):
            if step == stop_at:
                raise KeyboardInterrupt
            save(step, extra)

        fake.save = stop
        with pytest.raises(KeyboardInterrupt):
            train(config, fake)
    fake.save = save
    assert metrics.comparable(train(config, fake)) == whole
    assert (fake.path / "schedule-adapted.json").read_bytes() == kept
    fake.saved[-1][1]["controller"]["bins"][0]["rung"] = 3  # the checkpoint's state is what counts
    train(dataclasses.replace(config, num_steps=9), fake)
    assert fake.calls[-1]["schedule"].budgets[0] == 6


def test_replays_every_second_step_and_a_lost_checkpoint_give_the_same_record(train, tmp_path):
    def rare(num_steps):
        config, fake = controlled()
        watched = dataclasses.replace(config.mismatch, every=2)
        return dataclasses.replace(
            config, mismatch=watched, num_steps=num_steps, checkpoint_every=3
        ), fake

    config, fake = rare(8)
    whole = metrics.comparable(train(config, fake))
    assert [r["bins"][0]["k"] for r in whole] == [1, 2, 2, 3, 3, 3, 3, 3]  # after steps 0 and 2
    assert ["controller/changes" in r for r in whole] == [True, False] * 4
    (tmp_path / "run").rename(tmp_path / "whole")
    config, fake = rare(7)
    train(config, fake)
    assert [extra["step"] for _, extra in fake.saved] == [3, 6, 7]
    del fake.saved[1:]  # the newest ones are damaged, so the run resumes at step 3
    fake.calls.clear()
    assert metrics.comparable(train(rare(8)[0], fake)) == whole
    assert fake.calls[0]["schedule"].budgets[1] == 3 and len(fake.calls) == 2 * 5


def test_alarms_of_a_resumed_run_count_the_steps_before_it(train):
    config, fake = controlled()
    config = dataclasses.replace(config, num_steps=13)

    def drifting(rollout, *, temperature=None):
        logp = rollout.logp_sparse_BT
        return Scored(logp_dense_BT=logp + (fake.version >= 10), entropy_BT=-logp)

    fake.logprobs = drifting
    assert not any("k3-KL" in a for r in train(config, fake) for a in r["alarms"])
    records = train(dataclasses.replace(config, num_steps=16), fake)
    told = [any("k3-KL rising" in a for a in r["alarms"]) for r in records]
    assert told == [False] * 14 + [True] * 2  # the fifth step in a row, two of them after the stop


def test_without_a_controller_the_schedule_stays(train):
    config, fake = controlled()
    off = dataclasses.replace(config.mismatch, controller=False)
    records = train(dataclasses.replace(config, mismatch=off), fake)
    assert {call["schedule"].budgets for call in fake.calls} == {(1,)}
    assert not any(key.startswith("controller/") for r in records for key in r)
    assert not (fake.path / "schedule-adapted.json").exists()
    assert "controller" not in fake.saved[-1][1]


def test_a_controller_without_a_sparse_schedule_is_refused_before_anything_is_built(train):
    config, fake = controlled(schedule="dense")
    with pytest.raises(UserError, match="set mismatch.controller=False") as error:
        train(config, fake)
    assert "\n" not in str(error.value) and fake.log == []
