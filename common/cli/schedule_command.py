"""`sparrow schedule`: find a schedule in profiles, export a published one, or compare several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import overrides
from common.errors import UserError
from common.records.json_checks import read
from common.report import plots, plots_schedules
from common.schedule import presets, schedule_validation
from common.schedule.profile_file import load_profile, quantile_name
from common.schedule.schedule import FORMAT, Schedule, parse, resolve
from common.schedule.schedule_search import (
    bins_text,
    profile_lengths,
    search,
    search_page_sizes,
    tokens_read,
)

_SOURCES = ("profile", "preset", "compare")
_OF_SEARCH = ("tau", "quantile", "rule", "monotone", "extrapolate")


def check_flags(flags: Mapping[str, Any]) -> str:
    """The one flag of profile, preset and compare that is given.

    Raises UserError if there is none or more than one, and for flags without effect.
    """
    given = [name for name in _SOURCES if flags[name]]
    if len(given) != 1:
        raise UserError(
            "sparrow schedule: give either --profile=FILE or --preset=NAME or --compare=A,B"
        )
    useless = [name for name in _OF_SEARCH if flags[name] is not None]
    if given[0] != "profile" and useless:
        flag = useless[0]
        raise UserError(f"--{flag}={flags[flag]}: has no effect with --{given[0]}; leave it out")
    if flags["out"]:
        svg = Path(flags["out"]).suffix == ".svg"
        if svg and given[0] != "compare":
            raise UserError(f"--out={flags['out']}: expected a .json file; the .svg goes beside it")
        if not svg and given[0] == "compare":
            raise UserError(
                f"--out={flags['out']}: expected an .svg file, since a comparison is a plot"
            )
    return given[0]


def find(paths: Sequence[Path], out: Path | None, **criterion: Any) -> None:
    """Search a schedule, validate it if the profile has halves, write it and its plot.

    paths: one profile, or one for each page size; of these, the schedule that reads the fewest
    tokens is taken. criterion: tau, quantile, rule, monotone, extrapolate of `search`.
    """
    profiles = [load_profile(path) for path in paths]
    if len(profiles) == 1:
        profile, found = profiles[0], search(profiles[0], **criterion)
    else:
        lengths, weights = profile_lengths(profiles)
        cost = functools.partial(tokens_read, lengths=lengths, weights=weights)
        best, found = search_page_sizes(profiles, cost, **criterion)
        profile = profiles[best]
        for size, tokens in found.provenance["page_size_costs"].items():
            print(f"pages of {size}: {tokens:.0f} tokens read by a query, landmarks included")
    print(found.describe())
    if found.provenance["extrapolated_bins"]:
        bins = bins_text(found.provenance["extrapolated_bins"], profile)
        print(f"extrapolated, not measured: {bins} have the budgets of their neighbours")
    if "halves" in profile:
        how = {key: value for key, value in criterion.items() if key != "extrapolate"}
        validation = schedule_validation.validate(profile, **how)
        print("\n".join(schedule_validation.describe(validation, profile)))
        provenance = {**found.provenance, "validation": validation}
        found = dataclasses.replace(found, provenance=provenance)
    if out is not None:
        statistic = quantile_name(criterion["quantile"])
        svg = plots_schedules.profile_plot(
            profile, found.to_json(), statistic=statistic, tau=criterion["tau"]
        )
        _write(found, svg, out)


def export(name: str, out: Path | None) -> None:
    """Print a published schedule; if `out` is given, write it and a plot of the pages it reads."""
    found = _preset("preset", name)
    print(found.describe())
    if out is not None:
        run = plots.Run(name=found.name, records=[], schedule=found.to_json())
        _write(found, plots_schedules.schedule_steps([run]), out)


def _write(found: Schedule, svg: str | None, out: Path) -> None:
    found.save(out)
    assert svg is not None
    plots.save(svg, out.with_suffix(".svg"))
    print(f"wrote {out} and {out.with_suffix('.svg')}")


def _preset(flag: str, name: str) -> Schedule:
    """A published schedule; UserError with the nearest name if there is none of that name."""
    if name not in presets.PUBLISHED:
        guess = overrides.nearest(name, list(presets.PUBLISHED))
        did = (
            f"did you mean {guess}?" if guess else f"expected one of {', '.join(presets.PUBLISHED)}"
        )
        no = "no published schedule" if flag == "preset" else "no file and no published schedule"
        raise UserError(f"--{flag}={name}: {no} of that name; {did}")
    found = resolve(name, page_size=presets.PAGE_SIZE, bin_tokens=presets.BIN_TOKENS)
    assert found is not None
    return found


def compare(names: Sequence[str], out: Path | None) -> None:
    """Print each schedule and the share of pages that it reads at five lengths; plot to `out`."""
    schedules = _named(names)
    for schedule in schedules.values():
        print(schedule.describe())
    longest = plots_schedules.reach(list(schedules.values()))
    lengths = [max(1, longest // part) for part in (16, 8, 4, 2, 1)]
    width = max(map(len, schedules))
    print("share of pages that a query reads, by cached length")
    print(" " * width + "".join(f" {length:>9,}" for length in lengths))
    for name, schedule in schedules.items():
        shares = [schedule.share_of_pages([length]) for length in lengths]
        print(f"{name:<{width}}" + "".join(f" {share:>9.1%}" for share in shares))
    if out is not None:
        plots.save(plots_schedules.comparison(schedules), out)
        print(f"wrote {out}")


def _named(names: Sequence[str]) -> dict[str, Schedule]:
    """Schedules by name; a file whose schedule has a name already taken is named by its path."""
    found: dict[str, Schedule] = {}
    for name in names:
        if Path(name).is_file():
            schedule = parse(read(Path(name), FORMAT), name)
        else:
            schedule = _preset("compare", name)
        label = schedule.name if schedule.name and schedule.name not in found else name
        if label in found:
            raise UserError(f"--compare: {name} is given twice; give each schedule once")
        found[label] = schedule
    return found
