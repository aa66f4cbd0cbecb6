"""Measure the acceptance rate by budget and length: rollouts at fixed k, replayed exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.mismatch import acceptance
from common.objective import corrections
from common.profile import profile_page
from common.profile.kept_parts import KeptParts, weights_stamp
from common.profile.profile_rows import Measured, Profile
from common.records import stopping
from common.records.progress import Progress
from common.records.run_dir import atomic_write_text
from common.schedule import schedule as schedules
from common.schedule.schedule import Schedule
from common.setup import Parts, open_parts
from common.tasks import registry
from common.types import Rollout

PROFILE_NOISE_SEED = 86
FIELDS = [f.name for f in dataclasses.fields(Rollout) if f.name not in ("prompts", "stats")]
"""Arrays of a rollout that are kept to resume; part of the key, as versions may differ in them."""


def profile(config: Config, out: Path) -> dict[str, Any]:
    """Profile the model at every budget of mismatch.budgets and write the profile JSON.

    For each k: rollouts with k pages at every length, on prompts that are used for neither
    training nor evaluation; dense and sparse log-probs of the same tokens; statistics of alpha per
    length bin.
    The dense rollout gives the floor of abs_diff and k3: the difference between engine and scorer
    without any sparsity. Its alpha is 1 by construction, as the replay compares the dense pass with
    itself.
    """
    refuse_nucleus(config)
    content = Profile(
        config,
        model=config.model.path or f"from scratch, seed {config.model.init_seed}",
        source=f"sampled by the sparse actor, {config.mismatch.profile_prompts} prompts x "
        f"{config.mismatch.profile_samples}",
        policy="mean",
    )
    key = [FIELDS, dataclasses.asdict(config), weights_stamp(config.model.path)]
    summary: list[dict[str, Any]] = []
    with open_parts(config) as parts, Progress("profile") as progress, KeptParts(out, key) as kept:
        budgets = (None, *config.mismatch.budgets)
        for i, k in enumerate(budgets):
            stopping.check()
            summary.append(_measure(parts, k, content, kept))
            progress.print(show(summary[-1]))
            progress(i + 1, len(budgets))
        record = content.record(summary)
        atomic_write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
        page = out.with_suffix(".html")
        profile_page.write(record, page, [show(line) for line in summary])
    print(f"wrote {out} and {page}")
    return record


def refuse_nucleus(config: Config) -> None:
    """Raises UserError if rollout.top_p < 1: the replay does not renormalise over a nucleus."""
    if config.rollout.top_p < 1:
        raise UserError(
            f"rollout.top_p={config.rollout.top_p}: a profile needs 1.0, since the replay's "
            "log-probs are not renormalised over the nucleus"
        )


def _measure(parts: Parts, k: int | None, content: Profile, kept: KeptParts) -> dict[str, Any]:
    """Roll out and replay at one budget, or read the kept result; returns its summary."""
    name = "dense" if k is None else k
    found = kept.get(f"k-{name}")
    if found is None:
        c = parts.config
        schedule = (
            k
            if k is None
            else schedules.fixed(k, page_size=c.rollout.page_size, bin_tokens=c.mismatch.bin_tokens)
        )
        found = replayed(parts, name, schedule, kept)
        kept.put(f"k-{name}", **found)
    arrays = {name: found[name] for name in ("alpha_BT", "mask_BT", "group_B")}
    stats = content.add(Measured(k=name, **arrays))
    line = json.loads(str(found["line"]))
    for q, v in (("p1", 0.01), ("p5", 0.05)):
        line[f"{q}_min"] = min(acceptance.tail(stats, v).values(), default=None)
    return line


def replayed(
    parts: Parts, name: int | str, schedule: Schedule | None, kept: KeptParts
) -> dict[str, Any]:
    """Returns alpha of rollouts under a schedule, by exact replay, and their summary as JSON."""
    rollout = _roll_out(parts, schedule, f"rollout-{name}", kept)
    replay = parts.backend.scorer.replay(rollout, np.arange(len(rollout.prompts)), schedule)
    return {
        "alpha_BT": replay.alpha_BT,
        "mask_BT": rollout.response_mask_BT,
        "group_B": rollout.group_B,
        "line": json.dumps(_line(parts, rollout, schedule, name)),
    }


def _roll_out(parts: Parts, schedule: Schedule | None, name: str, kept: KeptParts) -> Rollout:
    """Rollouts on the prompts of the profile, or the kept ones, since sampling may take hours."""
    c = parts.config.mismatch
    prompts = parts.prompts.profile_batch(c.profile_prompts)
    arrays = kept.get(name)
    if arrays is not None:
        rows = [p for p in prompts for _ in range(c.profile_samples)]
        return Rollout(prompts=rows, **arrays, stats={})
    rollout = parts.backend.engine.generate(
        prompts, num_samples=c.profile_samples, schedule=schedule, seed=PROFILE_NOISE_SEED
    )
    kept.put(name, **{field: getattr(rollout, field) for field in FIELDS})
    return rollout


def _line(
    parts: Parts, rollout: Rollout, schedule: Schedule | None, name: int | str
) -> dict[str, Any]:
    """Reward and pages of one budget, and the ratio statistics on the sampled tokens."""
    mask, logp = rollout.response_mask_BT, rollout.logp_sparse_BT
    dense = parts.backend.scorer.logprobs(rollout).logp_dense_BT
    ratios = corrections.summary(dense - logp, mask, logp_sparse_BT=logp)
    lengths = rollout.total_len_B - rollout.prompt_len_B
    seen = np.nonzero(rollout.sparse_BT)[1]  # the token at position p saw p tokens
    share = 1.0 if schedule is None or not seen.size else schedule.share_of_pages(seen)
    return {
        "k": name,
        "reward": float(registry.score(parts.task, rollout, parts.pool).mean()),
        "len_mean": float(lengths.mean()),
        "share_of_pages": share,
        "abs_diff": ratios["prob_gap"],
        "k3": ratios["k3"],
    }


def show(s: dict[str, Any]) -> str:
    show = {q: "-" if s[q] is None else f"{s[q]:.3f}" for q in ("p1_min", "p5_min")}
    return (
        f"k = {s['k']!s:>5}  pages read {s['share_of_pages']:4.0%}  p1 min {show['p1_min']}  "
        f"p5 min {show['p5_min']}  |dp| {s['abs_diff']:.5f}  k3 {s['k3']:.5f}  "
        f"reward {s['reward']:.3f}  length {s['len_mean']:.0f}"
    )
