"""From nothing to a report by the command line; kill it anywhere, and the record ends up the same.

The policy is tiny but not random: after its warm-up some answers are right, so there are updates.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from common.cli import command_line
from common.records import metrics, run_dir
from common.records.metrics import MetricsWriter
from sparrow_jax import checkpoint, hf
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.engine import Engine
from sparrow_jax.learner import Learner
from sparrow_jax.scorer import Scorer
from tests.conftest import ROOT

RECIPE = '''
"""Chains of 3 or 4 facts; sequences of at most 64 tokens in pages of 4."""
import os, time
from common.config import *
from common.tasks import registry

score = registry.score
def slow_score(*arguments):
    time.sleep(float(os.environ.get("GRADING_SECONDS", "0")))
    return score(*arguments)
registry.score = slow_score

def get_config():
    return Config(
        num_steps=4,
        eval_every=2,
        model=ModelConfig(num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                          num_kv_heads=1, head_dim=16, qk_gain=1.5, vocab_size=1),
        task=TaskConfig(args={"num_symbols": 4, "min_entries": 3, "max_entries": 4,
                              "header_tokens": 4, "partial_credit": True}, num_eval_prompts=8),
        rollout=RolloutConfig(page_size=4, num_dense_layers=1, prompts_per_step=2,
                              samples_per_prompt=8, max_prompt_tokens=32, max_response_tokens=32,
                              num_slots=16, prefill_chunk=32),
        learner=LearnerConfig(learning_rate=1e-3, tokens_per_microbatch=512, length_buckets=(64,),
                              remat=False),
        mismatch=MismatchConfig(bin_tokens=16, num_rows=4, min_tokens=20, budgets=(0, 2), tau=0.3,
                                profile_prompts=2, profile_samples=8),
        warmup=WarmupConfig(stages=((100, 16, 3, 4, 0.99),), noise_steps=30, noise_batch=16),
    )
'''
TRAIN = "train --config=tiny.py --model=start/model --config.rollout.schedule=schedule.json"


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.fixture(scope="module", autouse=True)
def quick_children(quick_compilation):
    """Quick compilation here and in child processes."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    yield
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]


def sparrow(line, status=0):
    """Run a command in this process, as the console script would."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert command_line.main(shlex.split(line)) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with recipe, warm start, profile, schedule and the uninterrupted run `whole`."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "tiny.py").write_text(RECIPE)
    with contextlib.chdir(folder):
        sparrow("warmup --config=tiny.py --run=start")
        sparrow("profile --config=tiny.py --model=start/model --out=profile.json")
        sparrow(
            "schedule --config=tiny.py --profile=profile.json --extrapolate --out=schedule.json"
        )
        sparrow(f"{TRAIN} --run=whole")
    return folder


@pytest.fixture
def at_home(home, monkeypatch):
    """The current directory is `home`."""
    monkeypatch.chdir(home)
    return home


def test_a_stopped_profile_goes_on_and_is_the_same(at_home, monkeypatch, capsys):
    """Budgets dense, 0 and 2; Ctrl-C while the last one is sampled, then while it is replayed."""
    sampled, generate, replay = [], Engine.generate, Scorer.replay

    def stop_at(method, budgets):
        def call(self, *args, **kwargs):
            schedule = kwargs["schedule"] if method is generate else args[2]
            if schedule is not None and schedule.budgets == budgets:
                raise KeyboardInterrupt
            if method is generate:
                sampled.append(schedule and schedule.budgets)
            return method(self, *args, **kwargs)

        return call

    def start(status, generate_stops=None, replay_stops=None):
        sampled.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "generate", stop_at(generate, generate_stops))
            patch.setattr(Scorer, "replay", stop_at(replay, replay_stops))
            sparrow("profile --config=tiny.py --model=start/model --out=again.json", status=status)
        return list(sampled)

    assert start(130, generate_stops=(2,)) == [None, (0,)]
    assert "the same command resumes" in capsys.readouterr().err
    assert not (at_home / "again.json").exists() and (at_home / "again.json.parts").exists()
    assert start(130, replay_stops=(2,)) == [(2,)], "only what was missing"
    assert start(0) == [], "samples are kept before their replay"
    for name in ("again.json", "again.html"):
        original = name.replace("again", "profile")
        assert (at_home / name).read_bytes() == (at_home / original).read_bytes()
    assert not (at_home / "again.json.parts").exists()
    halves = json.loads((at_home / "again.json").read_text())["halves"]
    assert [bool(half["rows"]) for half in halves] == [True, True]  # two prompts


def same_as_whole(home, run):
    """Record (timings aside) and model are those of the uninterrupted run, bit by bit."""
    want, got = (metrics.comparable(metrics.read_metrics(home / r)) for r in ("whole", run))
    assert [r["step"] for r in got] == [0, 1, 2, 3]
    assert got == want
    a, b = (load_file(home / r / "model" / "model.safetensors") for r in ("whole", run))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_the_run_trained_something(at_home):
    records = metrics.read_metrics("whole")
    assert [r["step"] for r in records] == [r["weights/version"] for r in records] == [0, 1, 2, 3]
    assert sum(r["grpo/grad_norm"] > 0 for r in records) >= 2
    for r in records:
        assert r["grpo/ratio_first_minibatch"] == pytest.approx(1, abs=1e-4)
        assert r["mismatch/replay_error"] < 1e-4
        assert r["rollout/share_of_pages"] < 1 and r["mismatch/mean"] < 1
    assert [("eval/reward" in r, "eval/start_reward" in r) for r in records] == [
        (False, True), (True, False), (False, False), (True, False),
    ]  # fmt: skip
    before, after = (load_file(f"{r}/model/model.safetensors") for r in ("start", "whole"))
    assert all(not np.array_equal(before[k], after[k]) for k in before)
    assert sorted(os.listdir("whole/checkpoints")) == ["step_00000003", "step_00000004"]


def test_report_and_evaluation_of_the_run(at_home, capsys):
    sparrow("report whole")
    page = (at_home / "whole" / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    sparrow("eval --run=whole")
    dense, scheduled = capsys.readouterr().out.splitlines()[-2:]
    last = metrics.read_metrics("whole")[-1]
    assert dense.startswith(f"dense     T = 1: avg@1 {last['eval/reward']:.3f} ")
    assert scheduled.startswith("scheduled T = 1: avg@1 0.")


def test_a_finished_command_repeated_changes_nothing(at_home, capsys):
    before = (at_home / "whole" / "metrics.jsonl").read_bytes()
    sparrow(f"{TRAIN} --run=whole")
    assert "; is finished\n" in capsys.readouterr().out
    sparrow("warmup --config=tiny.py --run=start")
    assert (at_home / "whole" / "metrics.jsonl").read_bytes() == before
    same_as_whole(at_home, "whole")


MOMENTS = {
    "while scoring step 2": (Scorer, "logprobs", 3),
    "between two optimizer steps": (Learner, "_step", 2),
    "before the first checkpoint": (Checkpoints, "save", 1),
    "record written, checkpoint not begun": (Checkpoints, "save", 2),
    "arrays of a checkpoint written, manifest not": (checkpoint, "_write_manifest", 2),
    "in the evaluation after step 1": (Engine, "generate", 4),
    "evaluated, record not written": (MetricsWriter, "write", 4),
    "last checkpoint written, model not": (hf, "save", 1),
}


def stop_at(patch, owner, name, number):
    """The number-th call of owner.name from now raises Killed."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise Killed
        return original(*args, **kwargs)

    patch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_and_resumed_equals_uninterrupted(at_home, moment):
    run = moment.replace(" ", "-")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_at(patch, *MOMENTS[moment])
        sparrow(f"{TRAIN} --run={run}")
    assert not (at_home / run / "model").exists()
    with open(f"{run}/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rew')  # cut off while writing
    sparrow(f"{TRAIN} --run={run}")
    same_as_whole(at_home, run)


def test_checkpoints_further_apart_lead_to_the_same_record(at_home):
    run = "apart"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_at(patch, Scorer, "logprobs", 4)  # step 3; the only checkpoint is that of step 2
        sparrow(f"{TRAIN} --run={run} --config.checkpoint_every=2")
    assert len(metrics.read_metrics(run)) == 3
    sparrow(f"{TRAIN} --run={run} --config.checkpoint_every=3")
    same_as_whole(at_home, run)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(at_home, capsys):
    run = "damaged"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_at(patch, Scorer, "logprobs", 4)
        sparrow(f"{TRAIN} --run={run}")
    folder = at_home / run / "checkpoints" / "step_00000003"
    victim = max(folder.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    capsys.readouterr()
    sparrow(f"{TRAIN} --run={run}")
    out, err = capsys.readouterr()
    assert f"{folder} is damaged: " in err and "goes on at step 2" in out
    same_as_whole(at_home, run)


def start(run):
    """The command in a process in which every step takes a second."""
    words = [sys.executable, "-m", "common.cli", *shlex.split(TRAIN), f"--run={run}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADING_SECONDS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_records(run, count, process):
    limit = time.monotonic() + 120
    while len(metrics.read_metrics(run)) < count:
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.02)


def test_ctrl_c_then_kill_9_of_the_process_then_the_end(at_home):
    run = "signals"
    process = start(run)
    wait_for_records(run, 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-1] == "sparrow: stopped; the same command resumes"
    process = start(run)
    wait_for_records(run, 2, process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (at_home / run / "model").exists()
    sparrow(f"{TRAIN} --run={run}")
    same_as_whole(at_home, run)
    assert len(run_dir._read_json(at_home / run / "run.json")["starts"]) == 3


def test_a_run_of_another_config_is_refused_and_stays_as_it_is(at_home, capsys):
    files = [p for p in (at_home / "whole").rglob("*") if p.is_file() and p.name != "run.lock"]
    before = {p: p.read_bytes() for p in files}
    sparrow(f"{TRAIN} --run=whole --config.rollout.temperature=0.5", status=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "it differs in rollout.temperature" in err
    assert before == {p: p.read_bytes() for p in files}
    shutil.copy("schedule.json", "kept.json")
    found = json.loads(Path("schedule.json").read_text())
    found["bins"][-1]["k"] = 5
    Path("schedule.json").write_text(json.dumps(found))
    try:
        sparrow(f"{TRAIN} --run=whole --config.num_steps=5", status=2)
    finally:
        shutil.move("kept.json", "schedule.json")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no longer the schedule" in err
    changed = [p for p in before if before[p] != p.read_bytes()]
    assert {p.name for p in changed} <= {"config.json", "run.json"}
    same_as_whole(at_home, "whole")
