"""sparrow_jax/checkpoint.py on a disk that takes no more."""

import logging
import resource
import shutil
from types import SimpleNamespace

import jax
import pytest

from common.errors import is_disk_full
from sparrow_jax.checkpoint import Checkpoints

NUM_BYTES = 2 * 4 * 65_536


class Learner:
    def state_dict(self):
        key = jax.random.key(0)
        return {name: jax.random.normal(key, (65_536,)) for name in ("first", "second")}

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored here")


def test_an_error_while_writing_is_raised_and_not_logged_as_well(tmp_path):
    """Orbax's threads would log a traceback for each array: 120 lines on a full disk."""
    log, records = logging.getLogger("absl"), []
    handler = logging.Handler()
    handler.emit = records.append
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path, Learner(), keep=1)
    log.addHandler(handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(ValueError, match="too large"):
            checkpoints.save(9, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.removeHandler(handler)
        checkpoints.close()
    assert not [r.getMessage() for r in records]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    free = NUM_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    checkpoints = Checkpoints(tmp_path, Learner(), keep=2)
    checkpoints.save(1, {})
    free -= 1
    with pytest.raises(OSError, match=f"{free} bytes for a checkpoint of {NUM_BYTES}") as caught:
        checkpoints.save(2, {})
    checkpoints.close()
    assert is_disk_full(caught.value) and caught.value.filename == str(tmp_path)
    assert not any((tmp_path / "tmp_step_00000002").iterdir())
