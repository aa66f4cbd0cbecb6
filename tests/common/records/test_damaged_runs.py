"""A report on damaged files: one line, or the damaged lines left out with a count; no traceback."""

import json
import random

import pytest

from common.config import Config, RolloutConfig
from common.errors import UserError
from common.records.metrics import MetricsWriter, read_metrics, read_sound
from common.records.run_dir import open_run
from common.report.report import load_runs, write_report
from common.schedule.schedule import Schedule

FILES = ("run.json", "config.json", "metrics.jsonl", "schedule.json")
ODD = (
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [[]],
    {},
    {"a": 1},
)


def bins(step):
    return [
        {"bin": b, "start": 64 * b, "end": 64 * b + 64, "count": 99, "k": 4, "mean": 0.98,
         "p5": 0.9 - b / 50, "p1": 0.8, "k3": 1e-3, "ess": 0.9, "enough": True}
        for b in range(3)
    ]  # fmt: skip


def make_run(path):
    config = Config(num_steps=4, rollout=RolloutConfig(schedule="k=4"))
    with open_run(path, config, "train") as run:
        run.keep_files([])
    kept = Schedule(page_size=16, bin_tokens=64, budgets=(4, 6), name="s")
    kept.save(path / "schedule.json")
    with MetricsWriter(path, resume_step=0, console=False, total_steps=4) as writer:
        for step in range(4):
            numbers = {"reward/mean": 0.5, "mismatch/p5_min": 0.86, "time/step": 2.0}
            numbers |= {"throughput/rollout_tokens_per_second": 100.0, "time/rollout": 1.0}
            numbers |= {"eval/reward": 0.4, "eval/reward_low": 0.3, "eval/reward_high": 0.5}
            writer.write(step, numbers, bins=bins(step), alarms=["p5 below tau"])
    return path


def places(value, path=()):
    """Every place in a JSON value, as a path of keys."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(text, rng):
    """A JSON text with one value of another type, or under another key."""
    value = json.loads(text)
    *path, last = rng.choice([p for p in places(value) if p])
    inside = value
    for key in path:
        inside = inside[key]
    if isinstance(inside, dict) and rng.random() < 0.3:
        inside["wrong" + str(last)] = inside.pop(last)
    else:
        inside[last] = rng.choice(ODD)
    return json.dumps(value)


def damaged(data, name, rng):
    """`data` with one seeded damage."""
    kind = rng.choice(("flip", "cut", "change", "change", "change", "nest", "random", "empty"))
    at = rng.randrange(len(data))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "nest":
        return b"[" * 100_000 + b"\n"
    if kind == "random":
        return data[:at] + rng.randbytes(40) + data[at:]
    if kind == "empty":
        return rng.choice((b"", b"null\n", b"[]\n", b"7\n", b'"text"\n', b"9" * 5000 + b"\n"))
    if name != "metrics.jsonl":
        return changed(data.decode(), rng).encode()
    lines = data.decode().splitlines()
    number = rng.randrange(len(lines))
    lines[number] = changed(lines[number], rng)
    return ("\n".join(lines) + "\n").encode()


def attempt(function, *arguments):
    """None, or the one line of a refusal; anything else is a fault."""
    try:
        function(*arguments)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "a")


@pytest.mark.parametrize("name", FILES)
def test_damage_ends_in_one_line_or_is_left_out(run, tmp_path, name):
    sound, rng = (run / name).read_bytes(), random.Random(name)
    try:
        for number in range(50):
            (run / name).write_bytes(damaged(sound, name, rng))
            attempt(load_runs, [run])
            if number == 7 and name == "metrics.jsonl":  # figures take their time
                attempt(write_report, [run], tmp_path / "r.html")
            attempt(lambda: open_run(run, Config(), "train").close())
            attempt(read_metrics, run)
    finally:
        (run / name).write_bytes(sound)
    assert attempt(write_report, [run], tmp_path / "r.html") is None


def test_damaged_lines_are_left_out_and_counted(run, tmp_path, capsys):
    sound = (run / "metrics.jsonl").read_bytes()
    lines = sound.splitlines(keepends=True)
    odd = [
        b"{\n",  # no JSON
        lines[1].replace(b'"reward/mean": 0.5', b'"reward/mean": "0.5"'),  # another type
        lines[1].replace(b'"reward/mean": 0.5', b'"reward/mean": NaN'),
        lines[1].replace(b'"start": 64', b'"start": 65'),  # bin 1 of width 63 begins at 63
        lines[1].replace(b'"step": 1', b'"step": true'),
        lines[0],  # step 0 again
    ]
    try:
        (run / "metrics.jsonl").write_bytes(b"".join([lines[0], *odd, *lines[1:]]))
        records, count = read_sound(run)
        assert ([r["step"] for r in records], count) == ([0, 1, 2, 3], 6)
        write_report([run], tmp_path / "r.html")
        assert "6 damaged line(s) of metrics.jsonl are left out" in capsys.readouterr().out
        assert "6 damaged line(s) are left out." in (tmp_path / "r.html").read_text()
    finally:
        (run / "metrics.jsonl").write_bytes(sound)
