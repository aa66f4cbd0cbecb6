"""The loop with a fake backend: order of the steps, versions, records, evaluations, refusals."""

import dataclasses
import json

import numpy as np
import pytest

from common.config import GrpoConfig, TaskConfig
from common.errors import UserError
from common.mismatch import rollout_stats
from common.objective import grpo
from common.records import metrics
from common.tasks.prompts import PromptSource
from common.tasks.registry import build_task
from tests.common.fake_backend import LENGTH, SAMPLES, Fake, make_config


def test_order_of_the_steps(train):
    config = make_config(num_steps=2, eval_every=2)
    fake = Fake(config)
    train(config, fake)
    step = ["score", "replay", "update"]
    assert fake.log == [
        "push 0",  # before the first rollout of any kind
        "rollout 0",  # evaluation of the start policy
        "rollout 0", "score 0", *step[1:], "push 1", "checkpoint 1 after 1 records",
        "rollout 1", "score 1", *step[1:], "push 2",
        "rollout 2",  # evaluation after the last step, with the weights that it left
        "checkpoint 2 after 2 records", "close", "save model",
    ]  # fmt: skip


def test_versions_seeds_and_records(train):
    config = make_config()
    fake = Fake(config)
    records = train(config, fake)
    assert [r["step"] for r in records] == [r["weights/version"] for r in records] == [0, 1, 2]
    seeds = [call["seed"] for call in fake.calls]
    assert len(set(seeds)) == 3
    assert all(call["schedule"].budgets == (1,) for call in fake.calls)
    for r, batch in zip(records, fake.batches, strict=True):
        assert r["rollout/tokens"] == 2 * SAMPLES * LENGTH == sum(batch.denominators)
        assert set(r) - {"step", "bins", "alarms", "grpo/loss"} > {"time/step", "reward/mean"}
    assert json.loads((fake.path / "schedule.json").read_text())["bins"][0]["k"] == 1


def test_an_engine_that_ignores_a_push_is_noticed(train):
    config = make_config()
    fake = Fake(config, deaf=True)
    fake.loaded = 0
    with pytest.raises(AssertionError, match="stale weights"):
        train(config, fake)
    assert "update" not in fake.log


@pytest.mark.parametrize(
    ("every", "num_steps", "due"),
    # (update number after which there is an evaluation; the last always; 0 = none at all)
    [(0, 3, []), (1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (9, 2, [2])],
)
def test_evaluations_are_due(train, every, num_steps, due):
    records = train(c := make_config(eval_every=every, num_steps=num_steps), Fake(c))
    assert [r["step"] + 1 for r in records if "eval/reward" in r] == due
    assert [r["step"] for r in records if "eval/start_reward" in r] == ([0] if every else [])


def test_evaluation_is_dense_with_the_same_noise_every_time(train):
    config = make_config(eval_every=1, num_steps=2)
    fake = Fake(config)
    train(config, fake)
    evaluations = [c for c in fake.calls if c["samples"] == 1]
    assert len(evaluations) == 3
    assert all(c == {"seed": 20_260_608, "schedule": None, "samples": 1} for c in evaluations)


def advantages_by_row(fake, step):
    """Advantages of the loss tokens of a step: {(prompt tokens, response): advantage}."""
    found = {}
    for micro in (m for minibatch in fake.batches[step].minibatches for m in minibatch):
        for b in np.flatnonzero(micro.loss_mask_BT.any(1)):
            key = tuple(micro.tokens_BT[b][micro.loss_mask_BT[b]])
            found[key] = set(micro.advantage_BT[b][micro.loss_mask_BT[b]].tolist())
    return found


def test_remax_subtracts_the_reward_of_the_greedy_response(train):
    config = make_config(num_steps=1, grpo={"baseline": "greedy", "normalize_std": False})
    fake = Fake(config)

    def reward(rollout):  # greedy: 0.25 for the first prompt, 0.5 for the second; samples 1
        if len(rollout.group_B) == 2:
            return np.array([0.25, 0.5], np.float32)
        return np.ones(len(rollout.group_B), np.float32)

    train(config, fake, reward)
    assert fake.log[1:3] == ["rollout 0", "greedy 0"]
    values = sorted(advantages_by_row(fake, 0).values(), key=max)
    assert values == [{0.5}] * SAMPLES + [{0.75}] * SAMPLES  # 1 - 0.5 and 1 - 0.25
    assert fake.calls[0]["seed"] != fake.calls[1]["seed"]


def test_jackpot_draws_the_same_for_the_same_step(train, tmp_path):
    def weights(fake):
        return [m.weight_BT for b in fake.batches for mini in b.minibatches for m in mini]

    config = make_config(grpo={"correction": "jackpot", "correction_cap": 2.0})
    runs = []
    for name in ("a", "b"):
        fake = Fake(config)
        # dense log-probs below the sparse ones, so that acceptance is a matter of the draw
        logprobs = fake.logprobs

        def lower(rollout, *, temperature=None, logprobs=logprobs):
            scored = logprobs(rollout)
            return dataclasses.replace(scored, logp_dense_BT=scored.logp_dense_BT * 2)

        fake.logprobs = lower
        train(config, fake)
        (tmp_path / "run").rename(tmp_path / name)
        runs.append(weights(fake))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    masked = np.concatenate([(w[w.any(1)] == 0).ravel() for w in runs[0]])
    assert 0 < masked.mean() < 1


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_rewards_without_any_signal_neither_hang_nor_give_nan(train, value):
    config = make_config(eval_every=1)
    fake = Fake(config)
    records = train(config, fake, lambda rollout: np.full(len(rollout.group_B), value, np.float32))
    assert len(records) == 3
    for r, batch in zip(records, fake.batches, strict=True):
        assert batch.minibatches == [[], []] and min(batch.denominators) > 0
        assert r["reward/groups_with_signal"] == 0 and r["reward/mean"] == value
        assert not any("finite" in alarm for alarm in r["alarms"])
        assert all(np.isfinite(v) for k, v in r.items() if "/" in k)


def test_missing_rewards_are_counted_and_left_out(train):
    config = make_config(num_steps=1)
    fake = Fake(config)

    def reward(rollout):  # group 0: no reward at all; group 1: 0, 1, missing, 1
        return np.array([np.nan] * 4 + [0, 1, np.nan, 1], np.float32)

    (record,) = train(config, fake, reward)
    assert record["reward/missing"] == 5
    assert record["reward/mean"] == pytest.approx(2 / 3)
    assert record["batch/rows_used"] == 3
    assert sum(fake.batches[0].denominators) == 3 * LENGTH


def test_top_p_below_one_is_refused_before_anything_is_built(train):
    config = make_config(rollout={"top_p": 0.9})
    fake = Fake(config)
    with pytest.raises(UserError, match=r"top_p=0.9: training needs 1.0") as error:
        train(config, fake)
    assert "\n" not in str(error.value) and fake.log == []


def test_stopped_between_record_and_checkpoint_the_step_is_made_again(train, tmp_path):
    config = make_config(eval_every=2)
    whole = metrics.comparable(train(config, Fake(config)))
    (tmp_path / "run").rename(tmp_path / "whole")
    fake = Fake(config)
    original = fake.save

    def stop(step, extra):
        if step == 2:
            raise KeyboardInterrupt
        original(step, extra)

    fake.save = stop
    with pytest.raises(KeyboardInterrupt):
        train(config, fake)
    assert len(metrics.read_metrics(fake.path)) == 2 and len(fake.saved) == 1
    fake.save = original
    assert metrics.comparable(train(config, fake)) == whole


SCHEDULE = {
    "format": "sparrow-schedule-1", "name": "a", "page_size": 4, "bin_tokens": 16,
    "bins": [{"start": 0, "end": 16, "k": 1}, {"start": 16, "end": 32, "k": 2}],
}  # fmt: skip
OTHERS = {
    "budget": {"bins": [{"start": 0, "end": 16, "k": 1}, {"start": 16, "end": 32, "k": 3}]},
    "bins": {"bin_tokens": 8, "bins": [{"start": 0, "end": 8, "k": 1},
                                       {"start": 8, "end": 16, "k": 2}]},
    "length": {"bins": [{"start": 0, "end": 16, "k": 1}]},
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_a_schedule_file_changed_since_is_refused_and_nothing_is_lost(train, tmp_path, change):
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEDULE))
    config = make_config(num_steps=2, rollout={"schedule": str(file)})
    fake = Fake(config)
    train(config, fake)
    longer = dataclasses.replace(config, num_steps=3)
    kept = {n: (fake.path / n).read_bytes() for n in ("schedule.json", "metrics.jsonl")}
    file.write_text(json.dumps(SCHEDULE | OTHERS[change]))
    with pytest.raises(UserError, match="no longer the schedule") as error:
        train(longer, fake)
    assert "\n" not in str(error.value) and str(file) in str(error.value)
    assert kept == {n: (fake.path / n).read_bytes() for n in kept}
    # the same budgets under another name, with another history, are the same schedule
    file.write_text(json.dumps(SCHEDULE | {"name": "b", "provenance": {"tau": 0.5}}))
    assert len(train(longer, fake)) == 3


def test_a_run_without_a_checkpoint_takes_the_new_schedule(train, tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEDULE))
    config = make_config(num_steps=1, rollout={"schedule": str(file)})
    fake = Fake(config)
    update, fake.update = fake.update, None
    with pytest.raises(TypeError):
        train(config, fake)
    fake.update = update
    file.write_text(json.dumps(SCHEDULE | OTHERS["budget"]))
    assert len(train(config, fake)) == 1
    assert json.loads((fake.path / "schedule.json").read_text())["bins"][1]["k"] == 3


def test_a_response_limit_below_every_right_answer_is_refused(train):
    # 4 to 6 facts, at least 75 % of them on the chain: 3 hops of 2 x (key value), and <eos>: 13
    args = {"num_symbols": 8, "min_entries": 4, "max_entries": 6, "header_tokens": 4}
    limit = {"max_response_tokens": 12}
    config = make_config(task=TaskConfig(args=args), rollout=limit)
    with pytest.raises(UserError, match=r"max_response_tokens=12: .*expected at least 13$"):
        train(config, Fake(config))
    # with partial credit one hop and <eos> earn something
    config = make_config(
        task=TaskConfig(args=args | {"partial_credit": True}), rollout={"max_response_tokens": 4}
    )
    with pytest.raises(UserError, match="expected at least 5$"):
        train(config, Fake(config))


@pytest.mark.parametrize(("overlong", "share"), [("keep", 0.5), ("mask", 0.0), ("zero", 0.0)])
def test_signal_is_counted_after_overlong_was_applied(overlong, share):
    # group 0: rewards 1 0, the first cut at the limit: with mask one row is left, with zero both
    # are 0; group 1: all alike
    fake = Fake(config := make_config())
    fake.loaded = 0
    prompts = PromptSource(build_task(config.task), config.task, config.rollout).batch(0)
    rollout = fake.generate(prompts, num_samples=2, schedule=None, seed=0)
    rollout = dataclasses.replace(rollout, finished_B=np.array([False, True, True, True]))
    rewards = np.array([1.0, 0, 1, 1])
    advantages = grpo.advantages(
        rewards, rollout.group_B, config=GrpoConfig(overlong=overlong),
        finished_B=rollout.finished_B,
    )  # fmt: skip
    values = rollout_stats.describe_rollout(rollout, rewards, None, advantages)
    assert values["reward/groups_with_signal"] == share
    assert values["reward/mean"] == 0.75
