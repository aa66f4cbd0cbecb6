"""The record of a run: metrics.jsonl, TensorBoard event files, one console line per step.

metrics.jsonl is the record; the rest can be made again from it. It has one JSON object per training
step: `step`, flat `group/name` values, `bins` (one dict per length bin), `alarms` (strings).

Worked example of a resume at step 2 after a kill -9 while step 3 was being written:

    {"step": 0, ...}
    {"step": 1, ...}
    {"step": 2, ...}
    {"step": 3, "rew                                            (no newline: the writer was killed)

    MetricsWriter(run_dir, resume_step=2, ...) keeps steps 0 and 1, byte for byte.

Write the record of a step *before* its checkpoint is complete: a checkpoint that says "go on at
step s" then finds the records of all steps below s, and the file has no gap.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.records import record_checks
from common.records.event_files import EventFiles
from common.records.progress import Progress, format_seconds

FILE_NAME = "metrics.jsonl"
TIMING_PREFIXES = ("time/", "throughput/")

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the step's responses",
    "reward/std": "standard deviation of the rewards",
    "reward/groups_with_signal": "share of groups with different rewards",
    "reward/missing": "responses without a reward",
    "response/len_mean": "mean response length, tokens",
    "response/len_max": "longest response, tokens",
    "response/finished": "share of responses that ended with a stop token",
    "mismatch/p5_min": "lowest 5th percentile of alpha over the judged length bins",
    "mismatch/p1_min": "lowest 1st percentile of alpha over the judged length bins",
    "mismatch/mean": "mean acceptance rate alpha",
    "mismatch/k1": "k1 estimate of KL(sparse || dense), nats per token",
    "mismatch/k3": "k3 estimate of KL(sparse || dense), nats per token",
    "mismatch/ess": "effective sample size of the importance weights, share of tokens",
    "mismatch/abs_diff": "mean |p_sparse - p_dense| of the sampled tokens",
    "mismatch/replay_error": "largest |log-prob replayed - decoded| of a sampled token",
    "mismatch/ratio_max": "largest p_dense / p_sparse of a sampled token",
    "controller/changes": "length bins with a budget that the controller changed after this step",
    "controller/dense_bins": "length bins that read every page from the next step on",
    "controller/moves": "each change in words: positions, old and new k, reason",
    "grpo/loss": "GRPO loss",
    "grpo/grad_norm": "global gradient norm before clipping, mean over optimizer steps",
    "grpo/clip_fraction": "share of loss tokens with a clipped ratio",
    "grpo/masked_fraction": "share of response tokens dropped by the correction",
    "grpo/truncated_fraction": "share of response tokens with a weight cut to the cap",
    "grpo/entropy": "mean entropy of the dense policy, nats",
    "grpo/ratio_first_minibatch": "largest factor between the learner's and the scorer's "
    "probability of a token before the first optimizer step (numerics; the loss takes exactly 1)",
    "grpo/kl_reference": "k3-KL to the start policy, nats per token (with kl_coef > 0)",
    "grpo/num_updates": "optimizer steps taken; minibatches without signal take none",
    "rollout/share_of_pages": "pages read / pages present in the sparse layers, all decoded tokens",
    "rollout/tokens": "sampled tokens",
    "rollout/prefill_tokens": "prompt tokens prefilled: once per prompt, whatever the group size",
    "eval/start_reward": "held-out reward of the start policy (first record only)",
    "eval/reward": "held-out reward after the step, dense decoding",
    "eval/reward_low": "lower end of its 95 % interval",
    "eval/reward_high": "upper end of its 95 % interval",
    "weights/version": "weight version that sampled the step",
    "time/rollout": "seconds sampling",
    "time/reward": "seconds scoring answers; with baseline=greedy, sampling greedy responses too",
    "time/score": "seconds computing dense log-probs",
    "time/mismatch": "seconds in the exact replay and its statistics",
    "time/pack": "seconds computing advantages and corrections and packing the batch",
    "time/update": "seconds in optimizer steps",
    "time/push": "seconds pushing weights",
    "time/checkpoint": "seconds of the latest save before this step",
    "time/step": "seconds of the step without push, evaluation and checkpoint",
    "throughput/rollout_tokens_per_second": "sampled tokens / time/rollout",
    "throughput/step_tokens_per_second": "sampled tokens / time/step",
}
"""The metrics of a record, with their meanings; eval/* only in steps with an evaluation.

Left out are batch/* (common/objective/batching.py) and the interval of eval/start_reward.
"""

_KEY = re.compile(r"[a-z0-9_]+/[a-z0-9_]+")


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """All complete records of a run, in order; [] if there is no metrics.jsonl yet.

    An incomplete last line is left out: the run is writing it, or was killed while it did.
    Raises UserError with file and line for any other line that is not a JSON object with `step`.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    return [record for record, _ in _complete_lines(path)]


def comparable(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records without `time/` and `throughput/`, which alone differ between equal CPU runs."""
    return [{k: v for k, v in r.items() if not k.startswith(TIMING_PREFIXES)} for r in records]


def evaluations(
    records: Iterable[Mapping[str, Any]],
) -> list[tuple[int, float, float | None, float | None]]:
    """(updates before it, held-out reward, low, high) of each evaluation, start policy first."""
    points = []
    for record in records:
        for updates, prefix in ((0, "eval/start_"), (record["step"] + 1, "eval/")):
            value, low, high = (
                record.get(f"{prefix}{k}") for k in ("reward", "reward_low", "reward_high")
            )
            if isinstance(value, int | float):
                points.append((updates, value, low, high))
    return points


def _complete_lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """(record, its line with the newline) of every complete line."""
    lines = path.read_bytes().split(b"\n")
    complete = []
    for number, line in enumerate(lines[:-1], start=1):  # lines[-1] follows the last newline
        try:
            record = record_checks.parse(line, METRICS)
        except ValueError as error:
            if number == len(lines) - 1 and not lines[-1]:
                break  # a crash of the machine may leave garbage at the end of the last line
            raise UserError(
                f"{path}:{number}: expected one JSON object per line, got {line[:60]!r} ({error}); "
                "restore the file or start a new run directory"
            ) from None
        complete.append((record, line + b"\n"))
    return complete


def read_sound(run_dir: Path | str) -> tuple[list[dict[str, Any]], int]:
    """(records in order, number of lines left out): for reports, which have to survive damage.

    A line is left out if it is not a record, or if its step is not later than that of the record
    before. An incomplete last line is left out too, but not counted.
    """
    path, records, damaged = Path(run_dir) / FILE_NAME, [], 0
    if not path.exists():
        return [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = record_checks.parse(line, METRICS)
        except ValueError:
            damaged += 1
            continue
        if records and record["step"] <= records[-1]["step"]:
            damaged += 1
        else:
            records.append(record)
    return records, damaged


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _drop_from(path: Path, resume_step: int) -> None:
    """Keep the records with step < resume_step: write a new file and rename it over the old one."""
    kept = []
    if path.exists():
        kept = [(r, line) for r, line in _complete_lines(path) if r["step"] < resume_step]
    steps = [record["step"] for record, _ in kept]
    if steps != list(range(resume_step)):
        missing = sorted(set(range(resume_step)) - set(steps))
        warnings.warn(
            f"{path}: the run goes on at step {resume_step}, but records of earlier steps are "
            f"missing or repeated ({missing=}); metrics.jsonl stays incomplete",
            stacklevel=3,
        )
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(line for _, line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _clean(value: Any, name: str, bad: list[str]) -> Any:
    """`value` in plain JSON types; NaN and infinities become None, named in `bad`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _clean(v, f"{name}.{k}" if name else str(k), bad) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v, f"{name}[{i}]", bad) for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a numpy or framework scalar
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    if not isinstance(value, float):
        raise ValueError(
            f"{name}={value!r}: expected a number, text, None, or a list or dict of them"
        )
    if not math.isfinite(value):
        bad.append(name)
        return None
    return value


def make_record(
    step: int,
    values: Mapping[str, Any],
    *,
    bins: Sequence[Mapping[str, Any]] = (),
    alarms: Sequence[str] = (),
) -> dict[str, Any]:
    """One record, ready for json.dumps(allow_nan=False).

    NaN and infinities become null, and one alarm names them, except for timings: equal runs must
    have equal alarms. Raises ValueError for a key that is not `group/name`.
    """
    bad: list[str] = []
    record: dict[str, Any] = {"step": int(step)}
    for key, value in values.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key=}: expected 'group/name' in lower case, such as 'reward/mean'")
        record[key] = _clean(value, key, bad)
    record["bins"] = _clean(list(bins), "bins", bad)
    record["alarms"] = [str(a) for a in alarms]
    bad = [name for name in bad if not name.startswith(TIMING_PREFIXES)]
    if bad:
        record["alarms"].append(f"{len(bad)} value(s) not finite: {', '.join(bad[:8])}")
    return record


def console_line(
    record: Mapping[str, Any], *, total_steps: int, tau: float | None, eta_seconds: float
) -> str:
    """The console line of a step; '-' stands for a value that the record does not have."""

    def show(key: str, form: str) -> str:
        value = record.get(key)
        return "-" if value is None else format(value, form)

    p5 = record.get("mismatch/p5_min")
    against = "" if tau is None else f" {'<' if p5 is not None and p5 < tau else 'of'} tau {tau:g}"
    parts = [
        f"step {record['step'] + 1:>{len(str(total_steps))}}/{total_steps}",
        f"reward {show('reward/mean', '.3f')}",
        f"length {show('response/len_mean', '.0f')}",
        f"p5 min {show('mismatch/p5_min', '.3f')}{against}",
        f"{show('throughput/step_tokens_per_second', ',.0f')} tokens/s",
    ]
    if record.get("eval/reward") is not None:
        parts.append(f"held-out {show('eval/reward', '.3f')}")
    parts.append(f"ETA {format_seconds(eta_seconds)}")
    parts += [f"BUDGET {move}" for move in record.get("controller/moves", ())]
    return "  ".join(parts + [f"ALARM {alarm}" for alarm in record["alarms"]])


class MetricsWriter:
    """Writes the record of a run; a context manager.

    run_dir must exist. resume_step: the step that is written next; records from it on are removed
    first, atomically, and a warning names gaps below it. total_steps and tau: for the console.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        resume_step: int,
        console: bool,
        total_steps: int,
        tau: float | None = None,
    ) -> None:
        run_dir = Path(run_dir)
        if resume_step < 0:
            raise ValueError(f"{resume_step=}: expected the number of the next step, 0 or more")
        _drop_from(run_dir / FILE_NAME, resume_step)
        self._file = (run_dir / FILE_NAME).open("ab")
        self._next, self._first, self._total, self._tau = resume_step, resume_step, total_steps, tau
        self._start = time.monotonic()
        self._progress = Progress("training", stream=sys.stdout).__enter__() if console else None
        self._board: EventFiles | None = None
        if importlib.util.find_spec("tensorboard") is not None:
            self._board = EventFiles(run_dir, resume_step)
        elif self._progress:
            self._progress.print("TensorBoard files are not written: pip install tensorboard")
        if self._progress and self._progress.is_bar:
            self._progress(resume_step, total_steps)

    def write(
        self,
        step: int,
        values: Mapping[str, Any],
        *,
        bins: Sequence[Mapping[str, Any]] = (),
        alarms: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Append the record of `step` and return it; it is on disk when this returns.

        Raises ValueError if `step` is not the next one, and for a key that is not `group/name`.
        """
        if step != self._next:
            raise ValueError(f"{step=}: expected step {self._next}, each step exactly once")
        record = make_record(step, values, bins=bins, alarms=alarms)
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._next = step + 1
        if self._board:
            self._board.write(record)
        if self._progress:
            self._show(record)
        return record

    def _show(self, record: Mapping[str, Any]) -> None:
        assert self._progress is not None
        per_step = (time.monotonic() - self._start) / (self._next - self._first)
        eta = per_step * max(self._total - self._next, 0)
        line = console_line(record, total_steps=self._total, tau=self._tau, eta_seconds=eta)
        self._progress.print(line, style="bold red" if record["alarms"] else None)
        if self._progress.is_bar:
            self._progress(self._next, self._total)

    def close(self) -> None:
        """Close the files and the progress bar; a second call does nothing."""
        self._file.close()
        if self._board:
            self._board.close()
            self._board = None
        if self._progress:
            self._progress.__exit__()
            self._progress = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
