"""Run directories: what is refused, what may change, what a kill -9 leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from common.config import Config, LearnerConfig, ModelConfig, RolloutConfig, TaskConfig, overrides
from common.errors import UserError
from common.records import run_dir


def refused(path, config=None, command="train"):
    with pytest.raises(UserError) as caught:
        run_dir.open_run(path, config or Config(), command)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def give_result(path):
    (path / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_new_run_records_config_machine_and_versions(tmp_path):
    path = tmp_path / "a" / "b"
    config = Config(num_steps=3, task=TaskConfig(args={"n": 1}))
    with run_dir.open_run(path, config, "train") as run:
        assert (run.path, run.config, run.command) == (path, config, "train")
    assert run_dir.read_config(path) == config
    record = json.loads((path / "run.json").read_text())
    assert record["command"] == "train"
    assert record["machine"]["cpus"] == os.cpu_count()
    assert record["versions"]["numpy"].count(".") == 2
    assert record["starts"] == [record["started"]]
    assert os.uname().nodename not in json.dumps(record["machine"])
    assert sorted(os.listdir(path)) == ["config.json", "run.json", "run.lock"]


def test_the_same_command_goes_on_and_may_be_longer(tmp_path):
    run_dir.open_run(tmp_path, Config(num_steps=3), "train").close()
    give_result(tmp_path)
    longer = Config(num_steps=9, eval_every=2, checkpoint_every=3, keep_checkpoints=4, name="n")
    run_dir.open_run(tmp_path, longer, "train").close()
    assert run_dir.read_config(tmp_path) == longer
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 2


def test_a_run_may_move_to_another_mesh_and_change_nothing_else_of_the_learner(tmp_path):
    run_dir.open_run(tmp_path, Config(learner=LearnerConfig(mesh=(1, 8, 1))), "train").close()
    give_result(tmp_path)
    moved = Config(learner=LearnerConfig(mesh=(2, 2, 2)))
    run_dir.open_run(tmp_path, moved, "train").close()
    assert run_dir.read_config(tmp_path) == moved
    changes = {"dtype": "float32", "tokens_per_microbatch": 512, "remat": False, "beta2": 0.9}
    for name, value in changes.items():
        other = Config(learner=LearnerConfig(mesh=(1, 1, 1), **{name: value}))
        assert f"differs in learner.{name}:" in refused(tmp_path, other)
    assert run_dir.read_config(tmp_path) == moved


def test_another_config_is_refused_with_the_keys_that_differ_and_nothing_is_lost(tmp_path):
    run_dir.open_run(tmp_path, Config(), "train").close()
    give_result(tmp_path)
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "run.json").read_bytes()
    other = Config(
        num_steps=7, rollout=RolloutConfig(temperature=0.5), task=TaskConfig(args={"n": 1})
    )
    message = refused(tmp_path, other)
    assert "differs in rollout.temperature, task.args.n:" in message
    assert "num_steps" not in message
    assert "sparrow train" in refused(tmp_path, command="warmup")
    assert before == ((tmp_path / "config.json").read_bytes(), (tmp_path / "run.json").read_bytes())
    run_dir.open_run(tmp_path, Config(), "train").close()  # the refusal left no lock behind


def test_a_run_without_results_may_be_corrected(tmp_path):
    run_dir.open_run(tmp_path, Config(rollout=RolloutConfig(schedule="tpyo.json")), "train").close()
    (tmp_path / "metrics.jsonl").touch()
    fixed = Config(rollout=RolloutConfig(schedule="dense"))
    run_dir.open_run(tmp_path, fixed, "train").close()
    assert run_dir.read_config(tmp_path) == fixed


def test_a_file_and_a_foreign_directory_are_refused_untouched(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file")
    assert "cannot be written" in refused(tmp_path / "file" / "run")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # a Hugging Face model has a config.json, too
    assert "is not empty and holds no run of sparrow (found config.json)" in refused(model)
    assert os.listdir(model) == ["config.json"]
    (model / "run.json").write_text('{"kind": "something else"}')
    assert "was not written by sparrow" in refused(model)
    (model / "run.json").write_text("[")
    assert "not a JSON file" in refused(model)


def test_a_directory_without_permission_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    me = os.geteuid()
    if me == 0:  # root may write everywhere: be nobody for a moment
        os.seteuid(65534)
    try:
        assert "cannot be" in refused(closed)
        assert "cannot be" in refused(closed / "new")
    finally:
        os.seteuid(me)


def test_a_run_in_use_is_refused_and_free_after_kill_9(tmp_path):
    program = (
        "import os, sys, time\nfrom common.config import Config\n"
        "from common.records import run_dir\n"
        "run = run_dir.open_run(sys.argv[1], Config(), 'train')\n"
        "worker = os.fork()\n"  # a forked worker outlives its parent and must not hold the lock
        "if worker: print(worker, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        assert f"is in use by process {process.pid};" in refused(tmp_path)
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is alive still
        run_dir.open_run(tmp_path, Config(), "train").close()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_a_first_start_that_was_killed_between_its_two_writes_can_go_on(tmp_path):
    run_dir.open_run(tmp_path, Config(), "train").close()
    (tmp_path / "config.json").unlink()
    (tmp_path / ".config.json.abc.tmp").write_text("{")
    run_dir.open_run(tmp_path, Config(num_steps=2), "train").close()
    assert run_dir.read_config(tmp_path).num_steps == 2


def test_a_run_with_results_and_without_its_config_is_refused(tmp_path):
    run_dir.open_run(tmp_path, Config(), "train").close()
    give_result(tmp_path)
    (tmp_path / "config.json").write_text("null")
    assert "config.json: expected a JSON object, got NoneType; restore" in refused(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "its config.json is gone; restore it" in refused(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"command": None}, {"starts": 7}, {"starts": [1]}, {"files": []}, {"files": {"a": 1}}],
)
def test_a_damaged_run_json_is_one_line(tmp_path, change):
    run_dir.open_run(tmp_path, Config(), "train").close()
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(record | change))
    assert "run.json is damaged" in refused(tmp_path)
    for text in ("null", "[" * 100_000, "9" * 5000):
        (tmp_path / "run.json").write_text(text)
        assert "run.json" in refused(tmp_path)


def opened(path, folder, files):
    """Open a run that starts from the model in `folder` and give it its files."""
    config = Config(model=ModelConfig(path=str(folder)))
    with run_dir.open_run(path, config, "train") as run:
        run.keep_files(files)


def test_a_run_goes_on_with_the_files_that_it_was_started_with_only(tmp_path, capsys):
    run, model, rows = tmp_path / "run", tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"123456789")
    rows.write_text("a\n")
    opened(run, model, [rows])
    kept = json.loads((run / "run.json").read_text())["files"]
    # The published check value of CRC-32: 123456789 -> cbf43926.
    assert kept[str(model / "model.safetensors")] == "crc32:cbf43926"
    sha = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of {}
    assert kept[str(model / "config.json")] == f"sha256:{sha}"
    rows.write_text("b\n")
    opened(run, model, [rows])  # without results there is nothing to protect
    give_result(run)
    opened(run, model, [rows])
    for path, text in (
        (model / "model.safetensors", "x"),
        (model / "config.json", "[]"),
        (rows, "c"),
    ):
        good = path.read_text()
        path.write_text(text)
        with pytest.raises(UserError, match=f"{path.name}: is not what it was at the run's start"):
            opened(run, model, [rows])
        path.write_text(good)
    extra = model / "b.safetensors"
    extra.write_text("x")
    with pytest.raises(UserError, match="b.safetensors: was not there at the run's start"):
        opened(run, model, [rows])
    extra.unlink()
    with pytest.raises(UserError, match="rows.jsonl: is gone, which was there at the run's start"):
        opened(run, model, [])
    opened(run, model, [rows])
    assert capsys.readouterr().out == ""


def test_an_old_run_without_checksums_says_so_once_and_keeps_them(tmp_path, capsys):
    (tmp_path / "rows").write_text("a")
    opened(tmp_path / "run", "", [])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    del record["files"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    give_result(tmp_path / "run")
    for _ in range(2):
        opened(tmp_path / "run", "", [tmp_path / "rows"])
    assert capsys.readouterr().out.count("has no checksums of its files yet") == 1
    (tmp_path / "rows").write_text("b")
    with pytest.raises(UserError, match="rows: is not what it was"):
        opened(tmp_path / "run", "", [tmp_path / "rows"])


def test_a_planted_lock_is_refused_and_what_it_points_to_untouched(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    assert "run.lock is a symbolic link; remove it" in refused(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "data"
    (tmp_path / "run" / "run.lock").unlink()
    os.mkfifo(tmp_path / "run" / "run.lock")
    assert "not a regular file; remove it" in refused(tmp_path / "run")


def test_temporary_files_of_a_killed_writer_are_removed_at_the_next_start(tmp_path):
    run_dir.open_run(tmp_path, Config(), "train").close()
    (tmp_path / "precious").write_text("data")
    for name in (".config.json.abc.tmp", "tmp671c9mjd.tmp"):
        (tmp_path / name).write_text("{")
    (tmp_path / "link.tmp").symlink_to(tmp_path / "precious")
    run_dir.open_run(tmp_path, Config(), "train").close()
    names = ["config.json", "precious", "run.json", "run.lock"]
    assert sorted(os.listdir(tmp_path)) == names


def test_read_config_wants_a_run(tmp_path):
    with pytest.raises(UserError, match="no run of sparrow"):
        run_dir.read_config(tmp_path)


def test_atomic_write_replaces_whole_files_and_cleans_up(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    mask = os.umask(0o027)
    try:
        run_dir.atomic_write_text(target, "old")
    finally:
        os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o640  # 0666 without 0027

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        run_dir.atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_differing_config_of_an_older_sparrow_is_named_as_such(tmp_path):
    run_dir.open_run(tmp_path, Config(), "train").close()
    give_result(tmp_path)
    values = overrides.to_dict(Config())
    values["rollout"]["gone"] = 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "config.json: rollout.gone: no such setting" in refused(tmp_path)


def test_times_of_starts_are_utc(tmp_path):
    before = time.time()
    run_dir.open_run(tmp_path, Config(), "train").close()
    started = json.loads((tmp_path / "run.json").read_text())["started"]
    assert started.endswith("+00:00")
    import datetime

    assert abs(datetime.datetime.fromisoformat(started).timestamp() - before) < 60
