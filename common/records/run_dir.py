"""A run directory: used by one process at a time, tied to one configuration, written atomically.

run.lock      locked (flock) while a process uses the run; released by the system, even on kill -9
run.json      marker of a run: command, machine, versions, commit, every start, checksums of the
              files that it depends on
config.json   the resolved configuration (common/config/overrides.py reads it back)
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
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from common.config import Config, overrides
from common.errors import UserError
from common.records import file_sums, json_checks

MAY_CHANGE = (
    "num_steps", "eval_every", "checkpoint_every", "keep_checkpoints", "name",
    "learner.mesh",  # where a run computes, not what
)  # fmt: skip
"""Settings that may change when a run is resumed; a run with results refuses any other change."""

_KIND = "sparrow-run"
_LOCK = "run.lock"
_PACKAGES = ("sparrow-rl", "numpy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
_PACKAGES += ("torch", "triton", "vllm")
LOCK_PATIENCE_SECONDS = 2.0
_open_locks: weakref.WeakSet[TextIO] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDir:
    """An open run; close it to let others use it. has_work: it had results when it was opened."""

    path: Path
    config: Config
    command: str
    has_work: bool = False
    _lock: TextIO = dataclasses.field(repr=False)

    def keep_files(self, task_files: Iterable[Path]) -> None:
        """Keep the checksums of the files of the start model and the task in run.json.

        Raises UserError, naming the file, if the results of the run came from other files.
        """
        now = file_sums.sums(self.config.model.path, task_files)
        record = _read_json(self.path / "run.json")
        before = record.get("files")
        if self.has_work and before is None and now:
            print(f"{self.path}: has no checksums of its files yet; they are kept from now on")
        elif self.has_work and before is not None:
            change = file_sums.first_change(before, now)
            if change:
                raise UserError(
                    f"--run={self.path}: {change} at the run's start; restore it or name a new run"
                )
        if now != before:
            atomic_write_text(self.path / "run.json", _dumps(record | {"files": now}))

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: str | Path, config: Config, command: str) -> RunDir:
    """Create the run directory, or open it again to go on; `command` is `train` or `warmup`.

    A run that has no result yet may be opened with another configuration. Raises UserError if
    `path` is a file, cannot be written or holds other things, if it is a run of another command or
    configuration (the differing settings are named), and if another process uses it.
    """
    path = Path(path)
    _refuse_foreign(path)
    lock = _lock(path)
    try:
        _remove_leftovers(path)
        old, has_work = _read_json(path / "run.json"), _has_work(path)
        if old is not None:
            _refuse_other_run(path, old, config, command, has_work)
        record = _session(command)
        record["starts"] = [*(old or {}).get("starts", []), record["started"]]
        if old and old.get("files") is not None:
            record["files"] = old["files"]
        atomic_write_text(path / "run.json", _dumps(record))
        atomic_write_text(path / "config.json", _dumps(overrides.to_dict(config)))
    except BaseException:
        lock.close()
        raise
    return RunDir(path=path, config=config, command=command, has_work=has_work, _lock=lock)


def read_config(path: str | Path) -> Config:
    """The configuration of an existing run; locks and writes nothing.

    Raises UserError if `path` is not a run, or if its config.json is damaged.
    """
    path = Path(path)
    if not (path / "run.json").is_file() or not (path / "config.json").is_file():
        raise UserError(
            f"{path}: no run of sparrow; expected a directory that --run=... of train made"
        )
    return overrides.from_dict(_read_json(path / "config.json"), source=str(path / "config.json"))


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a file completely or not at all: a temporary file beside it, fsync, rename.

    Bytes of a path in the text that are not UTF-8 are written as escapes (\\udcff).
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
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
        if not path.exists():  # a folder above it is a file; `_lock` reports that
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
        lock = _open_lock(path)
    except OSError as error:
        if (path / _LOCK).is_symlink():
            raise UserError(f"--run={path}: its {_LOCK} is a symbolic link; remove it") from error
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


def _open_lock(path: Path) -> TextIO:
    """The lock file, opened without following a link or waiting for a pipe in its place."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path / _LOCK, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"--run={path}: its {_LOCK} is not a regular file; remove it")
    return open(handle, "a+", encoding="ascii")


def _flock(lock: TextIO) -> bool:
    """Take the lock; wait a moment for a child that a killed process has just left behind."""
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
    """Close the locks in a forked child, which would otherwise hold them after its parent ended."""
    for lock in list(_open_locks):
        if not lock.closed:
            lock.close()
    _open_locks.clear()


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of a writer that was killed; only with the lock held."""
    for file in path.glob("*.tmp"):
        if file.is_symlink() or file.is_file():
            file.unlink()


def _refuse_other_run(
    path: Path, old: Mapping[str, Any], config: Config, command: str, has_work: bool
) -> None:
    if old.get("kind") != _KIND:
        raise UserError(
            f"--run={path}: run.json was not written by sparrow; name another directory"
        )
    _refuse_damaged(path, old)
    if old["command"] != command:
        raise UserError(
            f"--run={path}: is a run of `sparrow {old['command']}`; "
            f"name another directory for `sparrow {command}`"
        )
    if not has_work:  # there are no results that another configuration could spoil
        return
    stored = _read_json(path / "config.json")
    if stored is None:
        raise UserError(
            f"--run={path}: has results, but its config.json is gone; restore it, or name a new "
            "directory"
        )
    before = overrides.from_dict(stored, source=str(path / "config.json"))
    changed = [key for key in overrides.differences(before, config) if key not in MAY_CHANGE]
    if changed:
        raise UserError(
            f"--run={path}: belongs to another config; it differs in {', '.join(changed)}: "
            "name a new directory, or set them back to go on"
        )


def _refuse_damaged(path: Path, old: Mapping[str, Any]) -> None:
    starts, files = old.get("starts"), old.get("files", {})
    sound = isinstance(old.get("command"), str)
    sound = sound and isinstance(starts, list) and all(isinstance(s, str) for s in starts)
    sound = sound and isinstance(files, dict) and all(isinstance(s, str) for s in files.values())
    if not sound:
        raise UserError(
            f"--run={path}: run.json is damaged (command, starts or files are not what was "
            "written); restore it, or name a new directory"
        )


def _has_work(path: Path) -> bool:
    own = {path / name for name in ("run.json", "config.json", _LOCK)}
    files = (f for f in path.rglob("*") if f not in own and not f.name.endswith(".tmp"))
    return any(f.is_file() and f.stat().st_size > 0 for f in files)


def _read_json(path: Path) -> Any:
    """The JSON object in a file of a run; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return json_checks.read_object(path)
    except UserError as error:
        raise UserError(f"{error}; restore the file, or name a new run") from error


def _session(command: str) -> dict[str, Any]:
    """Command, machine and versions of this start of the run."""
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
    """The commit of the checkout that holds this file, "+" if files differ; None if it has none."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # not a checkout of ours, but perhaps inside another one
        return None
    try:
        command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


os.register_at_fork(after_in_child=_drop_locks_in_child)
