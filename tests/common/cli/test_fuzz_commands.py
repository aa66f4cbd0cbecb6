"""Commands that are run, in this process, with odd numbers, names and files; seeded.

What they need of jax they do not reach: every mistake here is seen before.
"""

import json
import random
import re

import pytest

from common.cli import command_line
from common.records.run_dir import atomic_write_text
from tests.common.records.test_damaged_runs import changed, make_run

NUMBERS = (
    "0", "-1", "1", "3", "1e9", "999999999999", "9" * 30, "9" * 5000, "nan", "inf", "-inf", "1e308",
    "1e-308", "0.5", "", " 7", "1_0", "\u0663", "0x10", "true",
)  # fmt: skip
SCHEDULES = ("qwen3-1.7b-0.86", "k=8", "k=0", "k=9999999", "k=-1", "dense", "k=", "x", "", "{x}")
SIZES = (*NUMBERS, "16,32", "16,,32", "65536", "65537", ",", "16," + "9" * 5000, "\u00b2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    make_run(folder / "run")
    (folder / "lengths.json").write_text('{"edges": [0, 64, 512], "counts": [30, 8]}')
    (folder / "bench.json").write_text('{"dense_paged_ms": 1}')
    (folder / "empty").write_text("")
    return folder


def run(argv, capsys):
    """Exit status; 2 with one line on stderr, 0 with something on stdout."""
    status = command_line.main(argv)
    out, err = capsys.readouterr()
    assert status in (0, 2), argv
    if status == 2:
        assert err.startswith("sparrow: ") and err.count("\n") == 1 and len(err) < 1500, argv
    for word in out.split():
        assert word.strip("x,()") not in ("nan", "inf", "-inf"), (argv, out)
    return status


def mostly(rng, sound, odd):
    """One of the sound ones in three of four cases."""
    return rng.choice(sound if rng.random() < 0.75 else odd)


def cost(rng, folder):
    model = mostly(rng, ("qwen3-1.7b", "qwen3-4b"), ("x", str(folder), ""))
    lengths = mostly(rng, ("64", str(folder / "lengths.json")), (str(folder), *NUMBERS))
    named = mostly(rng, ("qwen3-1.7b-0.86", "k=8"), SCHEDULES)
    yield from (f"--model={model}", f"--schedule={named}", f"--lengths={lengths}")
    flags = ("prompt", "samples", "chips", "memory_share", "batch", "num_dense_layers", "kv_bytes",
             "weight_bytes", "train_share")  # fmt: skip
    for name in rng.sample(flags, rng.choice((0, 1, 1))):
        yield f"--{name}={rng.choice(NUMBERS)}"
    if rng.random() < 0.3:
        yield f"--page_sizes={rng.choice(SIZES)}"
    if rng.random() < 0.2:
        yield f"--chip={rng.choice(('v5e', 'x', '', 'h200'))}"


def schedule(rng, folder):
    source = rng.choice(("preset", "compare", "profile"))
    names = (*SCHEDULES, "qwen3-1.7b-0.86,qwen3-8b-0.86", str(folder / "empty"), str(folder))
    yield f"--{source}={mostly(rng, ('qwen3-1.7b-0.86',), names)}"
    flags = ("tau", "quantile", "rule", "monotone", "extrapolate")
    for name in rng.sample(flags, rng.choice((0, 1))):
        yield f"--{name}={rng.choice(NUMBERS)}"
    if rng.random() < 0.3:
        yield f"--out={folder / rng.choice(('o.json', 'run', 'empty/x', 'n/o.txt'))}"


def report(rng, folder):
    """None of them draws: figures take their time."""
    yield str(folder / rng.choice(("run", "nothing", "empty", "")))
    yield f"--bench={folder / rng.choice(('bench.json', 'empty', 'run', 'x'))}"
    yield f"--out={folder / rng.choice(('run', 'empty/x'))}"


def evaluate(rng, folder):
    yield rng.choice((f"--run={folder / 'run'}", f"--model={folder}", "--run=", "--run=x"))
    for name in rng.sample(("samples", "greedy", "config.rollout.tau"), rng.choice((0, 1, 2))):
        yield f"--{name}={rng.choice(NUMBERS)}"


def others(rng, folder):
    yield rng.choice((f"--run={folder / 'run'}", f"--out={folder / 'out'}", f"--model={folder}"))
    flags = ("seeds", "jobs", "fixed", "topk", "bin_tokens", "max_tokens", "estimate", "context",
             "num_tokens", "core")  # fmt: skip
    for name in rng.sample(flags, rng.choice((1, 2))):
        yield f"--{name}={rng.choice((*NUMBERS, *SCHEDULES))}"


def campaign(rng, folder, capsys, count):
    """Statuses of `count` commands."""
    kinds = {"cost": cost, "schedule": schedule, "report": report, "eval": evaluate}
    words = ("profile", "bench", "compare", "trace")
    for _ in range(count):
        name = rng.choice(("cost", "cost", "schedule", "report", "eval", *words))
        yield run([name, *kinds.get(name, others)(rng, folder)], capsys)


def test_odd_commands_end_in_one_line_or_do_their_work(folder, capsys):
    found = list(campaign(random.Random(5), folder, capsys, 300))
    assert 12 < found.count(0) < 200


def test_a_report_on_changed_numbers_of_a_bench(folder, capsys):
    from common.report.report import _BENCH_NUMBERS, _BENCH_PATHS, bench_table

    whole = {f"{p}_{unit}": 1.5 for p in _BENCH_PATHS for unit in ("ms", "gb_per_s")}
    whole |= dict.fromkeys(_BENCH_NUMBERS, 2.0)
    rng = random.Random(6)
    (folder / "bench.json").write_text(json.dumps(whole))
    assert "Decode at length" in bench_table(folder / "bench.json")
    for _ in range(100):
        (folder / "bench.json").write_text(changed(json.dumps(whole), rng))
        try:
            text = bench_table(folder / "bench.json")
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert "nan" not in text and "inf" not in text


@pytest.mark.parametrize("line, words", [
    ("eval --run={run} --samples=0", "has no finished model|--samples=0: expected"),
    ("study --config={recipe} --out={out} --seeds=0", "seeds=0, jobs=2: expected at least 1"),
    ("study --config={recipe} --out={out} --jobs=99999999999",
     "--jobs=99999999999: expected at most"),
    ("study --config={recipe} --out={out} --fixed={{x}}", "schedule='{x}'"),
    ("cost --model=qwen3-4b --schedule=k=8 --lengths=" + "9" * 5000, "--lengths=.*expected an int"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_refused_before_the_work(folder, capsys, line, words):
    (folder / "recipe.py").write_text(
        "from common.config import Config\n\n\ndef get_config():\n    return Config()\n"
    )
    names = {"run": folder / "run", "recipe": folder / "recipe.py", "out": folder / "study"}
    assert command_line.main(line.format(**names).split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error), error
    assert not (folder / "study").exists()


def test_a_folder_whose_name_is_no_utf8_can_be_written_to(folder, capsys):
    """The byte 0xff, which no UTF-8 has, is the surrogate \\udcff in Python."""
    out = folder / "run\udcff" / "cost.json"
    flags = ("--model=qwen3-4b", "--schedule=k=8", "--lengths=64", f"--out={out}")
    assert run(["cost", *flags], capsys) == 0
    assert json.loads(out.read_text())["model"] == "qwen3-4b"
    atomic_write_text(out, f"<p>{out.parent.name}</p>")
    assert out.read_text() == "<p>run\\udcff</p>"
