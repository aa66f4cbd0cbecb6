"""The tail of alpha under a schedule in use: rollouts with the schedule itself, judged by bin.

A profile measures uniform budgets, and a schedule is put together from several of them. Under the
schedule the keys and values of early positions are written with fewer pages than under the budget
of a later bin, so the tail of a bin in use is not the one in the profile. This module measures the
tail in use, either on rollouts under the schedule or on given text, where every position is
replayed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.mismatch import acceptance
from common.profile import sampled_profile, text_profile
from common.profile.kept_parts import KeptParts, weights_stamp
from common.records.run_dir import atomic_write_text
from common.schedule.profile_file import quantile_name
from common.schedule.schedule import Schedule, resolve, written
from common.schedule.schedule_search import bins_text
from common.setup import open_parts

CHECK_FORMAT = "sparrow-schedule-check-1"


def check(config: Config, out: Path) -> dict[str, Any]:
    """Roll out and replay with config.rollout.schedule; print and write its tail by length bin.

    The prompts are those of a profile, used for neither training nor evaluation. Bins are the
    schedule's own, or mismatch.bin_tokens wide for "k=8". tau and quantile: config.mismatch.
    """
    sampled_profile.refuse_nucleus(config)
    c, schedule = config.mismatch, _sparse_schedule(config)
    source = f"sampled and replayed with the schedule itself, {c.profile_prompts} prompts x "
    source += f"{c.profile_samples}"
    key = ["schedule", sampled_profile.FIELDS, schedule.to_json(), dataclasses.asdict(config),
           weights_stamp(config.model.path)]  # fmt: skip
    with open_parts(config) as parts, KeptParts(out, key) as kept:
        found = dict(sampled_profile.replayed(parts, "schedule", schedule, kept))
        summary = json.loads(str(found.pop("line")))
        return _judge(config, schedule, found, summary, source, out)


def check_text(
    config: Config, text: Path, out: Path, *, max_tokens: int, sequences: int
) -> dict[str, Any]:
    """The same on given text: every position replayed with the schedule, nothing sampled.

    The summary has null for what only samples have. Intervals treat blocks of the text as
    independent, as its profile does. A stopped check is resumed.
    """
    schedule = _sparse_schedule(config)
    size = {"max_tokens": max_tokens, "sequences": sequences}
    with text_profile.measured(config, text, out, {"schedule": schedule}, **size) as (read, found):
        (m,) = found["mean"]
        T = read.tokens_WT.shape[1]
        summary = {"k": m.k, "reward": None, "len_mean": float(T),
                   "share_of_pages": schedule.share_of_pages(np.arange(1, T)),
                   "abs_diff": None, "k3": None}  # fmt: skip
        arrays = {"alpha_BT": m.alpha_BT, "mask_BT": m.mask_BT, "group_B": m.group_B}
        source = f"{read.name}, replayed with the schedule itself"
        return _judge(config, schedule, arrays, summary, source, out, text_profile.BLOCK_TOKENS)


def _sparse_schedule(config: Config) -> Schedule:
    """The schedule that the configuration names; UserError if it has no tail."""
    name, c = config.rollout.schedule, config.mismatch
    schedule = resolve(name, page_size=config.rollout.page_size, bin_tokens=c.bin_tokens)
    if schedule is None or schedule.is_dense:
        raise UserError(f"--schedule={name}: is dense, alpha is 1; name a sparse schedule")
    return schedule


def _judge(
    config: Config, schedule: Schedule, arrays: Mapping[str, np.ndarray], summary: Any, source: str,
    out: Path, block: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Statistics by bin against tau and against the schedule's profile, printed and written."""
    c = config.mismatch
    stats = acceptance.statistics(
        **arrays, bin_tokens=schedule.bin_tokens, min_tokens=c.min_tokens, block_tokens=block
    )
    verdict = acceptance.verdict(stats, c.tau, c.quantile)
    said = promised(schedule, quantile_name(c.quantile))
    unreached = set(range(len(schedule.budgets))) - {s.bin for s in stats}
    record = {
        "format": CHECK_FORMAT,
        "model": config.model.path or f"from scratch, seed {config.model.init_seed}",
        "source": source,
        "tau": c.tau,
        "quantile": c.quantile,
        "meets": verdict.meets,
        "failing_bins": list(verdict.failing),
        "unjudged_bins": sorted({*verdict.unjudged, *unreached}),
        "bins": [
            {"k": written(schedule.budget(s.start)), **s.__dict__, "promised": said.get(s.bin)}
            for s in stats
        ],
        "summary": summary,
        "schedule": schedule.to_json(),
    }
    atomic_write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    print("\n".join(describe(record, schedule, "prompts" if block is None else "blocks")))
    print(f"wrote {out}")
    return record


def promised(schedule: Schedule, name: str) -> dict[int, dict[str, Any]]:
    """By bin what a schedule's profile said: {"k": 4, "p5": 0.9, "p5_low": 0.88, "p5_high": 0.93}.

    k: the measured budget that the bin rests on. A dense bin is promised 1, since a uniform dense
    budget has it; after sparse bins it has less. Bins of which the schedule's history says nothing
    are absent, and so is another quantile.
    """
    keys, bins, result = (name, f"{name}_low", f"{name}_high"), schedule.provenance.get("bins"), {}
    for i, entry in enumerate(bins if isinstance(bins, list) else []):
        if not isinstance(entry, dict) or entry.get("start") != i * schedule.bin_tokens:
            continue
        k, values = entry.get("measured_k"), [entry.get(key) for key in (name, "low", "high")]
        if entry.get("k") == "dense":
            k, values = "dense", [1.0, 1.0, 1.0]
        if all(type(value) in (int, float) for value in values):
            result[i] = {"k": k, **dict(zip(keys, values, strict=True))}
    return result


def describe(record: Mapping[str, Any], schedule: Schedule, units: str) -> list[str]:
    """The schedule, a line for each bin with its interval, and whether every judged bin holds."""
    tau, name, bins = record["tau"], quantile_name(record["quantile"]), record["bins"]
    lines = [schedule.describe()]
    for b in bins:
        word = "holds" if b[name] >= tau else "FAILS"
        line = f"positions {b['start']}-{b['end']}  k = {b['k']}  {name} {_span(b, name)}"
        if b["promised"]:
            line += f", promised {_span(b['promised'], name)}"
        line += f"  {b['count']} tokens, {b['num_units']} {units}  "
        lines.append(line + (word if b["enough"] else "too few tokens to judge"))
    reached = {b["bin"] for b in bins}
    if missing := [i for i in range(len(schedule.budgets)) if i not in reached]:
        width = {"bin_tokens": schedule.bin_tokens}
        lines.append(f"no tokens in {bins_text(missing, width)}: not judged")
    judged = [b for b in bins if b["enough"]]
    lines += _against_the_promise(judged, name)
    held = len(judged) - len(record["failing_bins"])
    lines.append(
        f"in use, {held} of {len(judged)} judged bins hold {name} >= {tau:g}"
        if judged
        else "no bin has enough tokens to judge; name a longer text, or more prompts"
    )
    own = [schedule.provenance.get(key) for key in ("tau", "quantile")]
    if None not in own and own != [tau, record["quantile"]]:
        lines.append(
            f"the schedule was found for tau={own[0]}, quantile={own[1]}; it is judged by "
            f"mismatch.tau={tau:g}, mismatch.quantile={record['quantile']:g}"
        )
    return lines


def _span(values: Mapping[str, Any], name: str) -> str:
    """A quantile with its interval."""
    return f"{values[name]:.3f} [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"


def _against_the_promise(judged: list[dict[str, Any]], name: str) -> list[str]:
    """One line: in how many bins the tail is lower than promised, as far as three digits show."""
    gaps = [(b["promised"][name] - b[name], b) for b in judged if b["promised"]]
    lower = sum(gap >= 0.0005 for gap, _ in gaps)
    if not gaps:
        return []
    text = f"{name} is lower than the schedule's profile promised in {lower} of {len(gaps)} bins"
    if lower:
        gap, b = max(gaps, key=lambda pair: pair[0])
        text += f", by {gap:.3f} at most (positions {b['start']}-{b['end']})"
    return [text]
