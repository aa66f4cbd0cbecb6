"""Parts of long work: kept when it stops, taken up again, never mixed with other work's."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from common.errors import UserError
from common.profile.kept_parts import KeptParts, weights_stamp
from tests.conftest import ROOT


class Stop(Exception):
    pass


def start(out, key, **parts):
    """Put parts and be stopped."""
    with pytest.raises(Stop), KeptParts(out, key) as kept:
        for name, value in parts.items():
            kept.put(name, x=np.float32(value), word="w")
        raise Stop


def found(out, key, name):
    """What a new start finds; it is stopped too."""
    with pytest.raises(Stop), KeptParts(out, key) as kept:
        part = kept.get(name)
        raise Stop
    return part


def test_parts_outlive_a_stop_and_go_after_success(tmp_path):
    out = tmp_path / "p.json"
    start(out, {"k": [1, 2]}, a=[1, 2, 3])
    part = found(out, {"k": (1, 2)}, "a")  # a tuple is a list in JSON
    np.testing.assert_array_equal(part["x"], np.float32([1, 2, 3]))
    assert part["x"].dtype == np.float32 and str(part["word"]) == "w"
    assert found(out, {"k": [1, 2]}, "b") is None
    with KeptParts(out, {"k": [1, 2]}) as kept:
        assert kept.get("a") is not None
    assert list(tmp_path.iterdir()) == []


def test_parts_of_another_key_are_dropped_with_a_word(tmp_path, capsys):
    out = tmp_path / "p.json"
    start(out, 1, a=0)
    assert capsys.readouterr().out == ""
    assert found(out, 2, "a") is None
    said = capsys.readouterr().out
    assert "p.json.parts: holds parts of other work" in said and said.count("\n") == 1
    assert found(out, 1, "a") is None, "they were dropped, not hidden"


def test_outputs_do_not_share_parts(tmp_path):
    start(tmp_path / "p.json", 1, a=1)
    start(tmp_path / "q.json", 1, a=2)
    assert found(tmp_path / "p.json", 1, "a")["x"] == 1


def test_damaged_part_is_none(tmp_path):
    out, file = tmp_path / "p.json", tmp_path / "p.json.parts" / "a.npz"
    start(out, 1, a=np.arange(9))
    data = file.read_bytes()
    middle = len(data) // 3
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for damaged in (b"", b"PK", data[:50], data[: len(data) // 2], data[:-1], b"no zip", flipped):
        file.write_bytes(damaged)
        assert found(out, 1, "a") is None, damaged[:20]
    np.savez(file, x=np.array([{}], dtype=object))
    assert found(out, 1, "a") is None, "pickles are not opened"
    file.write_bytes(data)
    assert found(out, 1, "a") is not None


def test_half_written_part_is_not_there(tmp_path, monkeypatch):
    out = tmp_path / "p.json"
    with pytest.raises(Stop), KeptParts(out, 1) as kept:
        monkeypatch.setattr(os, "replace", stop)
        kept.put("a", x=1)
    monkeypatch.undo()
    assert found(out, 1, "a") is None


def stop(*_):
    raise Stop


def test_what_is_not_ours_is_not_removed(tmp_path):
    folder = tmp_path / "p.json.parts"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years")
    with (
        pytest.raises(UserError, match="p.json.parts: is in the way"),
        KeptParts(tmp_path / "p.json", 1),
    ):
        pass
    assert (folder / "thesis.txt").read_text() == "years"
    (tmp_path / "q.json.parts").write_text("a file")
    with (
        pytest.raises(UserError, match="q.json.parts: is in the way"),
        KeptParts(tmp_path / "q.json", 1),
    ):
        pass


def test_a_start_killed_before_its_key_is_no_hindrance(tmp_path):
    folder = tmp_path / "p.json.parts"
    folder.mkdir()
    (folder / ".key.x.tmp").write_text("ha")
    start(tmp_path / "p.json", 1, a=4)
    assert found(tmp_path / "p.json", 1, "a")["x"] == 4


def test_parts_outlive_kill_9(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from common.profile.kept_parts import KeptParts
with KeptParts(Path(sys.argv[1]), 1) as kept:
    kept.put("a", x=7)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    out = tmp_path / "p.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program, str(out)], env=environment, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert found(out, 1, "a")["x"] == 7


def test_stamp_tells_other_weights_and_another_config(tmp_path):
    assert weights_stamp("") == [] == weights_stamp(str(tmp_path / "nowhere"))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"1"), config.write_text("{}")
    stamps = [weights_stamp(str(tmp_path))]
    weights.write_bytes(b"12")
    stamps.append(weights_stamp(str(tmp_path)))
    config.write_text("{ }")
    stamps.append(weights_stamp(str(tmp_path)))
    os.utime(weights, ns=(1, 1))
    stamps.append(weights_stamp(str(tmp_path)))
    assert all(a != b for i, a in enumerate(stamps) for b in stamps[:i])
    (tmp_path / "README.md").write_text("x")
    assert weights_stamp(str(tmp_path)) == stamps[-1]
