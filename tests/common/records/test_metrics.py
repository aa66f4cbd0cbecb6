"""The record of a run: exact resume, torn lines, non-finite values, TensorBoard, console."""

import json
import math
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.records import metrics
from common.records.metrics import MetricsWriter, comparable, read_metrics


def values(step):
    return {"reward/mean": 0.1 * step, "time/step": 1.5, "throughput/step_tokens_per_second": 7.0}


def bins(step):
    return [{"bin": 0, "start": 0, "end": 16, "count": 9, "p5": 0.9 - step / 100, "k": "dense"}]


def run(directory, start, stop):
    directory.mkdir(exist_ok=True)
    with MetricsWriter(directory, resume_step=start, console=False, total_steps=9) as writer:
        for step in range(start, stop):
            writer.write(step, values(step), bins=bins(step))
    return directory


def raw(directory):
    return (directory / "metrics.jsonl").read_bytes()


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(0, 10_000), resume=st.integers(0, 3))
def test_killed_anywhere_and_resumed_equals_uninterrupted(tmp_path_factory, cut, resume):
    whole = run(tmp_path_factory.mktemp("whole"), 0, 6)
    killed = run(tmp_path_factory.mktemp("killed"), 0, 5)
    lines = raw(killed).splitlines(keepends=True)
    # the records below the checkpoint are on disk; of what follows, any number of bytes
    first, rest = b"".join(lines[:resume]), b"".join(lines[resume:])
    (killed / "metrics.jsonl").write_bytes(first + rest[: cut % (len(rest) + 1)])
    run(killed, resume, 6)
    assert raw(killed) == raw(whole)


def test_kill_in_mid_write_of_a_real_process(tmp_path):
    code = (
        "import os, signal, sys\nfrom common.records.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1], resume_step=0, console=False, total_steps=9)\n"
        "for s in range(3): w.write(s, {'reward/mean': 0.1 * s, 'time/step': 1.5,"
        " 'throughput/step_tokens_per_second': 7.0}, bins=[{'bin': 0, 'start': 0, 'end': 16,"
        " 'count': 9, 'p5': 0.9 - s / 100, 'k': 'dense'}])\n"
        'os.write(w._file.fileno(), b\'{"step": 3, "rew\')\nos.kill(os.getpid(), signal.SIGKILL)\n'
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert result.returncode == -9
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2]
    run(tmp_path, 3, 6)
    assert raw(tmp_path) == raw(run(tmp_path / "whole", 0, 6))
    assert not (tmp_path / "metrics.jsonl.tmp").exists()


def test_record_is_on_disk_after_each_write(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=0, console=False, total_steps=2)
    record = writer.write(0, values(0))
    assert read_metrics(tmp_path) == [record]  # the writer is still open
    writer.close()
    writer.close()


def test_gap_below_the_resume_step_is_named(tmp_path):
    run(tmp_path, 0, 2)
    with pytest.warns(UserWarning, match=r"missing=\[2, 3\]"):
        MetricsWriter(tmp_path, resume_step=4, console=False, total_steps=9).close()


def test_fault_in_the_middle_is_refused_with_its_line(tmp_path):
    run(tmp_path, 0, 3)
    lines = raw(tmp_path).splitlines(keepends=True)
    lines[1] = b'{"step": 1, \n'
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: expected one JSON object"):
        read_metrics(tmp_path)
    before = raw(tmp_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        MetricsWriter(tmp_path, resume_step=1, console=False, total_steps=9)
    assert raw(tmp_path) == before  # nothing lost


@pytest.mark.parametrize("step", [0, 2])
def test_step_out_of_turn_is_refused(tmp_path, step):
    with MetricsWriter(tmp_path, resume_step=0, console=False, total_steps=9) as writer:
        writer.write(0, values(0))
        with pytest.raises(ValueError, match=f"step={step}: expected step 1"):
            writer.write(step, values(step))


def test_values_not_finite_become_null_and_an_alarm(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0, console=False, total_steps=1) as writer:
        writer.write(
            0,
            {
                "grpo/loss": np.float32("nan"),
                "mismatch/ratio_max": math.inf,
                "eval/reward": None,
                "rollout/tokens": np.int64(12),
                "throughput/rollout_tokens_per_second": math.nan,
            },
            bins=[{"bin": 0, "p5": math.nan, "enough": np.bool_(False)}],
            alarms=["length collapse"],
        )
    record = json.loads(raw(tmp_path), parse_constant=lambda name: pytest.fail(name))
    assert record["grpo/loss"] is None and record["mismatch/ratio_max"] is None
    assert record["rollout/tokens"] == 12
    assert record["bins"] == [{"bin": 0, "p5": None, "enough": False}]
    # the null throughput is a timing: alarms of equal runs must be equal
    assert record["alarms"] == [
        "length collapse",
        "3 value(s) not finite: grpo/loss, mismatch/ratio_max, bins[0].p5",
    ]


@pytest.mark.parametrize("key", ["reward", "Reward/mean", "reward/", "a/b/c", "reward/me an"])
def test_bad_metric_names_are_refused(key):
    with pytest.raises(ValueError, match="expected 'group/name'"):
        metrics.make_record(0, {key: 1.0})


def test_comparable_drops_timings_only():
    records = [metrics.make_record(0, values(0), bins=bins(0))]
    assert comparable(records) == [{"step": 0, "reward/mean": 0.0, "bins": bins(0), "alarms": []}]


def test_every_documented_metric_is_a_valid_name():
    record = metrics.make_record(0, dict.fromkeys(metrics.METRICS, 0.5))
    assert len(record) == len(metrics.METRICS) + 3  # step, bins, alarms


def event_files(directory):
    return sorted((directory / "tensorboard").iterdir(), key=lambda p: int(p.name.split(".")[-1]))


def read_events(path):
    """Events of one file, each checksum checked; the format is length, crc, data, crc."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked_crc32c(body)
        events.append(event_pb2.Event.FromString(body))
        data = data[16 + size :]
    return events


def test_tensorboard_holds_the_values_and_restarts_at_the_resume_step(tmp_path):
    run(tmp_path, 0, 2)
    run(tmp_path, 1, 3)
    first, second = (read_events(path) for path in event_files(tmp_path))
    assert first[0].file_version == "brain.Event:2"
    scalars = {v.tag: v.simple_value for v in first[2].summary.value}
    assert first[2].step == 1 and scalars["reward/mean"] == np.float32(0.1)
    assert scalars["bins/p5_from_0"] == np.float32(0.89)
    assert second[1].step == 1 and second[1].session_log.status == 1  # START: purge from step 1
    assert [e.step for e in second[2:]] == [1, 2]


def shown(directory):
    """Steps of reward/mean as TensorBoard shows them."""
    from tensorboard.backend.event_processing import event_accumulator

    board = event_accumulator.EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars("reward/mean")]


def test_tensorboard_shows_each_step_once_after_a_kill_in_the_first_steps(tmp_path):
    run(tmp_path, 0, 2)  # killed before any checkpoint: it starts at step 0 again
    run(tmp_path, 0, 3)
    assert shown(tmp_path) == [0, 1, 2]


def test_tensorboard_keeps_the_order_when_the_clock_goes_back(tmp_path, monkeypatch):
    run(tmp_path, 0, 3)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    run(tmp_path, 2, 5)
    assert shown(tmp_path) == [0, 1, 2, 3, 4]


def test_tensorboard_sorts_after_files_named_by_the_clock(tmp_path):
    run(tmp_path, 0, 3)
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.1764547200.17.0"))
    run(tmp_path, 1, 4)
    assert shown(tmp_path) == [0, 1, 2, 3]


def test_tensorboard_loads_no_framework_and_metrics_imports_lazily(tmp_path):
    code = (
        "import sys\nimport common.records.metrics as m\n"
        "early = {'rich', 'tensorboard'} & set(sys.modules)\n"
        "w = m.MetricsWriter(sys.argv[1], resume_step=0, console=True, total_steps=1)\n"
        "w.write(0, {'reward/mean': 1.0}); w.close()\n"
        "late = {'torch', 'tensorflow', 'jax'} & set(sys.modules)\n"
        "assert not early and not late, (early, late)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1  # one plain line a step when not on a terminal


def test_missing_tensorboard_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with MetricsWriter(tmp_path, resume_step=0, console=True, total_steps=1) as writer:
        writer.write(0, values(0))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "pip install tensorboard" in lines[0]
    assert not (tmp_path / "tensorboard").exists()


def test_console_line_reads_well():
    record = metrics.make_record(
        3,
        {
            "reward/mean": 0.53219,
            "response/len_mean": 311.6,
            "mismatch/p5_min": 0.8412,
            "throughput/step_tokens_per_second": 1234.5,
        },
        alarms=["p5 below tau"],
    )
    line = metrics.console_line(record, total_steps=20, tau=0.86, eta_seconds=75.2)
    assert line == (
        "step  4/20  reward 0.532  length 312  p5 min 0.841 < tau 0.86  "
        "1,234 tokens/s  ETA 1m15s  ALARM p5 below tau"
    )
    bare = metrics.console_line(
        metrics.make_record(0, {}), total_steps=5, tau=None, eta_seconds=0.25
    )
    assert bare == "step 1/5  reward -  length -  p5 min -  - tokens/s  ETA 0.2s"
