"""The loop with a fake backend: order of the steps, versions, records, evaluations, refusals."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from common import loop, metrics, run_dir, schedule, setup, tasks
from common.config import (
    Config,
    GrpoConfig,
    LearnerConfig,
    MismatchConfig,
    RolloutConfig,
    TaskConfig,
)
from common.errors import UserError
from common.protocols import Backend
from common.types import Replay, Rollout, Scored

SAMPLES, LENGTH = 4, 5


class Fake:
    """A backend in numpy that writes what is asked of it into `log`.

    The weights are one number, the count of updates. Response tokens are drawn from (seed, prompt,
    sample, weights), their log-prob is -1, the dense one -1 too. Checkpoints live in the object.
    """

    def __init__(self, config, *, deaf=False):
        self.log, self.deaf, self.config = [], deaf, config
        self.weights, self.version, self.batches, self.calls = 0, -1, [], []
        self.saved = []

    def parts(self):
        return Backend(
            engine=types.SimpleNamespace(generate=self.generate, load_weights=self.load_weights),
            scorer=types.SimpleNamespace(
                logprobs=self.logprobs, replay=self.replay, load_weights=self.load_scorer
            ),
            reference=None,
            learner=self,
            open_checkpoints=lambda path: self,
            save_model=lambda path: self.log.append("save model"),
            export_weights=lambda params: {"weights": params},
            geometry=self.config.model,
            description={"backend": "fake"},
        )

    params = property(lambda self: self.weights)

    def load_weights(self, params, version):
        self.log.append(f"push {version}")
        if not self.deaf:
            self.loaded, self.version = params, version

    def load_scorer(self, params, version):
        self.scorer_version = version

    def generate(self, prompts, *, num_samples, schedule, seed, temperature=None, progress=None):
        kind = "greedy" if temperature == 0 else "rollout"
        self.log.append(f"{kind} {self.version}")
        self.calls.append({"seed": seed, "schedule": schedule, "samples": num_samples})
        rows = [p for p in prompts for _ in range(num_samples)]
        sample = np.tile(np.arange(num_samples), len(prompts))
        start = np.array([len(p.tokens) for p in rows], np.int32)
        shape = (len(rows), start.max() + LENGTH)
        mask = (np.arange(shape[1]) >= start[:, None]) & (
            np.arange(shape[1]) < start[:, None] + LENGTH
        )
        tokens, self.length = np.zeros(shape, np.int32), shape[1]
        for b, p in enumerate(rows):
            rng = np.random.default_rng([seed % 2**32, p.prompt_id, sample[b], self.loaded])
            tokens[b, : start[b]] = p.tokens
            tokens[b, mask[b]] = rng.integers(0, 9, LENGTH)
        return Rollout(
            prompts=rows,
            group_B=np.repeat(np.arange(len(prompts)), num_samples).astype(np.int32),
            sample_B=sample.astype(np.int32),
            tokens_BT=tokens,
            response_mask_BT=mask,
            logp_sparse_BT=np.where(mask, -1, 0).astype(np.float32),
            prompt_len_B=start,
            total_len_B=start + LENGTH,
            finished_B=np.ones(len(rows), bool),
            version_BT=np.where(mask, self.version, -1).astype(np.int32),
            stats={"prefill_tokens": 1.0},
        )

    def logprobs(self, rollout, *, temperature=None):
        self.log.append(f"score {self.scorer_version}")
        logp = rollout.logp_sparse_BT
        return Scored(logp_dense_BT=logp, entropy_BT=-logp)

    def replay(self, rollout, rows, schedule, *, temperature=None):
        self.log.append("replay")
        logp = rollout.logp_sparse_BT[rows]
        return Replay(rows=rows, alpha_BT=np.ones_like(logp), logp_replay_BT=logp)

    def update(self, batch):
        self.log.append("update")
        self.batches.append(batch)
        self.weights += 1
        clipped = np.zeros(self.length, int)
        clipped[-1] = 1  # one token was clipped, at the last position
        return {"grpo/loss": 0.0, "clipped_by_position": clipped}

    def save(self, step, extra):
        records = metrics.read_metrics(self.path)
        self.log.append(f"checkpoint {step} after {len(records)} records")
        self.saved.append((self.weights, json.loads(json.dumps(extra))))

    def restore(self):
        if not self.saved:
            return None
        self.weights, extra = self.saved[-1]
        return extra

    def close(self):
        self.log.append("close")


def make_config(**changes):
    grpo = {"num_minibatches": 2, "correction": "none", **changes.pop("grpo", {})}
    rollout = {
        "prompts_per_step": 2, "samples_per_prompt": SAMPLES, "max_prompt_tokens": 60,
        "max_response_tokens": LENGTH, "schedule": "k=1", "page_size": 4,
    } | changes.pop("rollout", {})  # fmt: skip
    return Config(**{
        "num_steps": 3,
        "eval_every": 0,
        "task": TaskConfig(args={"num_symbols": 8, "min_entries": 4, "max_entries": 6,
                                 "header_tokens": 4}, num_eval_prompts=3),
        "rollout": RolloutConfig(**rollout),
        "grpo": GrpoConfig(**grpo),
        "learner": LearnerConfig(tokens_per_microbatch=1000),
        "mismatch": MismatchConfig(num_rows=2, bin_tokens=16, min_tokens=1),
    } | changes)  # fmt: skip


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(config, fake): one call of loop.train in tmp_path/run; the records."""

    def call(config, fake, reward=None):
        """reward(rollout) -> [B]; by default random in {0, 1}, a function of the tokens."""

        def by_tokens(rollout):
            return (rollout.tokens_BT.sum(1) % 2).astype(np.float32)

        def build(config, *, vocab_size, stop_ids):
            return fake.parts()

        monkeypatch.setattr(setup, "LEARNER", "fake_backend")
        monkeypatch.setitem(sys.modules, "fake_backend", types.SimpleNamespace(build=build))
        monkeypatch.setattr(
            tasks, "score", lambda task, rollout, pool: (reward or by_tokens)(rollout)
        )
        fake.path = tmp_path / "run"
        with run_dir.open_run(fake.path, config, "train") as run:
            loop.train(config, run)
        return metrics.read_metrics(fake.path)

    return call


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


def controlled(**rollout):
    """(config, fake): alpha is 1 where the schedule says k = 3 or more, else 0.3."""
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
