"""Checkpoints: exact, safe against damage to any file and against a kill at any moment."""

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import UserError
from sparrow_jax import checkpoint
from sparrow_jax.checkpoint import Checkpoints
from tests.common.records.test_damaged_runs import changed

EXTRA = {"next_step": 12, "schedule": [0.1, 1e-17, None], "name": "\u00e9", "version": 2**60}


class Learner:
    """Stands for sparrow_jax/learner.py: its two methods and a state of the same kind."""

    def __init__(self, seed, width=4):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        weights = {"embed_VD": draw(7, width), "layers": {"q_LDNH": draw(2, width, 3)}}
        moments = [jnp.int32(seed), draw(7, width), draw(7, width).astype(jnp.bfloat16)]
        self.state = {"params": weights, "opt_state": moments}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def bits(learner):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(learner.state)]


def same(a, b):
    return jax.tree.structure(a.state) == jax.tree.structure(b.state) and bits(a) == bits(b)


def names(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 3 and 12, to be copied."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    for step in (3, 12):
        with_learner(
            directory, Learner(step), lambda c, step=step: c.save(step, {**EXTRA, "at": step})
        )
    return directory


@pytest.fixture
def two(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def with_learner(directory, learner, action, keep=2):
    checkpoints = Checkpoints(directory, learner, keep)
    try:
        return action(checkpoints)
    finally:
        checkpoints.close()


def restore(directory, learner):
    return with_learner(directory, learner, lambda c: c.restore())


def assert_restores(directory, step):
    learner = Learner(99)
    assert restore(directory, learner) == {**EXTRA, "at": step}
    assert same(learner, Learner(step))


def test_state_and_extra_are_bit_equal(two, capsys):
    assert names(two) == ["step_00000003", "step_00000012"]
    assert_restores(two, 12)
    assert capsys.readouterr().err == ""


def test_nothing_saved_is_none(tmp_path):
    learner = Learner(1)
    assert restore(tmp_path / "new", learner) is None
    assert same(learner, Learner(1))


def test_only_the_newest_are_kept(tmp_path):
    learner = Learner(0)

    def run(checkpoints):
        for step in (5, 99_999_999, 100_000_000):  # the last two: by number, not by name
            checkpoints.save(step, {})
        return names(tmp_path)

    assert with_learner(tmp_path, learner, run) == ["step_100000000", "step_99999999"]
    assert with_learner(tmp_path, learner, run, keep=1) == ["step_100000000"]
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, learner, 0)


def test_saving_a_step_again_replaces_it(two):
    learner = Learner(44)
    with_learner(two, learner, lambda c: c.save(12, {"again": True}))
    assert names(two) == ["step_00000003", "step_00000012"]
    found = Learner(0)
    assert restore(two, found) == {"again": True} and same(found, learner)


def test_a_replacement_cut_off_half_way_is_undone(two):
    (two / "step_00000012").rename(two / "replaced_step_00000012")
    (two / "tmp_step_00000012").mkdir()
    assert_restores(two, 12)
    assert names(two) == ["step_00000003", "step_00000012"]


def test_half_written_folders_are_removed(two):
    shutil.copytree(two / "step_00000012", two / "tmp_step_00000013")
    (two / "tmp_step_00000013" / "manifest.json").unlink()
    assert_restores(two, 12)
    assert names(two) == ["step_00000003", "step_00000012"]


def test_odd_things_called_tmp_are_removed_and_what_a_link_points_to_is_not(two, tmp_path):
    (two / "tmp_x").write_text("file")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("data")
    (two / "tmp_y").symlink_to(tmp_path / "precious")
    assert_restores(two, 12)
    assert names(two) == ["step_00000003", "step_00000012"]
    assert (tmp_path / "precious" / "data").read_text() == "data"


def test_a_manifest_nested_without_end_is_damage(two, capsys):
    (two / "step_00000012" / "manifest.json").write_text("[" * 100_000)
    assert_restores(two, 3)
    assert "manifest.json differs from what was written" in capsys.readouterr().err
    for text in ("[]", "null", "9" * 5000):
        (two / "step_00000003" / "manifest.json").write_text(text)
        with pytest.raises(checkpoint._Damaged, match="differs from what was written"):
            checkpoint._verified_manifest(two / "step_00000003")


def test_a_renamed_checkpoint_is_not_taken_for_another_step(two, capsys):
    """Step 3 under the name of step 12 would be the newest for ever: later saves are pruned."""
    shutil.rmtree(two / "step_00000012")
    shutil.copytree(two / "step_00000003", two / "step_00000012")
    assert_restores(two, 3)
    assert "it holds step 3: the folder was renamed" in capsys.readouterr().err


def test_a_changed_manifest_with_a_right_checksum_is_damage_or_refused(two):
    """Seeded: other types, missing and other keys, files outside of the checkpoint."""
    folder, rng, damaged = two / "step_00000012", random.Random(9), 0
    text = (folder / "manifest.json").read_text()
    odd = [
        {**json.loads(text), "files": {name: {"bytes": 1, "crc32": 0}}} for name in ("../x", "/x")
    ]
    for i in range(200):
        value = odd[i] if i < len(odd) else json.loads(changed(text, rng))
        if isinstance(value, dict):
            value.pop("crc32", None)
            value["crc32"] = zlib.crc32(json.dumps(value).encode())
        (folder / "manifest.json").write_text(json.dumps(value))
        try:
            found = checkpoint._verified_manifest(folder)
        except checkpoint._Damaged as damage:
            damaged += 1
            assert "\n" not in str(damage)
        except UserError as error:
            assert "has format" in str(error)
        else:
            assert isinstance(found["extra"], dict) and isinstance(found["arrays"], dict)
    assert damaged > 100


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "deleted": lambda path, rng: path.unlink(),
    "truncated": lambda path, rng: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, rng: path.write_bytes(b""),
    "one bit flipped": lambda path, rng: flip(path, int(rng.integers(2**30))),
    "grown": lambda path, rng: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_any_file_is_named_and_the_one_before_is_used(saved, tmp_path, capsys, kind):
    rng = np.random.default_rng(0)
    damaged = 0
    for i, original in enumerate(files_of(saved / "step_00000012")):
        if kind != "deleted" and original.stat().st_size == 0:
            continue
        relative = original.relative_to(saved)
        directory = Path(shutil.copytree(saved, tmp_path / str(i)))
        DAMAGE[kind](directory / relative, rng)
        assert_restores(directory, 3)
        warning = capsys.readouterr().err
        assert warning.count("\n") == 1
        assert f"{directory / 'step_00000012'} is damaged: " in warning
        assert relative.name in warning
        assert names(directory) == ["damaged_step_00000012", "step_00000003"]
        damaged += 1
    assert damaged > 5


def test_every_bit_of_the_manifest_counts(saved, tmp_path):
    """A changed digit in `extra` is valid JSON; the checksum in the manifest sees it."""
    text = (saved / "step_00000012" / "manifest.json").read_bytes()
    position = text.index(b'"next_step": 12') + len(b'"next_step": 1')
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    flip(directory / "step_00000012" / "manifest.json", position)
    assert json.loads((directory / "step_00000012" / "manifest.json").read_bytes())
    assert_restores(directory, 3)


def test_files_that_orbax_cannot_read_are_damage_too(two, capsys):
    folder = two / "step_00000012"
    for path in files_of(folder / "arrays"):
        path.write_bytes(b"not what Orbax wrote")
    (folder / "manifest.json").unlink()
    arrays = checkpoint._named_arrays(Learner(0).state)
    checkpoint._write_manifest(folder, 12, arrays, EXTRA)
    assert_restores(two, 3)
    assert "is damaged: Orbax cannot read it" in capsys.readouterr().err


def test_only_damaged_ones_left_is_an_error_now_and_next_time(two):
    for step in ("03", "12"):
        (two / f"step_000000{step}" / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match="every checkpoint is damaged.*step_00000012.*delete"):
            restore(two, Learner(0))
    assert names(two) == ["damaged_step_00000003", "damaged_step_00000012"]


def test_a_step_damaged_twice_keeps_both(two):
    for _ in range(2):
        with_learner(two, Learner(12), lambda c: c.save(12, {**EXTRA, "at": 12}))
        (two / "step_00000012" / "manifest.json").unlink()
        assert_restores(two, 3)
    assert names(two) == ["damaged_step_00000012", "damaged_step_00000012.2", "step_00000003"]


def test_another_geometry_or_format_is_refused_and_nothing_is_set_aside(two, capsys):
    words = r"params.layers.q_LDNH expected float32\[2, 5, 3\], found float32\[2, 4, 3\]"
    with pytest.raises(UserError, match=f"step_00000012: belongs to another model.*{words}"):
        restore(two, Learner(0, width=5))
    fewer = Learner(0)
    fewer.state["opt_state"].pop()
    with pytest.raises(UserError, match=r"opt_state.2 expected absent, found bfloat16\[7, 4\]"):
        restore(two, fewer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_FORMAT", 2)
        with pytest.raises(UserError, match="has format 1, expected 2"):
            restore(two, Learner(0))
    assert names(two) == ["step_00000003", "step_00000012"] and not capsys.readouterr().err


def test_extra_that_is_no_json_writes_nothing(two):
    with pytest.raises(TypeError):
        with_learner(two, Learner(0), lambda c: c.save(13, {"x": object()}))
    assert names(two) == ["step_00000003", "step_00000012"]


class Killed(BaseException):
    """Ends a save at once: save has no clean-up code, so what is left is what a kill leaves."""


@pytest.mark.parametrize("step", [12, 13])
def test_a_stop_at_any_call_leaves_a_sound_checkpoint(saved, tmp_path, monkeypatch, step):
    calls = {"rename": 0, "rmtree": 0, "_sync": 0}
    limit = {}

    def stopping(name, original):
        def call(*args, **kwargs):
            calls[name] += 1
            if calls[name] == limit.get(name):
                if name == "rmtree":  # half-way through the deletion
                    (args[0] / "manifest.json").unlink(missing_ok=True)
                raise Killed
            return original(*args, **kwargs)

        return call

    for owner, name in ((checkpoint.os, "rename"), (shutil, "rmtree"), (checkpoint, "_sync")):
        monkeypatch.setattr(owner, name, stopping(name, getattr(owner, name)))
    outcomes = set()
    for name, most in (("rename", 4), ("rmtree", 2), ("_sync", 3)):
        for stop_at in range(1, most + 1):
            directory = Path(shutil.copytree(saved, tmp_path / f"{name}{stop_at}"))
            limit.clear()
            checkpoints = Checkpoints(directory, Learner(55), 1)
            calls.update(dict.fromkeys(calls, 0))
            limit[name] = stop_at
            try:
                checkpoints.save(step, {"new": 1})
            except Killed:
                pass
            limit.clear()
            checkpoints.close()
            learner = Learner(0)
            extra = restore(directory, learner)
            assert extra in ({"new": 1}, {**EXTRA, "at": 12})
            assert same(learner, Learner(55 if "new" in extra else 12))
            assert all(n.startswith("step_") for n in names(directory))
            assert all((p / "manifest.json").is_file() for p in directory.iterdir())
            outcomes.add("new" in extra)
    assert outcomes == {True, False}


NURSERY = """
import os, signal, sys, time
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from sparrow_jax.checkpoint import Checkpoints
from tests.common.records.test_damaged_runs import changed

class Learner:
    def __init__(self, value):
        mesh = jax.make_mesh((2,), ("fsdp",))
        array = np.full((64, 1000), value, np.float32)
        self.state = {"params": {"w": jax.device_put(array, NamedSharding(mesh, P("fsdp")))}}
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

def saves(pipe):
    learner = Learner(0)
    checkpoints = Checkpoints(sys.argv[1], learner, 1)
    step = (checkpoints.restore() or {"step": 0})["step"]
    assert learner.state["params"]["w"].sharding == Learner(0).state["params"]["w"].sharding
    assert np.all(np.asarray(learner.state["params"]["w"]) == step), step
    os.write(pipe, b"restored %d\\n" % step)
    while True:
        step += 1
        learner.state = Learner(step).state
        checkpoints.save(step, {"step": step})
        os.write(pipe, b"saved %d\\n" % step)

done = 0
for delay in (0.0, 0.03, 0.08, 0.15):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            saves(write)
        finally:
            os._exit(1)
    os.close(write)
    lines = os.fdopen(read)
    restored = lines.readline()
    assert restored.startswith("restored"), restored
    step = int(restored.split()[1])
    assert step >= done, (step, done)
    assert lines.readline() == f"saved {step + 1}\\n"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    done = int((["saved %d" % (step + 1)] + lines.readlines())[-1].split()[1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
print("done", done)
"""


def test_kill_9_while_saving_loses_no_complete_checkpoint(tmp_path):
    """Four processes, each killed in the middle of saves of sharded arrays (two devices)."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", "-c", NURSERY, str(tmp_path / "c")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[1]) >= 4
    assert "damaged" not in result.stderr
