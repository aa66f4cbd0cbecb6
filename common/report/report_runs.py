"""Run directories in memory, as reports need them: configuration, run.json, schedule, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.records import json_checks
from common.records.metrics import read_sound
from common.report import plots
from common.schedule.schedule import parse as parse_schedule

_MAX_NAME = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run directory in memory: what the figures need, config.json, run.json.

    damaged: lines of metrics.jsonl that are left out.
    """

    plot: plots.Run
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    damaged: int = 0


def load_runs(run_dirs: Sequence[Path | str]) -> list[LoadedRun]:
    """Read config, run.json, schedule and metrics of each directory; names are made unique."""
    runs: list[LoadedRun] = []
    for path in map(Path, run_dirs):
        config, about = _json(path / "config.json"), _json(path / "run.json")
        mismatch, rollout = (_group(path, config, name) for name in ("mismatch", "rollout"))
        records, damaged = read_sound(path)
        if damaged:
            print(f"{path}: {damaged} damaged line(s) of metrics.jsonl are left out")
        if not (records or config or damaged):
            raise UserError(
                f"{path}: no metrics.jsonl and no config.json; expected a run directory"
            )
        name = str(config.get("name") or path.resolve().name)[:_MAX_NAME]
        taken = {run.plot.name for run in runs}
        unique = name if name not in taken else f"{name} ({path.resolve().name})"
        while unique in taken:
            unique += "'"
        plot = plots.Run(
            name=unique,
            records=[{**record, "bins": record.get("bins") or []} for record in records],
            schedule=_schedule(path, about, rollout),
            tau=_number(path, mismatch, "tau", 0.0, 1.0, None),
            page_size=_number(path, rollout, "page_size", 1, 2**20, 16),
        )
        runs.append(LoadedRun(plot=plot, config=config, about=about, damaged=damaged))
    return runs


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json_checks.read_object(path)
    except UserError as error:
        raise UserError(f"{error}; restore the file") from None


def _group(path: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name) or {}
    if not isinstance(group, Mapping):
        raise UserError(f"{path}/config.json: {name}: expected an object; restore the file")
    return group


def _number(
    path: Path, group: Mapping[str, Any], key: str, low: float, high: float, default: Any
) -> Any:
    """A number of config.json in [low, high], or the default where there is none."""
    value = group.get(key)
    if value is None:
        return default
    try:
        json_checks.number(value, key, low, high)
    except UserError as error:
        raise UserError(f"{path}/config.json: {error}; restore the file") from None
    return value


def _schedule(
    path: Path, about: Mapping[str, Any], rollout: Mapping[str, Any]
) -> Mapping[str, Any] | str | None:
    """The schedule a run used: from run.json, else schedule.json, else 'dense' if configured so."""
    for found, file in ((about.get("schedule"), "run.json"), (_kept(path), "schedule.json")):
        if found == "dense":
            return "dense"
        if found:
            try:
                parse_schedule(found, f"{path / file}")
            except UserError as error:
                raise UserError(f"{error}; restore the file") from None
            return found
    return "dense" if rollout.get("schedule") == "dense" else None


def _kept(path: Path) -> Any:
    """schedule.json of a run: "dense" or a schedule; empty if there is none."""
    file = path / "schedule.json"
    if file.exists() and file.stat().st_size < 100 and file.read_bytes().strip() == b'"dense"':
        return "dense"
    return _json(file)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; empty dicts stay as values."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
