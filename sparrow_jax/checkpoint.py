"""Checkpoints that survive a kill at any moment and detect damage on the disk.

<directory>/step_00000012/   complete; it gets this name by a rename at the very end of a save
    arrays/                  weights and optimizer state (Orbax)
    manifest.json            step, `extra`, shapes of the arrays, size and CRC-32 of each file
<directory>/tmp_*            being written or deleted; removed at the next start
<directory>/replaced_*       the old version while a step is saved again; put back after a kill
<directory>/damaged_*        set aside by `restore`, which printed why

A checkpoint does not depend on the mesh that wrote it: `restore` places every array as the learner
has placed its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from common.errors import UserError, one_line
from common.records.file_sums import crc32 as _crc32

_FORMAT = 1
_MANIFEST = "manifest.json"


class Stateful(Protocol):
    """What can be saved: anything with its state as a tree of jax arrays."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Checkpoints:
    """The checkpoints of one run: Checkpointer of common/protocols.py.

    Only one process at a time may use a directory, which the lock of the run ensures. The newest
    `keep` complete checkpoints are kept.
    """

    def __init__(self, directory: str | Path, learner: Stateful, keep: int):
        if keep < 1:
            raise ValueError(f"{keep=}: expected at least 1 checkpoint to keep")
        self._directory = Path(directory).absolute()
        self._learner, self._keep = learner, keep
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tidy()
        self._orbax = ocp.PyTreeCheckpointer()

    def save(self, step: int, extra: Mapping[str, Any]) -> None:
        """Write the learner's state and `extra` (JSON) as checkpoint `step`; delete old ones.

        Raises: OSError (ENOSPC), before anything is written, if the disk has no room for the state.
        """
        json.dumps(extra)  # raises before anything is written if `extra` is not JSON
        final = self._directory / f"step_{step:08d}"
        temporary = self._directory / f"tmp_{final.name}"
        _remove(temporary)
        temporary.mkdir()
        arrays = _named_arrays(self._learner.state_dict())
        _require_room(temporary, sum(x.nbytes for x in arrays.values()))
        with _errors_raised_only():
            self._orbax.save(temporary / "arrays", arrays)
        _write_manifest(temporary, step, arrays, extra)
        _sync_tree(temporary)
        if final.exists():
            os.rename(final, self._directory / f"replaced_{final.name}")
        os.rename(temporary, final)
        _sync(self._directory)
        self._tidy()
        for old in self._complete()[: -self._keep]:
            self._delete(old)

    def restore(self) -> dict[str, Any] | None:
        """Load the newest sound checkpoint into the learner and return its `extra`.

        Returns None if there is no checkpoint. A damaged one is renamed to damaged_step_* with a
        warning on stderr.
        Raises: UserError if all checkpoints are damaged, because going on would silently start
        again, and if a sound checkpoint belongs to another model or has another format.
        """
        for folder in reversed(self._complete()):
            try:
                manifest = _verified_manifest(folder)
                state = self._read_state(folder, manifest)
            except _Damaged as damage:
                self._set_aside(folder, damage)
                continue
            self._learner.load_state_dict(state)
            return manifest["extra"]
        damaged = sorted(self._directory.glob("damaged_step_*"))
        if damaged:
            raise UserError(
                f"{self._directory}: every checkpoint is damaged (newest: {damaged[-1].name}); "
                "delete this folder to start the run again from its first step"
            )
        return None

    def close(self) -> None:
        """Release what Orbax holds."""
        self._orbax.close()

    def _read_state(self, folder: Path, manifest: Mapping[str, Any]) -> Any:
        """The arrays of a verified checkpoint, in a tree and placed like those of the learner."""
        tree = self._learner.state_dict()
        arrays = _named_arrays(tree)
        _refuse_other_model(folder, manifest["arrays"], _described(arrays))
        target = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in arrays.items()
        }
        restore = ocp.args.PyTreeRestore(
            target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
        )
        try:
            found = self._orbax.restore(folder / "arrays", args=restore)
        except (OSError, ValueError, KeyError) as error:
            raise _Damaged(f"Orbax cannot read it: {one_line(error)}") from error
        return jax.tree.unflatten(jax.tree.structure(tree), [found[name] for name in arrays])

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [p for p in self._directory.iterdir() if re.fullmatch(r"step_\d{8,}", p.name)]
        return sorted(found, key=lambda p: int(p.name[5:]))

    def _set_aside(self, folder: Path, damage: _Damaged) -> None:
        """Rename a damaged checkpoint and warn on stderr."""
        target = self._directory / f"damaged_{folder.name}"
        number = 1
        while target.exists():
            number += 1
            target = self._directory / f"damaged_{folder.name}.{number}"
        os.rename(folder, target)
        print(
            f"sparrow: warning: checkpoint {folder} is damaged: {damage}; "
            f"renamed to {target.name}, trying the one before",
            file=sys.stderr,
        )

    def _tidy(self) -> None:
        """Remove remains of earlier saves and deletions, and undo an interrupted replacement."""
        for old in self._directory.glob("replaced_step_*"):
            final = self._directory / old.name.removeprefix("replaced_")
            if final.exists():
                self._delete(old)
            else:
                os.rename(old, final)
        for left in self._directory.glob("tmp_*"):
            _remove(left)

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint; renamed first, so that half of it cannot look like a damaged one."""
        doomed = self._directory / f"tmp_{folder.name}"
        _remove(doomed)
        os.rename(folder, doomed)
        _remove(doomed)


def _require_room(folder: Path, num_bytes: int) -> None:
    """Refuse a save that cannot end: on a full disk all threads of Orbax print their errors."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        reason = f"{os.strerror(errno.ENOSPC)}: {free} bytes for a checkpoint of {num_bytes}"
        raise OSError(errno.ENOSPC, reason, str(folder.parent))


@contextlib.contextmanager
def _errors_raised_only() -> Iterator[None]:
    """Keep Orbax from logging the traceback of each error in a thread; it also raises it."""

    def not_of_a_thread(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in record.getMessage()

    log = logging.getLogger("absl")
    log.addFilter(not_of_a_thread)
    try:
        yield
    finally:
        log.removeFilter(not_of_a_thread)


def _remove(path: Path) -> None:
    """Delete a folder and its content, a file, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _Damaged(Exception):
    """Why a checkpoint cannot be used."""


def _named_arrays(tree: Any) -> dict[str, jax.Array]:
    """Leaves by path ("params.layers.q_LDNH"), in the order of the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    assert len(named) == len(leaves)
    return named


def _described(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Type and shape of each array, as text."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


def _refuse_other_model(folder: Path, saved: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise UserError if names, types or shapes differ."""
    for name in sorted({*ours, *saved}, reverse=True):  # params before opt_state
        if saved.get(name) != ours.get(name):
            raise UserError(
                f"{folder}: belongs to another model or optimizer: {name} expected "
                f"{ours.get(name, 'absent')}, found {saved.get(name, 'absent')}; name another run"
            )


def _write_manifest(
    folder: Path, step: int, arrays: Mapping[str, jax.Array], extra: Mapping[str, Any]
) -> None:
    """Write manifest.json: sizes and checksums of all other files, and its own checksum."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc32, paths))
    files = {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "crc32": crc}
        for p, crc in zip(paths, sums, strict=True)
    }
    manifest = {
        "format": _FORMAT,
        "step": step,
        "extra": extra,
        "files": files,
        "arrays": _described(arrays),
    }
    text = json.dumps(manifest)
    manifest = json.loads(text) | {"crc32": zlib.crc32(text.encode())}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")


def _verified_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after all files of the checkpoint have been compared with it.

    Raises: _Damaged if one differs; UserError if the checkpoint has another format.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="ascii"))
        expected = manifest.pop("crc32")
        found = zlib.crc32(json.dumps(manifest).encode())
    except OSError as error:
        raise _Damaged(f"{_MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged(f"{_MANIFEST} differs from what was written") from error
    if found != expected:
        raise _Damaged(f"{_MANIFEST} differs from what was written (checksum)")
    if manifest.get("format") != _FORMAT:
        raise UserError(
            f"{folder}: has format {str(manifest.get('format'))[:40]}, expected {_FORMAT}; "
            "go on with the version of sparrow that wrote it"
        )
    _check_form(folder, manifest)
    with ThreadPoolExecutor() as pool:
        files = manifest["files"].items()
        reasons = list(pool.map(lambda item: _fault(folder / item[0], item[0], **item[1]), files))
    for reason in filter(None, reasons):
        raise _Damaged(reason)
    return manifest


def _check_form(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise _Damaged for a manifest that _write_manifest cannot have made, in spite of its sum."""
    step, files = manifest.get("step"), manifest.get("files") or {}
    if step != int(folder.name[5:]):
        raise _Damaged(f"it holds step {str(step)[:20]}: the folder was renamed")
    sound = all(isinstance(manifest.get(key), dict) for key in ("files", "arrays", "extra"))
    sound = sound and all(_is_entry(folder, *item) for item in files.items())
    if not sound:
        raise _Damaged(f"{_MANIFEST} differs from what was written (files, arrays or extra)")


def _is_entry(folder: Path, name: str, entry: Any) -> bool:
    """A file of the checkpoint, not one outside of it, with its size and sum."""
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    known = isinstance(entry, dict) and set(entry) == {"bytes", "crc32"}
    return inside and known and all(type(value) is int for value in entry.values())


def _fault(path: Path, name: str, bytes: int, crc32: int) -> str | None:
    """What is wrong with a file, or None."""
    try:
        size = path.stat().st_size
        if size != bytes:
            return f"{name} has {size} bytes, expected {bytes}"
        if _crc32(path) != crc32:
            return f"{name} has another checksum than when it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def _sync_tree(folder: Path) -> None:
    """Force a folder and everything in it to the disk."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(_sync, [*folder.rglob("*"), folder]))


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
