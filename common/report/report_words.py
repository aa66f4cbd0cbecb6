"""What a report says in words and key numbers: verdict, subtitle, tiles. Plain text, no HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from common.records.metrics import evaluations
from common.report.plots import is_number
from common.report.report_runs import LoadedRun, flatten

_SEED_KEYS = ("name", "task.seed", "rollout.seed", "model.init_seed", "warmup.seed")
_ROLLOUT = "throughput/rollout_tokens_per_second"
_PERCENTILE = {"p5": "5th", "p1": "1st"}
_STEP = "throughput/step_tokens_per_second"


def seeds_per_arm(runs: Sequence[LoadedRun]) -> list[int]:
    """Number of runs of each arm; runs that differ in name and seeds only are one arm."""
    arms: dict[str, int] = {}
    for number, run in enumerate(runs):
        flat = {k: v for k, v in flatten(run.config).items() if k not in _SEED_KEYS}
        arm = json.dumps(flat, sort_keys=True) if flat else f"no configuration {number}"
        arms[arm] = arms.get(arm, 0) + 1
    return list(arms.values())


def subtitle(runs: Sequence[LoadedRun]) -> str:
    """Steps done and state of each run, in one line."""
    return "; ".join(f"{run.plot.name}: {_state(run)}" for run in runs)


def _state(run: LoadedRun) -> str:
    done = run.plot.records[-1]["step"] + 1 if run.plot.records else 0
    total = run.config.get("num_steps")
    if total is None or not is_number(total):
        return f"{done} steps"
    if done >= total:
        return f"complete, {total} steps"
    return f"{done} of {total} steps, still running or stopped"


def verdict(runs: Sequence[LoadedRun]) -> str:
    """One paragraph: held-out reward, p5 against tau, speedup, number of seeds, what is missing."""
    sentences = [_reward(run) for run in runs]
    sentences += [_mismatch(run) for run in runs if not run.plot.is_dense]
    sentences += _against_dense(runs)
    sentences += _speedup(runs)
    sentences.append(_seeds(runs))
    running = [r.plot.name for r in runs if "still running" in _state(r)]
    if running:
        sentences.append(f"Not complete: {', '.join(running)}; these numbers are provisional.")
    for run in runs:
        if run.damaged:
            sentences.append(f"{run.plot.name}: {run.damaged} damaged line(s) are left out.")
    alarms = sum(len(r.get("alarms") or []) for run in runs for r in run.plot.records)
    if alarms:
        sentences.append(f"{alarms} alarm(s) were raised, see below.")
    return " ".join(sentence for sentence in sentences if sentence)


def held_out(run: LoadedRun) -> tuple[int, float, float | None, float | None] | None:
    """(updates done, reward, low, high) of the last evaluation, or None."""
    points = evaluations(run.plot.records)
    return points[-1] if points else None


def _reward(run: LoadedRun) -> str:
    name, last = run.plot.name, held_out(run)
    if last:
        step, reward, low, high = last
        interval = "" if low is None else f" (95 % interval {low:.3f} to {high:.3f})"
        points = evaluations(run.plot.records)
        since = f", from {points[0][1]:.3f}" if len(points) > 1 else ""
        return f"{name}: held-out reward {reward:.3f}{interval} after {step} step(s){since}."
    train = run.plot.series("reward/mean")[1]
    if len(train):
        tail = train[-5:]
        return (
            f"{name}: no held-out evaluation; training reward {tail.mean():.3f} "
            f"(mean of the last {len(tail)} step(s))."
        )
    return f"{name}: no step finished yet."


def _against_dense(runs: Sequence[LoadedRun]) -> list[str]:
    """Held-out reward of each sparse run minus that of the dense one, and what it means.

    The half-width of the difference is the root of the sum of squares of the two half-widths: right
    for independent prompts, too wide where both runs answer the same prompts.
    """
    base = dense_run(runs)
    end = held_out(base) if base else None
    if base is None or end is None or end[2] is None or end[3] is None:
        return []
    sentences = []
    for run in runs:
        mine = held_out(run)
        if run is base or mine is None or mine[0] != end[0]:
            continue
        _, reward, low, high = mine
        if low is None or high is None:
            continue
        half = float(np.hypot(high - low, end[3] - end[2])) / 2
        gap = reward - end[1]
        start = evaluations(run.plot.records)[0]
        words = "the same within this noise" if abs(gap) <= half else "a difference beyond it"
        if start[0] == 0 and high < start[1]:
            words += f"; it ends under the {start[1]:.3f} it started from: this training fails"
        sentences.append(
            f"{run.plot.name} minus {base.plot.name}: {gap:+.3f} "
            f"[{gap - half:+.3f}, {gap + half:+.3f}] over held-out prompts, {words}."
        )
    return sentences


def _mismatch(run: LoadedRun) -> str:
    name = _criterion(run)
    steps, tail = run.plot.series(f"mismatch/{name}_min")
    if not len(tail):
        return f"{run.plot.name}: mismatch not measured." if run.plot.records else ""
    worst = int(np.argmin(tail))
    text = f"{run.plot.name}: the lowest {_PERCENTILE[name]} percentile of alpha was "
    text += f"{tail[worst]:.3f}"
    tau = run.plot.tau
    if tau is None:
        return text + "."
    below = int((tail < tau).sum())
    if not below:
        return text + f", at or above tau = {tau:g} at all {len(tail)} measured steps."
    return (
        text + f" (step {int(steps[worst])}), below tau = {tau:g} at {below} of {len(tail)} "
        "measured steps."
    )


def _criterion(run: LoadedRun) -> str:
    """The tail that the run's recipe judges."""
    mismatch = run.config.get("mismatch")
    is_p1 = isinstance(mismatch, Mapping) and mismatch.get("quantile") == 0.01
    return "p1" if is_p1 else "p5"


def _median(run: LoadedRun, key: str) -> float | None:
    values = run.plot.settled(key)
    return float(np.median(values)) if len(values) else None


def dense_run(runs: Sequence[LoadedRun]) -> LoadedRun | None:
    """The first run that was sampled densely: what speed is compared with."""
    return next((run for run in runs if run.plot.is_dense), None)


def ratio(run: LoadedRun, base: LoadedRun | None, key: str) -> float | None:
    """Median throughput of `run` over that of `base`; None where one is missing."""
    if base is None or base is run:
        return None
    mine, theirs = _median(run, key), _median(base, key)
    return mine / theirs if mine is not None and theirs else None


def _speedup(runs: Sequence[LoadedRun]) -> list[str]:
    base = dense_run(runs)
    sparse = [run for run in runs if not run.plot.is_dense]
    if not sparse:
        return []
    if base is None:
        return ["No dense run is among these, so no speedup is stated."]
    sentences = []
    for run in sparse:
        rollout, step = ratio(run, base, _ROLLOUT), ratio(run, base, _STEP)
        if rollout is not None:
            whole = "" if step is None else f" and {step:.2f}x in the whole step"
            sentences.append(
                f"{run.plot.name} sampled {rollout:.2f}x the tokens per second of "
                f"{base.plot.name}{whole} (medians, measured)."
            )
    return sentences


def _seeds(runs: Sequence[LoadedRun]) -> str:
    counts = seeds_per_arm(runs)
    if max(counts) == 1:
        one = "One seed" if len(runs) == 1 else "One seed each"
        return f"{one}: differences between runs may be chance."
    return f"{len(counts)} arm(s) with {', '.join(map(str, counts))} seed(s)."


def tiles(runs: Sequence[LoadedRun]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Key numbers: (title, one (value, remark) per run); a missing value is '-'."""
    base = dense_run(runs)
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        ("Held-out reward", [_held_tile(run) for run in runs]),
        ("Lowest tail of alpha", [_tail_tile(run) for run in runs]),
        ("Rollout tokens/s", [_speed_tile(run, base, _ROLLOUT) for run in runs]),
        ("Whole-step tokens/s", [_speed_tile(run, base, _STEP) for run in runs]),
        ("Pages read", [_last_tile(run, "rollout/share_of_pages", 100, " %") for run in runs]),
        ("Response length", [_last_tile(run, "response/len_mean", 1, " tokens") for run in runs]),
    ]
    return [(title, values) for title, values in rows if any(v != "-" for v, _ in values)]


def _held_tile(run: LoadedRun) -> tuple[str, str]:
    last = held_out(run)
    if last is None:
        return "-", "not evaluated"
    _, reward, low, high = last
    return f"{reward:.3f}", "" if low is None else f"{low:.2f}..{high:.2f}"


def _tail_tile(run: LoadedRun) -> tuple[str, str]:
    name = _criterion(run)
    tail = run.plot.series(f"mismatch/{name}_min")[1]
    if not len(tail):
        return "-", "not measured"
    tau = run.plot.tau
    return f"{tail.min():.3f}", name if tau is None else f"{name}, tau {tau:g}"


def _speed_tile(run: LoadedRun, base: LoadedRun | None, key: str) -> tuple[str, str]:
    median, factor = _median(run, key), ratio(run, base, key)
    if median is None:
        return "-", ""
    return f"{median:,.0f}", "" if factor is None else f"{factor:.2f}x"


def _last_tile(run: LoadedRun, key: str, scale: float, unit: str) -> tuple[str, str]:
    values = run.plot.series(key)[1]
    if not len(values):
        return "-", ""
    return f"{scale * values[-1]:.0f}{unit}", "last step"
