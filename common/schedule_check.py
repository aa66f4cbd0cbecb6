"""The tail that a schedule has in use: sampled with it, replayed with it, judged bin by bin.

A profile measures uniform budgets, and a schedule is put together from several of them. Under the
schedule the keys and values of early positions are written with fewer pages than under the budget
of a later bin, so what a bin has in use is not what the profile said. This says it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from common import mismatch, profiling
from common.config import Config
from common.errors import UserError
from common.kept_parts import KeptParts, weights_stamp
from common.mismatch import BinStats
from common.profile_file import quantile_name
from common.run_dir import atomic_write_text
from common.schedule import Schedule, resolve, written
from common.setup import open_parts

CHECK_FORMAT = "sparrow-schedule-check-1"


def check(config: Config, out: Path) -> dict[str, Any]:
    """Roll out and replay with config.rollout.schedule; print and write its tail by length bin.

    On the prompts of a profile: neither trained on nor evaluated on. Bins are the schedule's own,
    or mismatch.bin_tokens wide for a uniform budget. tau and quantile: config.mismatch.
    """
    profiling.refuse_nucleus(config)
    c, name = config.mismatch, config.rollout.schedule
    schedule = resolve(name, page_size=config.rollout.page_size, bin_tokens=c.bin_tokens)
    if schedule is None or schedule.is_dense:
        raise UserError(f"--schedule={name}: is dense, alpha is 1; name a sparse schedule")
    key = ["schedule", schedule.to_json(), dataclasses.asdict(config),
           weights_stamp(config.model.path)]  # fmt: skip
    with open_parts(config) as parts, KeptParts(out, key) as kept:
        found = profiling.replayed(parts, "schedule", schedule, kept)
    width = schedule.bin_tokens if len(schedule.budgets) > 1 else c.bin_tokens
    stats = mismatch.statistics(
        found["alpha_BT"], found["mask_BT"], found["group_B"],
        bin_tokens=width, min_tokens=c.min_tokens,
    )  # fmt: skip
    verdict = mismatch.verdict(stats, c.tau, c.quantile)
    record = {
        "format": CHECK_FORMAT,
        "model": config.model.path or f"from scratch, seed {config.model.init_seed}",
        "source": f"sampled and replayed with the schedule itself, {c.profile_prompts} prompts x "
        f"{c.profile_samples}",
        "tau": c.tau,
        "quantile": c.quantile,
        "meets": verdict.meets,
        "failing_bins": list(verdict.failing),
        "unjudged_bins": list(verdict.unjudged),
        "bins": [{"k": written(schedule.budget(s.start)), **s.__dict__} for s in stats],
        "summary": json.loads(str(found["line"])),
        "schedule": schedule.to_json(),
    }
    atomic_write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    print("\n".join(describe(schedule, stats, c.tau, c.quantile)))
    print(f"wrote {out}")
    return record


def describe(schedule: Schedule, stats: list[BinStats], tau: float, quantile: float) -> list[str]:
    """The schedule, a line for each bin with its interval, and whether every judged bin holds."""
    name = quantile_name(quantile)
    lines = [schedule.describe()]
    for s in stats:
        value = getattr(s, name)
        word = "too few tokens to judge" if not s.enough else "holds" if value >= tau else "FAILS"
        low, high = getattr(s, f"{name}_low"), getattr(s, f"{name}_high")
        lines.append(
            f"positions {s.start}-{s.end}  k = {written(schedule.budget(s.start))}  {name} "
            f"{value:.3f} [{low:.3f}, {high:.3f}]  {s.count} tokens, {s.num_units} prompts  {word}"
        )
    verdict = mismatch.verdict(stats, tau, quantile)
    judged = len(stats) - len(verdict.unjudged)
    lines.append(
        f"in use, {judged - len(verdict.failing)} of {judged} judged bins hold {name} >= {tau:g}"
    )
    return lines
