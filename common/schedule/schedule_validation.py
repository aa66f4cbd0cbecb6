"""Leave-prompts-out check: does a schedule found on half of the prompts hold on the other half?

A schedule takes, per bin, the smallest budget that passed; on few prompts some pass by luck. The
halves of a profile (its key "halves") come from disjoint prompts, so the half that chose a budget
and the half that judges it share no luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.schedule.profile_file import check_profile, quantile_name
from common.schedule.schedule import DENSE, written
from common.schedule.schedule_search import bins_text, search


def validate(
    profile: Mapping[str, Any],
    *,
    tau: float,
    quantile: float,
    rule: str = "point",
    monotone: bool = True,
) -> dict[str, Any]:
    """Find a schedule on each half of the prompts and judge it by the measurements of the other.

    A bin holds if the other half's quantile of alpha at the budget found is at least tau; a dense
    bin holds by construction. Bins with too few tokens in either half are not judged.

    profile: with "halves". The criterion is that of `schedule_search.search`. Returns plain JSON
    types: the criterion; share_held over the judged bins of both directions and worst_shortfall,
    the largest tau - quantile (0 if all hold), both None if no bin could be judged; "directions",
    the same for A -> B and B -> A, with the bins one by one and unjudged_bins.
    Raises ValueError for a profile without halves, and as `search` does.
    """
    check_profile(profile)
    if "halves" not in profile:
        raise ValueError('profile: has no "halves" to validate with; profile again')
    whole = {key: value for key, value in profile.items() if key != "halves"}
    a, b = ({**whole, "rows": half["rows"]} for half in profile["halves"])
    criterion = {"tau": tau, "quantile": quantile, "rule": rule, "monotone": monotone}
    directions = [
        {"found_on": "A", "judged_on": "B", **_cross(a, b, criterion)},
        {"found_on": "B", "judged_on": "A", **_cross(b, a, criterion)},
    ]
    bins: list[Any] = [entry for direction in directions for entry in direction["bins"]]
    return {**criterion, **_sum_up(bins, tau, quantile_name(quantile)), "directions": directions}


def _cross(
    finder: Mapping[str, Any], judge: Mapping[str, Any], criterion: Mapping[str, Any]
) -> dict[str, Any]:
    """One direction: the bins that could be judged one by one, those that could not, their sum."""
    name, tau = quantile_name(criterion["quantile"]), criterion["tau"]
    known = {row["bin"] for row in finder["rows"] if row["enough"] and row["k"] != "dense"}
    budgets = search(finder, **criterion, extrapolate=True).budgets if known else ()
    measured = {(row["k"], row["bin"]): row for row in judge["rows"] if row["enough"]}
    bins, unjudged = [], []
    for b in sorted({row["bin"] for row in (*finder["rows"], *judge["rows"])}):
        k = budgets[b] if b in known else None
        row = {name: 1.0, f"{name}_low": 1.0, f"{name}_high": 1.0}
        row = row if k == DENSE else measured.get((k, b))
        if row is None:
            unjudged.append(b)
            continue
        width = finder["bin_tokens"]
        entry = {
            "bin": b,
            "start": b * width,
            "end": (b + 1) * width,
            "k": written(DENSE if k is None else k),
        }
        entry |= {name: row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
        bins.append({**entry, "holds": row[name] >= tau})
    return {**_sum_up(bins, tau, name), "unjudged_bins": unjudged, "bins": bins}


def _sum_up(bins: Sequence[Mapping[str, Any]], tau: float, name: str) -> dict[str, Any]:
    if not bins:
        return {"share_held": None, "worst_shortfall": None}
    return {
        "share_held": sum(entry["holds"] for entry in bins) / len(bins),
        "worst_shortfall": max(0.0, tau - min(entry[name] for entry in bins)),
    }


def describe(validation: Mapping[str, Any], profile: Mapping[str, Any]) -> list[str]:
    """One line for each direction: bins that hold, the worst one, bins that were not judged."""
    name, tau = quantile_name(validation["quantile"]), validation["tau"]
    lines = []
    for direction in validation["directions"]:
        bins, unjudged = direction["bins"], direction["unjudged_bins"]
        held = sum(entry["holds"] for entry in bins)
        dense = sum(entry["k"] == "dense" for entry in bins)
        text = f"found on half {direction['found_on']} of the sequences, judged on the other: "
        text += f"{held} of {len(bins)} bins hold {name} >= {tau:g}"
        text += f" ({dense} of them dense)" if dense else ""
        if held < len(bins):
            worst = min(bins, key=lambda entry: entry[name])
            text += (
                f"; worst {name} {worst[name]:.3f} [{worst['low']:.3f}, {worst['high']:.3f}] at "
                f"k = {worst['k']} in {bins_text([worst['bin']], profile)}"
            )
        text += f"; too few tokens in {bins_text(unjudged, profile)}" if unjudged else ""
        lines.append(text)
    return lines
