"""A run directory: opened once at a time, tied to one configuration, safe against a half write.

run.lock      held (flock) while a process uses the run; the system drops it, even on kill -9
run.json      marker of a run: command, machine, versions, commit, every start
config.json   the resolved configuration (common/overrides.py reads it back)
...           metrics.jsonl, checkpoints/, model/ belong to the command that runs
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from common import overrides
from common.config import Config
from common.errors import UserError

MAY_CHANGE = (
    "num_steps", "eval_every", "checkpoint_every", "keep_checkpoints", "name",
    "learner.mesh",  # where a run computes, not what
)  # fmt: skip
"""Settings that a resumed run may be given anew; all others would make it another run."""

_KIND = "sparrow-run"
_LOCK = "run.lock"
_PACKAGES = ("sparrow-rl", "numpy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
_PACKAGES += ("torch", "triton", "vllm")
LOCK_PATIENCE_SECONDS = 2.0
_open_locks: weakref.WeakSet[TextIO] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDir:
    """An open run. Close it to let others in."""

    path: Path
    config: Config
    command: str
    _lock: TextIO = dataclasses.field(repr=False)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: str | Path, config: Config, command: str) -> RunDir:
    """Create the run directory, or re-open it to go on; `command` is `train` or `warmup`.

    A run without any result yet may be opened with another configuration. Refused with a
    UserError: a file, a directory that cannot be written, one that holds other things, a run of
    another command or configuration (the differing settings are named), a run that a living
    process uses.
    """
    path = Path(path)
    _refuse_foreign(path)
    lock = _lock(path)
    try:
        old = _read_json(path / "run.json")
        if old is not None:
            _refuse_other_run(path, old, config, command)
        record = _session(command)
        record["starts"] = [*(old or {}).get("starts", []), record["started"]]
        atomic_write_text(path / "run.json", _dumps(record))
        atomic_write_text(path / "config.json", _dumps(overrides.to_dict(config)))
    except BaseException:
        lock.close()
        raise
    return RunDir(path=path, config=config, command=command, _lock=lock)


def read_config(path: str | Path) -> Config:
    """The configuration of an existing run; nothing is locked or written."""
    path = Path(path)
    if not (path / "run.json").is_file() or not (path / "config.json").is_file():
        raise UserError(
            f"{path}: no run of sparrow; expected a directory that --run=... of train made"
        )
    return overrides.from_dict(_read_json(path / "config.json"), source=str(path / "config.json"))


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: temporary file in the same folder, fsync, rename."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=True) + "\n"


def _refuse_foreign(path: Path) -> None:
    try:
        names = sorted(p.name for p in path.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not path.exists():  # something above it is a file: `_lock` says so
            return
        raise UserError(
            f"--run={path}: is a file; name a new directory, or a run to go on with"
        ) from None
    except OSError as error:
        raise UserError(f"--run={path}: cannot be read ({error.strerror}); name another") from error
    others = [n for n in names if n != _LOCK and not n.endswith(".tmp")]
    if others and "run.json" not in others:
        raise UserError(
            f"--run={path}: is not empty and holds no run of sparrow (found {others[0]}); "
            "name a directory that is new or empty"
        )


def _lock(path: Path) -> TextIO:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / _LOCK, "a+", encoding="ascii")
    except OSError as error:
        raise UserError(
            f"--run={path}: cannot be written ({error.strerror}); name a directory of your own"
        ) from error
    if not _flock(lock):
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(
            f"--run={path}: is in use by process {holder}; wait for it, stop it, or name another"
        )
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    _open_locks.add(lock)
    return lock


def _flock(lock: TextIO) -> bool:
    """Take the lock; a moment of patience for what a killed process forked just before it died."""
    give_up = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.05)


def _drop_locks_in_child() -> None:
    """A forked worker that outlives its parent must not keep the run locked."""
    for lock in list(_open_locks):
        if not lock.closed:
            lock.close()
    _open_locks.clear()


def _refuse_other_run(path: Path, old: Mapping[str, Any], config: Config, command: str) -> None:
    if old.get("kind") != _KIND:
        raise UserError(
            f"--run={path}: run.json was not written by sparrow; name another directory"
        )
    if old["command"] != command:
        raise UserError(
            f"--run={path}: is a run of `sparrow {old['command']}`; "
            f"name another directory for `sparrow {command}`"
        )
    stored = _read_json(path / "config.json")
    if stored is None:  # killed between the two writes of the first start
        return
    if not _has_work(path):  # nothing to protect: the first start stopped before its first result
        return
    before = overrides.from_dict(stored, source=str(path / "config.json"))
    changed = [key for key in overrides.differences(before, config) if key not in MAY_CHANGE]
    if changed:
        raise UserError(
            f"--run={path}: belongs to another config; it differs in {', '.join(changed)}: "
            "name a new directory, or set them back to go on"
        )


def _has_work(path: Path) -> bool:
    own = {path / name for name in ("run.json", "config.json", _LOCK)}
    files = (f for f in path.rglob("*") if f not in own and not f.name.endswith(".tmp"))
    return any(f.is_file() and f.stat().st_size > 0 for f in files)


def _read_json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: is no JSON ({error}); remove the run, or restore the file"
        ) from error


def _session(command: str) -> dict[str, Any]:
    """Where and with what this start of the run happens."""
    return {
        "kind": _KIND,
        "command": command,
        "argv": sys.argv[1:],
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": _versions(),
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout that this file lies in, with "+" if files differ from it."""
    folder = Path(__file__).resolve().parent
    try:
        command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


os.register_at_fork(after_in_child=_drop_locks_in_child)
