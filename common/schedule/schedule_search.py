"""Find a schedule in a profile: the smallest budgets with a tail of alpha that meets tau.

Source: arXiv 2606.08446, section 4. The paper judges by the estimate of p5 alone and at one page
size; the lower bound, the refusal of bins without evidence and the search over page sizes are ours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.records.json_checks import number
from common.schedule.profile_file import check_profile, quantile_name
from common.schedule.schedule import DENSE, NUM_RESERVED, Schedule, written

RULES = ("point", "lower")
"""What must meet tau: the measured quantile, or the lower bound of its 95 % interval."""


def search(
    profile: Mapping[str, Any],
    *,
    tau: float,
    quantile: float,
    rule: str = "point",
    monotone: bool = True,
    extrapolate: bool = False,
) -> Schedule:
    """Per length bin the smallest measured budget from which on the quantile of alpha meets tau.

        k(bin) = min {k measured : s(k', bin) >= tau for every measured k' >= k}
        s = p_q(alpha | k, bin) (rule "point") or the lower bound of its 95 % interval ("lower")

    and dense if the largest one fails: a small budget that passes by luck, while a larger one does
    not, is no evidence.

    profile: see `profile_file.load_profile`. quantile: one of the profile's, 0.05 = p5 (the
    paper's), 0.01 = p1 (sees rare but decisive tokens). monotone: budgets never fall with length
    (running maximum). extrapolate: a bin without enough tokens at any budget gets the larger budget
    of the nearest judged bins before and after it; provenance["extrapolated_bins"] lists them.
    Raises UserError for such bins otherwise, and if no bin can be judged.
    Source: arXiv 2606.08446, section 4.
    """
    check_profile(profile)
    if profile.get("policy", "mean") != "mean":
        raise UserError(
            f"{_title(profile)}: was measured with pages chosen by policy {profile['policy']!r}; "
            "decode chooses by 'mean', so only such a profile gives a schedule"
        )
    number(tau, "tau", 0, 1)
    if rule not in RULES:
        raise UserError(f"{rule=}: expected 'point' (estimate) or 'lower' (its 95 % lower bound)")
    if quantile not in profile["quantiles"]:
        raise UserError(
            f"{quantile=}: the profile has {profile['quantiles']}; choose one or profile"
        )
    name = quantile_name(quantile)
    judged = _judge(profile["rows"], name if rule == "point" else f"{name}_low", tau)
    missing = _missing_bins(profile, judged)
    if missing and not extrapolate:
        raise UserError(
            f"{_title(profile)}: too few tokens to judge {bins_text(missing, profile)}; profile "
            "more prompts, or give --extrapolate to use the budgets of their neighbours"
        )
    budgets = [_budget(judged, b) for b in range(len(judged) + len(missing))]
    if monotone:
        budgets = list(itertools.accumulate(budgets, max))
    return Schedule(
        page_size=profile["page_size"],
        bin_tokens=profile["bin_tokens"],
        budgets=tuple(budgets),
        name=f"{Path(profile['model']).name or 'model'}-{tau:g}",
        provenance={
            "model": profile["model"],
            "tau": tau,
            "quantile": quantile,
            "statistic": f"{name} of the exact acceptance rate",
            "rule": rule,
            "monotone": monotone,
            "method": "smallest measured budget from which on "
            + ("all" if rule == "point" else "the 95 % lower bounds of all")
            + " meet tau"
            + (", never falling with length" if monotone else ""),
            "measured_budgets": sorted({r["k"] for r in profile["rows"] if r["k"] != "dense"}),
            "extrapolated_bins": missing,
            "bins": _evidence(budgets, judged, profile["bin_tokens"], name),
            "versions": dict(profile.get("versions", {})),
        }
        | {key: profile[key] for key in ("source", "interval", "policy") if key in profile},
    )


def _judge(
    rows: Sequence[Mapping[str, Any]], name: str, tau: float
) -> dict[int, tuple[int, Mapping[str, Any]]]:
    """bin -> (budget, row it rests on); (DENSE, row of the largest budget) where that fails tau."""
    judged: dict[int, tuple[int, Mapping[str, Any]]] = {}
    settled: set[int] = set()
    sparse = [row for row in rows if row["k"] != "dense" and row["enough"]]
    for row in sorted(sparse, key=lambda row: -row["k"]):
        b = row["bin"]
        if b in settled:
            continue
        if row[name] >= tau:
            judged[b] = (row["k"], row)
        else:
            settled.add(b)
            judged.setdefault(b, (DENSE, row))
    return judged


def _missing_bins(profile: Mapping[str, Any], judged: Mapping[int, Any]) -> list[int]:
    """Bins up to the last one of the profile that are not judged; UserError if none is."""
    if not judged:
        raise UserError(
            f"{_title(profile)}: no bin has enough tokens at any budget; profile more prompts, or "
            "longer ones"
        )
    last = max(row["bin"] for row in profile["rows"])
    return [b for b in range(last + 1) if b not in judged]


def _title(profile: Mapping[str, Any]) -> str:
    return f"profile of {profile['model']} with pages of {profile['page_size']}"


def bins_text(bins: Sequence[int], profile: Mapping[str, Any]) -> str:
    """[0, 1, 5] -> "bins 0-1, 5 (positions 0..127, 320..383)" for bins of 64 tokens."""
    runs: list[list[int]] = []
    for b in sorted(bins):
        if runs and b == runs[-1][1] + 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    width = profile["bin_tokens"]
    names = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    positions = ", ".join(f"{a * width}..{(b + 1) * width - 1}" for a, b in runs)
    return f"bin{'s' * (len(bins) > 1)} {names} (positions {positions})"


def _budget(judged: Mapping[int, tuple[int, Any]], b: int) -> int:
    """Budget of bin b: its own, else the larger one of the nearest judged bins around it."""
    if b in judged:
        return judged[b][0]
    before = max((a for a in judged if a < b), default=None)
    after = min((a for a in judged if a > b), default=None)
    return max(judged[a][0] for a in (before, after) if a is not None)


def _evidence(
    budgets: Sequence[int],
    judged: Mapping[int, tuple[int, Mapping[str, Any]]],
    width: int,
    name: str,
) -> list[dict[str, Any]]:
    """Per bin what its budget rests on: the measured budget, its quantile and 95 % interval."""
    bins = []
    for b, k in enumerate(budgets):
        entry = {"start": b * width, "end": (b + 1) * width, "k": written(k)}
        if b in judged:
            row = judged[b][1]
            entry |= {"measured_k": row["k"], "count": row["count"], name: row[name]}
            entry |= {"low": row[f"{name}_low"], "high": row[f"{name}_high"]}
        bins.append(entry)
    return bins


def tokens_read(schedule: Schedule, lengths: np.ndarray, weights: np.ndarray) -> float:
    """Mean tokens of K and V that a query reads, landmarks counted as well; no geometry needed.

        cost(length) = min(n, k + 3) C + n / 2,   n = ceil(length / C) pages of C tokens

    A landmark is one vector for each page and KV head, where a token is two (key and value): half
    a token a page. Large pages need fewer landmarks but select coarsely.
    lengths: cached tokens, at least 1; weights: weights of the mean. The
    result is in tokens and the same for every KV head.
    """
    pages = -(-np.asarray(lengths, np.int64) // schedule.page_size)
    budgets = schedule.budgets_at(np.asarray(lengths) - 1) + np.int64(NUM_RESERVED)
    cost = np.minimum(pages, budgets) * schedule.page_size + pages / 2
    return float(np.average(cost, weights=weights))


def profile_lengths(profiles: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(lengths, weights): the middle of every bin of the profiles and the tokens counted there.

    All profiles are taken together, so that schedules of different page sizes are compared under
    the same distribution of lengths.
    """
    counts: dict[int, int] = {}
    for row in (row for profile in profiles for row in profile["rows"]):
        middle = (row["start"] + row["end"] + 1) // 2
        counts[middle] = counts.get(middle, 0) + row["count"]
    return np.array(list(counts), np.int64), np.array(list(counts.values()), np.float64)


def search_page_sizes(
    profiles: Sequence[Mapping[str, Any]],
    cost: Callable[[Schedule], float],
    **criterion: Any,
) -> tuple[int, Schedule]:
    """(index of its profile, Schedule) of the page size whose schedule costs least.

    profiles: one model's, each of another page size. cost: a function of a schedule, lower is
    better, e.g. `tokens_read`; of equal costs the first wins. criterion: as in `search`.
    provenance["page_size_costs"] keeps the cost of each page size.
    """
    models = {profile["model"] for profile in profiles}
    if len(models) > 1:
        raise UserError(
            f"profiles of {', '.join(sorted(models))}: page sizes are compared for one model only"
        )
    sizes = [profile["page_size"] for profile in profiles]
    if len(set(sizes)) < len(sizes):
        raise UserError(
            f"profiles with page sizes {sizes}: give one for each page size (rollout.page_size)"
        )
    found = [search(profile, **criterion) for profile in profiles]
    costs = [cost(schedule) for schedule in found]
    best = int(np.argmin(costs))
    table = {str(size): value for size, value in zip(sizes, costs, strict=True)}
    provenance = {**found[best].provenance, "page_size_costs": table}
    return best, dataclasses.replace(found[best], provenance=provenance)
