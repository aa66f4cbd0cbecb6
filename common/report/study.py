"""Dense, fixed aggressive and scheduled sparse rollouts over several seeds, with intervals.

Each seed is a whole replication: weights, warm-up, profile, schedule, prompts and sampling noise of
its own; the arms of a seed share its warm start and its prompts. Only the scheduled arm has the
controller, if the recipe has one. Held-out prompts and their noise are the same everywhere. Every
part is an ordinary command, so it resumes where it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.records import metrics, stopping
from common.records.progress import format_seconds
from common.records.run_dir import atomic_write_text
from common.report import plots, plots_overview

REWARDS = ("start", "end", "train_reward")
SEED_KEYS = ("model.init_seed", "warmup.seed", "task.seed", "rollout.seed")


def run_study(config_file: str, out: Path, *, seeds: int, fixed: str, jobs: int) -> None:
    """Run the missing parts, `jobs` at a time, then write study.json and study.svg."""
    if seeds < 1 or jobs < 1:
        raise UserError(f"{seeds=}, {jobs=}: expected at least 1")
    out.mkdir(parents=True, exist_ok=True)
    arms = {"dense": "dense", "scheduled": "{seed_dir}/schedule.json", f"fixed {fixed}": fixed}
    lanes = _Lanes(config_file, jobs, total=seeds * (3 + len(arms)))
    work = [(arm, text, seed) for seed in range(seeds) for arm, text in arms.items()]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(lambda seed: lanes.prepare(out / f"seed{seed}", seed), range(seeds)))
            list(pool.map(lambda w: lanes.train(out / f"seed{w[2]}", *w), work))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            lanes.stop()
            raise
    result = summarise(out, list(arms), seeds)
    text = json.dumps(_with_null(result), indent=1, allow_nan=False)
    atomic_write_text(out / "study.json", text + "\n")
    runs = {arm: [out / f"seed{s}" / folder(arm) for s in range(seeds)] for arm in arms}
    figure = plots_overview.study_figure(
        {arm: [curve(run) for run in paths] for arm, paths in runs.items()},
        {arm: [tail(run) for run in paths] for arm, paths in runs.items()},
        title="Held-out reward, dense decoding",
    )
    if figure:
        plots.save(figure, out / "study.svg")
    print_table(result)
    print(f"wrote {out}/study.json and {out}/study.svg")


def folder(arm: str) -> str:
    """Run directory of an arm below its seed's."""
    return arm.replace(" ", "-").replace("=", "").replace("/", "-")


class _Lanes:
    """Runs commands, each training run on a core of its own."""

    def __init__(self, config_file: str, jobs: int, total: int):
        self._config, self._total, self._done = config_file, total, 0
        self._start = time.monotonic()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._cores: queue.SimpleQueue[int] = queue.SimpleQueue()
        for core in range(jobs):
            self._cores.put(core)

    def stop(self) -> None:
        """End what runs; each command stops at its last checkpoint."""
        running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

    def prepare(self, seed_dir: Path, seed: int) -> None:
        """Warm-up, profile and schedule of a seed."""
        seed_dir.mkdir(exist_ok=True)
        model = f"--model={seed_dir}/warmup/model"
        self._run(seed_dir, seed, "warmup", f"--run={seed_dir}/warmup")
        if not (seed_dir / "profile.json").is_file():
            self._run(seed_dir, seed, "profile", model, f"--out={seed_dir}/profile.json")
        profile = f"--profile={seed_dir}/profile.json"
        # A prompt of hundreds of tokens leaves the first bins without any response token.
        out = f"--out={seed_dir}/schedule.json"
        self._run(seed_dir, seed, "schedule", profile, out, "--extrapolate")

    def train(self, seed_dir: Path, arm: str, schedule: str, seed: int) -> None:
        """One arm of a seed, on a core of its own."""
        core = self._cores.get()
        try:
            self._run(
                seed_dir,
                seed,
                "train",
                f"--model={seed_dir}/warmup/model",
                f"--run={seed_dir}/{folder(arm)}",
                f"--core={core}",
                f"--config.rollout.schedule={schedule.replace('{seed_dir}', str(seed_dir))}",
                f"--config.name={arm}",
                *(["--config.mismatch.controller=false"] if arm != "scheduled" else []),
                log=folder(arm),
            )
        finally:
            self._cores.put(core)

    def _run(self, seed_dir: Path, seed: int, command: str, *flags: str, log: str = "") -> None:
        """A sparrow command as a process; its output goes to a log file beside the runs."""
        seeds = [f"--config.{key}={seed}" for key in SEED_KEYS]
        words = [sys.executable, "-m", "common.cli", command, f"--config={self._config}"]
        start = time.monotonic()
        path = seed_dir / f"{log or command}.log"
        with path.open("a", encoding="utf-8") as out:
            process = subprocess.Popen(
                [*words, *flags, *seeds], stdout=out, stderr=subprocess.STDOUT, env=_environment()
            )
            self._running.add(process)
            status = _wait(process)
            self._running.discard(process)
        if status:
            stopping.check()  # Ctrl-C reaches the command too
            raise UserError(f"{command} of seed {seed} ended with {status}; see {path}")
        self._done += 1
        print(
            f"[{self._done}/{self._total}] seed {seed} {log or command}: "
            f"{format_seconds(time.monotonic() - start)}, "
            f"{format_seconds(time.monotonic() - self._start)} in all",
            flush=True,
        )


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a command; KeyboardInterrupt if the study is told to stop meanwhile."""
    while True:
        stopping.check()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.2)


def _environment() -> dict[str, str]:
    """The caller's environment, with our packages importable from any directory."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path}


def curve(run: Path) -> list[tuple[int, float]]:
    """(updates done, held-out reward) of a run, the start policy first."""
    records = metrics.read_metrics(run)
    points = [(0, records[0]["eval/start_reward"])] if records else []
    return points + [(r["step"] + 1, r["eval/reward"]) for r in records if "eval/reward" in r]


def tail(run: Path) -> list[tuple[int, float]]:
    """(updates done, smallest 5th percentile of alpha over the length bins); empty if dense."""
    name = "mismatch/p5_min"
    records = metrics.read_metrics(run)
    return [(r["step"] + 1, r[name]) for r in records if r.get(name) is not None]


def summarise(out: Path, arms: Sequence[str], seeds: int) -> dict[str, Any]:
    """Per arm: rewards, pages read, worst tails, speed; and paired differences to dense."""
    table = {}
    for arm in arms:
        runs = [metrics.read_metrics(out / f"seed{s}" / folder(arm)) for s in range(seeds)]
        ends = [curve(out / f"seed{s}" / folder(arm)) for s in range(seeds)]
        table[arm] = {
            "start": [c[0][1] for c in ends],
            "end": [c[-1][1] for c in ends],
            "gain": [c[-1][1] - c[0][1] for c in ends],
            "share_of_pages": [_mean(r, "rollout/share_of_pages") for r in runs],
            "train_reward": [_mean(r[-4:], "reward/mean") for r in runs],
            "groups_with_signal": [_mean(r, "reward/groups_with_signal") for r in runs],
            "p5_min": [_mean(r, "mismatch/p5_min") for r in runs],
            "p1_min": [_mean(r, "mismatch/p1_min") for r in runs],
            "alpha_mean": [_mean(r, "mismatch/mean") for r in runs],
            "abs_diff": [_mean(r, "mismatch/abs_diff") for r in runs],
            "steps_with_alarm": [float(np.mean([bool(x["alarms"]) for x in r])) for r in runs],
            "rollout_tokens_per_second": [
                _mean(r[1:], "throughput/rollout_tokens_per_second") for r in runs
            ],
        }
    dense = np.array(table[arms[0]]["end"])
    paired = {
        arm: dict(zip(("mean", "low", "high"), plots_overview.mean_interval(row), strict=True))
        for arm in arms[1:]
        for row in [list(np.array(table[arm]["end"]) - dense)]
    }
    return {"seeds": seeds, "arms": table, "end_minus_dense": paired}


def _mean(records: list[dict[str, Any]], key: str) -> float:
    values = [r[key] for r in records if r.get(key) is not None]
    return float(np.mean(values)) if values else math.nan


def _with_null(value: Any) -> Any:
    """The same with None for NaN, which JSON does not have: not measured, or one seed only."""
    if isinstance(value, dict):
        return {key: _with_null(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_null(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def print_table(result: dict[str, Any]) -> None:
    """Means over seeds with 95 % intervals (Student's t)."""
    print(f"{result['seeds']} seeds, mean [95 % interval over seeds]")
    for arm, rows in result["arms"].items():
        cells = []
        for key in (*REWARDS, "share_of_pages", "p5_min", "p1_min", "steps_with_alarm"):
            mean, low, high = plots_overview.mean_interval(rows[key])
            if math.isnan(mean):  # dense runs have no alpha
                continue
            cells.append(f"{key} {mean:.3f} [{low:.3f}, {high:.3f}]")
        print(f"{arm:12} " + "  ".join(cells))
    for arm, d in result["end_minus_dense"].items():
        print(f"{arm:12} end - dense: {d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]")
