"""The command line as a user meets it: help, one line and status 2, Ctrl-C, bugs."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from common.cli import command_line
from common.cli.commands import COMMANDS
from common.config import Config, overrides
from common.errors import UserError, is_disk_full
from common.records import run_dir
from common.schedule import schedule

FLAT = schedule.Schedule(page_size=16, bin_tokens=8, budgets=(4,))
RECIPE = "from common.config import Config\ndef get_config():\n    return Config()\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An own working directory with the recipe r.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(RECIPE)
    return tmp_path


def fails(capsys, line, status=2):
    """Run `sparrow LINE` in this process; its one line on stderr."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert command_line.main(shlex.split(line)) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparrow: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("trian", "did you mean `sparrow train`?"),
        ("zzz", "expected one of warmup, train"),
        ("--config=r.py train", "expected the command before the flags"),
        ("train --config=r.py", "--run is missing"),
        ("train --run=x", "--config is missing"),
        ("train --run=x --config=q.py", "--config=q.py: no such file"),
        ("train --run=x --rnu=y --config=r.py", "Did you mean: run"),
        ("train --run", "Missing value for flag --run"),
        ("train extra --run=x --config=r.py", "extra: not a flag"),
        ("train --run=x --config=r.py --config.num_stps=1", "did you mean --config.num_steps?"),
        ("train --run=x --config=r.py --config.num_steps=a", "expected a whole number"),
        ("train --run=x --config=r.py --model=nowhere", "--model=nowhere: no config.json"),
        ("train --run=r.py --config=r.py", "--run=r.py: is a file"),
        ("train --run=. --config=r.py", "holds no run of sparrow"),
        ("train --run=x --config=r.py --config.rollout.engine=vllm", "not built in yet"),
        ("train --run=x --core=a --config=r.py", "flag --core=a"),
        ("profile --config=r.py --out=.", "--out=.: is a directory"),
        ("profile --config=r.py --out=r.py/x.json", "cannot be written"),
        ("schedule", "either --profile=FILE or --preset=NAME"),
        ("schedule --profile=p.json", "--profile=p.json: no such file"),
        ("schedule --profile=bad.json", "bad.json"),
        ("eval --config=r.py", "either --run=RUN or"),
        ("eval --run=x", "x: no run of sparrow"),
        ("eval --run=x --samples=0", "--samples=0: expected at least 1"),
        ("report", "expected RUN..."),
        ("report r.py", "r.py: no run of sparrow"),
        ("train --run=x --config=" + "y" * 300, "yyy...: the file name has 300 characters"),
        ("profile --config=r.py --out=" + "y" * 300, "characters, too many for this file system"),
        ("profile --config=r.py --out=p.json --topk=" + "9" * 5000, "expected whole numbers"),
        ("bench encode", "expected decode or profile"),
    ],
)
def test_a_mistake_ends_in_one_line_and_status_2(folder, capsys, line, part):
    (folder / "bad.json").write_text('{"format": "sparrow-profile-1", "rows"')
    before = sorted(os.listdir(folder))
    assert part in fails(capsys, line)
    assert sorted(os.listdir(folder)) == before


def test_eval_of_an_unfinished_run_says_so(folder, capsys):
    run_dir.open_run("a", Config(), "train").close()
    assert "--run=a: has no finished model yet" in fails(capsys, "eval --run=a")


def test_the_process_itself_exits_with_2_and_no_traceback(sparrow, tmp_path):
    result = sparrow("train", "--config=nowhere.py", f"--run={tmp_path / 'x'}")
    assert result.returncode == 2
    assert result.stderr.startswith("sparrow: --config=nowhere.py: no such file")
    assert result.stderr.count("\n") == 1
    result = sparrow("train", "--config=nowhere.py", f"--run={tmp_path / 'x'}", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_help_names_every_command_and_loads_no_heavy_library(tmp_path):
    program = (
        "import sys; from common.cli import command_line\n"
        "for words in (['help'], ['train', '--help']): command_line.main(words)\n"
        "command_line.main(['help', 'config'])\n"
        "print(sorted({'jax', 'torch', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, command in COMMANDS.items():
        assert name in result.stdout and command.summary in result.stdout
    assert "--config.rollout.temperature=1.0" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
def test_help_of_a_command_shows_flags_and_an_example_that_parses(command):
    text = command_line.help_text(command)
    for flag in command.flags:
        assert f"--{flag.name} " in text
    words = shlex.split(command.example)
    assert words[:2] == ["sparrow", command.name]
    arguments = command_line.parse_arguments(command, words[2:])
    assert arguments.config_file in (None, "configs/demo.py")
    assert max(map(len, text.splitlines())) <= 110


STAND_IN = """
import signal, sys, time, types
loop = types.ModuleType("common.loop")
def train(config, run):
    print("started", flush=True)
    {body}
loop.train = train
sys.modules["common.loop"] = loop
from common.cli import command_line
from common.records import stopping
sys.exit(command_line.main(sys.argv[1:]))
"""


def start(body, folder, *more):
    program = STAND_IN.format(body=body)
    command = [sys.executable, "-c", program, "train", "--config=r.py", "--run=x", *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as a shell starts background jobs
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_cleanly(folder, number):
    body = "[(time.sleep(0.05), stopping.check()) for _ in range(1200)]"
    process = start(body, folder)
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "sparrow: stopped; the same command resumes\n"
    assert time.monotonic() - began < 20


def test_a_bug_keeps_its_traceback_and_status_1(folder):
    process = start("int('three')", folder)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" in err and "invalid literal for int()" in err


def test_core_binds_the_process_to_one_core(folder):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("needs Linux")
    process = start(
        "import os; print(os.sched_getaffinity(0), file=sys.stderr)", folder, "--core=1"
    )
    _, err = process.communicate(timeout=30)
    cores = sorted(os.sched_getaffinity(0))
    assert err == f"{ {cores[1 % len(cores)]} }\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("UserError", 2, "sparrow: a=1: expected 2\n"),
        ("ValueError", 1, "ValueError: a=1: expected 2\n"),
    ],
)
def test_a_user_error_is_one_line_and_a_value_error_of_ours_a_traceback(
    folder, error, status, said
):
    body = f"from common.errors import UserError; raise {error}('a=1: expected 2')"
    process = start(body, folder)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err.endswith(said) and ("Traceback" in err) == (status == 1)


def test_what_a_user_names_is_checked_as_input_and_what_our_code_passes_is_not():
    with pytest.raises(UserError):
        schedule.resolve("k=x", page_size=16, bin_tokens=8)
    with pytest.raises(UserError):
        schedule.resolve("k=9999999", page_size=16, bin_tokens=8)
    with pytest.raises(UserError):
        overrides.from_dict({"num_steps": "x"})
    for make in (
        lambda: schedule.Schedule(page_size=16, bin_tokens=8, budgets=()),
        lambda: schedule.Schedule(page_size=0, bin_tokens=8, budgets=(4,)),
        lambda: FLAT.budget(-1),
        lambda: FLAT.budgets_at(np.array([0.5])),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert not isinstance(caught.value, UserError)


def test_a_full_disk_is_one_line_and_status_1(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    assert command_line.main(["schedule", "--preset=qwen3-4b-0.86", "--out=s.json"]) == 1
    for number, handler in handlers.items():
        signal.signal(number, handler)
    said = capsys.readouterr().err
    assert said == "sparrow: no space left on device; free some; then run the command again\n"
    assert os.listdir(folder) == ["r.py"]


def test_what_a_library_says_about_a_full_disk_counts():
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    inner = ExceptionGroup("many", [KeyError(1), OSError(errno.ENOSPC, "x")])
    assert is_disk_full(inner)
    try:
        raise ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device")
    except ValueError as error:
        assert is_disk_full(error)
    assert not is_disk_full(ValueError("RESOURCE_EXHAUSTED: out of memory"))
