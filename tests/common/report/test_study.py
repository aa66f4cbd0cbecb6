"""The table of a study by hand: curves, means, paired differences, what was not measured."""

import json
import math
import subprocess
import sys

import pytest

from common.cli import command_line
from common.cli.commands import COMMANDS
from common.errors import UserError
from common.report import study

ARMS = ["dense", "fixed k=4", "scheduled"]
# Student's t, 97.5 %: 12.7062 with 1 degree of freedom, 4.3027 with 2.
REWARDS = {  # arm -> per seed (start, after step 2, after step 4)
    "dense": [(0.2, 0.3, 0.5), (0.1, 0.4, 0.6), (0.3, 0.5, 0.7)],
    "fixed k=4": [(0.2, 0.2, 0.3), (0.1, 0.2, 0.2), (0.3, 0.4, 0.4)],
    "scheduled": [(0.2, 0.4, 0.6), (0.1, 0.3, 0.5), (0.3, 0.6, 0.8)],
}


def write_run(folder, rewards, sparse):
    """Four steps, evaluated every two."""
    records = []
    for step in range(4):
        record = {
            "step": step, "bins": [], "alarms": ["p5"] if sparse and step else [],
            "rollout/share_of_pages": 0.25 if sparse else 1.0,
            "reward/mean": 0.1 * (step + 1),  # 0.1, 0.2, 0.3, 0.4
            "reward/groups_with_signal": 0.5,
            "mismatch/abs_diff": 0.02 * step,
            "throughput/rollout_tokens_per_second": [1.0, 100.0, 200.0, 300.0][step],
        }  # fmt: skip
        if sparse:
            record |= {"mismatch/p5_min": 0.8 if step else None, "mismatch/p1_min": 0.5}
            record |= {"mismatch/mean": 0.9}
        if step == 0:
            record["eval/start_reward"] = rewards[0]
        if step % 2 == 1:
            record["eval/reward"] = rewards[1 + step // 2]
        records.append(record)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def out(tmp_path):
    for arm, seeds in REWARDS.items():
        for seed, rewards in enumerate(seeds):
            write_run(tmp_path / f"seed{seed}" / study.folder(arm), rewards, arm != "dense")
    return tmp_path


def test_folders_of_arms_are_plain_names():
    assert [study.folder(arm) for arm in ARMS] == ["dense", "fixed-k4", "scheduled"]


def test_curve_starts_with_the_start_policy_and_counts_updates(out):
    assert study.curve(out / "seed1" / "dense") == [(0, 0.1), (2, 0.4), (4, 0.6)]
    assert study.curve(out / "nowhere") == []


def test_tail_of_a_run_leaves_out_steps_without_alpha(out):
    assert study.tail(out / "seed1" / "scheduled") == [(2, 0.8), (3, 0.8), (4, 0.8)]
    assert study.tail(out / "seed1" / "dense") == []


def test_table_by_hand(out):
    table = study.summarise(out, ARMS, 3)["arms"]
    assert table["dense"]["start"] == [0.2, 0.1, 0.3]
    assert table["dense"]["end"] == [0.5, 0.6, 0.7]
    assert table["dense"]["gain"] == pytest.approx([0.3, 0.5, 0.4])
    assert table["scheduled"]["share_of_pages"] == [0.25] * 3
    # last 4 steps: (0.1 + 0.2 + 0.3 + 0.4) / 4 = 0.25
    assert table["scheduled"]["train_reward"] == pytest.approx([0.25] * 3)
    # 0.8 in the three steps that have a value; the null of step 0 is left out
    assert table["scheduled"]["p5_min"] == pytest.approx([0.8] * 3)
    assert table["scheduled"]["steps_with_alarm"] == [0.75] * 3  # three of four steps
    assert table["dense"]["steps_with_alarm"] == [0.0] * 3
    # (0 + 0.02 + 0.04 + 0.06) / 4 = 0.03
    assert table["dense"]["abs_diff"] == pytest.approx([0.03] * 3)
    # the first step compiles and is left out: (100 + 200 + 300) / 3 = 200
    assert table["dense"]["rollout_tokens_per_second"] == pytest.approx([200.0] * 3)
    assert all(math.isnan(x) for x in table["dense"]["p5_min"] + table["dense"]["alpha_mean"])


def test_differences_are_paired_by_seed(out):
    found = study.summarise(out, ARMS, 3)["end_minus_dense"]
    assert list(found) == ["fixed k=4", "scheduled"]
    # fixed: 0.3 - 0.5, 0.2 - 0.6, 0.4 - 0.7 = -0.2, -0.4, -0.3: mean -0.3, s = 0.1,
    # half = 4.3027 * 0.1 / sqrt(3) = 0.24842
    assert found["fixed k=4"]["mean"] == pytest.approx(-0.3)
    assert found["fixed k=4"]["low"] == pytest.approx(-0.54842, abs=1e-4)
    assert found["fixed k=4"]["high"] == pytest.approx(-0.05158, abs=1e-4)
    # scheduled: +0.1, -0.1, +0.1: mean 1/30, s = 0.11547, half = 4.3027 * 0.11547 / 1.73205
    assert found["scheduled"]["mean"] == pytest.approx(1 / 30)
    assert found["scheduled"]["high"] - 1 / 30 == pytest.approx(0.28685, abs=1e-4)
    # two seeds: -0.2, -0.4: mean -0.3, s = 0.141421, half = 12.7062 * 0.141421 / sqrt(2) = 1.27062
    two = study.summarise(out, ARMS, 2)["end_minus_dense"]["fixed k=4"]
    assert two["low"] == pytest.approx(-1.57062, abs=1e-4)


class NoWork:
    """Stands for `_Lanes`: notes what would run."""

    def __init__(self, config_file, jobs, total):
        self.total = total
        NoWork.done = []

    def prepare(self, seed_dir, seed):
        self.done.append(("prepare", seed_dir.name, seed))

    def train(self, seed_dir, arm, schedule, seed):
        self.done.append((seed_dir.name, arm, schedule, seed))

    def stop(self):
        self.done.append("stop")


def test_files_are_written_from_the_runs(out, monkeypatch, capsys):
    monkeypatch.setattr(study, "_Lanes", NoWork)
    study.run_study("x.py", out, seeds=3, fixed="k=4", jobs=1)
    assert NoWork.done[:3] == [("prepare", f"seed{s}", s) for s in range(3)]
    assert sorted(NoWork.done[3:]) == sorted(
        (f"seed{s}", arm, schedule, s)
        for s in range(3)
        for arm, schedule in zip(ARMS, ("dense", "k=4", "{seed_dir}/schedule.json"), strict=True)
    )

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    result = json.loads((out / "study.json").read_text(), parse_constant=refuse)
    assert result["arms"]["dense"]["p5_min"] == [None] * 3
    assert result["end_minus_dense"]["fixed k=4"]["mean"] == pytest.approx(-0.3)
    assert "<svg" in (out / "study.svg").read_text()
    printed = capsys.readouterr().out
    assert "fixed k=4    end - dense: -0.300 [-0.548, -0.052]" in printed
    assert "end 0.600 [0.352, 0.848]" in printed  # dense: 0.5, 0.6, 0.7
    dense = next(line for line in printed.splitlines() if line.startswith("dense"))
    assert "nan" not in dense and "p5_min" not in dense


def test_one_seed_has_no_interval(out, monkeypatch, capsys):
    monkeypatch.setattr(study, "_Lanes", NoWork)
    study.run_study("x.py", out, seeds=1, fixed="k=4", jobs=1)
    found = json.loads((out / "study.json").read_text())["end_minus_dense"]["scheduled"]
    assert found["mean"] == pytest.approx(0.1) and found["low"] is found["high"] is None


@pytest.mark.parametrize("wrong", [{"seeds": 0, "jobs": 1}, {"seeds": 1, "jobs": 0}])
def test_counts_below_one_are_refused(tmp_path, wrong):
    with pytest.raises(UserError, match="expected at least 1"):
        study.run_study("x.py", tmp_path / "s", fixed="k=4", **wrong)
    assert not (tmp_path / "s").exists()


def test_a_command_that_fails_ends_the_study_and_names_its_log(tmp_path, monkeypatch):
    """The commands are replaced by a process that writes a line and exits with 2."""
    started = []

    class Failing(subprocess.Popen):
        def __init__(self, words, **options):
            started.append(words)
            super().__init__([sys.executable, "-c", "print('why'); raise SystemExit(2)"], **options)

    monkeypatch.setattr(study.subprocess, "Popen", Failing)
    with pytest.raises(UserError, match=r"warmup of seed 0 ended with 2; see .*warmup.log"):
        study.run_study("x.py", tmp_path, seeds=1, fixed="k=4", jobs=1)
    assert (tmp_path / "seed0" / "warmup.log").read_text() == "why\n"
    (words,) = started
    assert words[3] == "warmup" and f"--run={tmp_path}/seed0/warmup" in words
    assert {f"--config.{key}=0" for key in study.SEED_KEYS} <= set(words)
    assert not (tmp_path / "study.json").exists()


def test_a_seed_is_prepared_by_commands_that_parse(tmp_path, monkeypatch):
    """Long prompts leave the first bins without tokens: the schedule must be asked to go on."""
    calls = []
    monkeypatch.setattr(
        study._Lanes, "_run", lambda self, folder, seed, name, *flags: calls.append((name, flags))
    )
    study._Lanes("x.py", 1, 1).prepare(tmp_path / "seed0", 0)
    assert [name for name, _ in calls] == ["warmup", "profile", "schedule"]
    given = [
        command_line.parse_arguments(COMMANDS[name], list(flags)).flags for name, flags in calls
    ]
    assert given[2]["extrapolate"] is True and given[2]["profile"] == given[1]["out"]
