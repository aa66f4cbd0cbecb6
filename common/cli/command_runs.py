"""One function per command of `sparrow`: it checks the flags and calls the code that does the work.

`sparrow help` imports this file too, so each function imports what it needs when it runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import Config, overrides
from common.errors import UserError
from common.records import stopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A parsed command line. names: positional arguments; flags: value or default of every flag."""

    names: Sequence[str]
    config_file: str | None
    overrides: Mapping[str, str]
    flags: Mapping[str, Any]

    def config(
        self, extra: Mapping[str, str] | None = None, *, default: Config | None = None
    ) -> Config:
        """The recipe (without one, `default`) with the overrides and `extra` applied, validated.

        Raises UserError if there is neither a recipe nor a default.
        """
        if self.config_file is None and default is not None:
            return overrides.apply(default, {**self.overrides, **(extra or {})})
        if self.config_file is None:
            raise UserError("--config is missing; name a recipe, e.g. --config=configs/demo.py")
        return overrides.apply(
            overrides.load(self.config_file), {**self.overrides, **(extra or {})}
        )


MOST_ROWS = 2**20
"""Most responses of one evaluation: held-out prompts times samples."""
MOST_SEEDS = 1000
"""Most seeds, and most runs at the same time, of a study."""


def _model_override(arguments: Arguments) -> dict[str, str]:
    """--model=DIR is short for --config.model.path=DIR."""
    model = arguments.flags["model"]
    if not model:
        return {}
    if not os.path.isfile(Path(model) / "config.json"):
        raise UserError(
            f"--model={model}: no config.json there; name a Hugging Face model directory"
        )
    return {"model.path": model}


def _input_file(flag: str, path: str) -> Path:
    if not os.path.isfile(path):
        raise UserError(f"--{flag}={path}: no such file")
    return Path(path)


def _output_file(flag: str, path: str) -> Path:
    """The path; raises UserError now, before the work, if it cannot be written."""
    out = Path(path)
    if out.is_dir():
        raise UserError(f"--{flag}={path}: is a directory; name a file in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{flag}={path}: cannot be written ({error.strerror})") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"--{flag}={path}: cannot be written (no permission); name another place")
    return out


def _learner(config: Config) -> str:
    """Import name of the learner's package; UserError if it or the engine is not installed."""
    setup = importlib.import_module("common.setup")
    setup.engine_package(config)
    return setup.LEARNER


def _use_core(number: int | None) -> None:
    """Bind this process and its children to one of the cores that it may use (Linux only)."""
    if number is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        print("--core has no effect on this system: it cannot bind a process to a core")
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@stopping.safe_points()
def warmup(arguments: Arguments) -> None:
    """`sparrow warmup`: train a policy on the task's demonstrations."""
    from common.records import run_dir

    config = arguments.config()
    package = _learner(config)
    with run_dir.open_run(arguments.flags["run"], config, "warmup") as run:
        importlib.import_module(f"{package}.toy.warmup").warmup(config, run)


@stopping.safe_points()
def train(arguments: Arguments) -> None:
    """`sparrow train`: start a training run, or go on with it."""
    from common.records import run_dir

    config = arguments.config(_model_override(arguments))
    _learner(config)
    _use_core(arguments.flags["core"])
    with run_dir.open_run(arguments.flags["run"], config, "train") as run:
        importlib.import_module("common.loop").train(config, run)


@stopping.safe_points()
def profile(arguments: Arguments) -> None:
    """`sparrow profile`: alpha of budgets or of one schedule, on samples or on a given text."""
    flags, extra = arguments.flags, _model_override(arguments)
    for flag, name in (
        ("topk", "mismatch.budgets"),
        ("bin_tokens", "mismatch.bin_tokens"),
        ("schedule", "rollout.schedule"),
    ):
        if flags[flag] is not None:
            extra[name] = flags[flag]
    out = _output_file("out", flags["out"])
    if out.suffix == ".html":
        raise UserError(f"--out={out}: name the .json; the page .html goes beside it")
    checks = flags["schedule"] is not None
    if checks:
        _refuse_with_schedule(flags)
    how = {"max_tokens": 4096, "sequences": 1, "policy": "mean", "estimate": 0}
    given = {name: flags[name] for name in how if flags[name] is not None}
    if flags["replay"]:
        config = arguments.config(extra, default=Config())
        _profile_text(config, _input_file("replay", flags["replay"]), out, checks, how | given)
        return
    if given:
        raise UserError(f"--{next(iter(given))} has no effect without --replay; leave it out")
    config = arguments.config(extra)
    _learner(config)
    if checks:
        importlib.import_module("common.profile.schedule_check").check(config, out)
    else:
        importlib.import_module("common.profile.sampled_profile").profile(config, out)


def _refuse_with_schedule(flags: Mapping[str, Any]) -> None:
    """UserError for flags that have no effect on the check of one schedule."""
    useless = ["topk", "policy", "estimate"]
    if not flags["schedule"].startswith("k="):
        useless.append("bin_tokens")
    for name in (name for name in useless if flags[name] is not None):
        own = ", which has its own" if name in ("topk", "bin_tokens") else ""
        raise UserError(f"--{name} has no effect with --schedule{own}; leave it out")


def _profile_text(
    config: Config, text: Path, out: Path, checks: bool, how: Mapping[str, Any]
) -> None:
    """Profile given text, or check the schedule of the configuration on it."""
    for name, least in (("max_tokens", 1), ("sequences", 1), ("estimate", 0)):
        if how[name] < least:
            raise UserError(f"--{name}={how[name]}: expected at least {least}")
    size = {name: how[name] for name in ("max_tokens", "sequences")}
    if checks:
        importlib.import_module("common.profile.schedule_check").check_text(
            config, text, out, **size
        )
        return
    importlib.import_module("common.profile.text_profile").profile_text(
        config, text, out, **size, names=how["policy"].split(","), top=how["estimate"]
    )


def trace(arguments: Arguments) -> None:
    """`sparrow trace`: record what one backend computes."""
    flags = arguments.flags
    counts = {"num_prompts": 4, "prompt_tokens": 256, "num_tokens": 64}
    counts |= {name: flags[name] for name in counts if flags[name] is not None}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"--{name}={value}: expected at least 1")
    force = flags["force_tokens"]
    importlib.import_module("common.crosscheck.trace").trace(
        arguments.config(_model_override(arguments), default=Config()),
        flags["backend"],
        _input_file("prompts", flags["prompts"]),
        _output_file("out", flags["out"]),
        force=_input_file("force_tokens", force) if force else None,
        **counts,
    )


def compare(arguments: Arguments) -> None:
    """`sparrow compare`: judge two traces; exit status 1 if they disagree."""
    from common.crosscheck import compare as comparing
    from common.crosscheck import compare_page
    from common.crosscheck.trace_file import Trace

    if len(arguments.names) != 2:
        raise UserError(
            f"{len(arguments.names)} traces: expected two, as in sparrow compare a.npz b.npz"
        )
    a, b = (Trace(name) for name in arguments.names)
    result = comparing.compare(a, b)
    print(comparing.table(result))
    if arguments.flags["out"]:
        out = _output_file("out", arguments.flags["out"])
        compare_page.write(result, a, b, out)
        print(f"wrote {out}")
    if not result.ok:
        raise SystemExit(1)


def schedule(arguments: Arguments) -> None:
    """`sparrow schedule`: find a schedule in profiles, or show or compare schedules."""
    from common.cli import schedule_command

    flags = arguments.flags
    kind = schedule_command.check_flags(flags)
    if arguments.names and kind != "compare":
        raise UserError(f"{arguments.names[0]}: not a flag; only --compare takes further names")
    names = [*flags[kind].split(","), *arguments.names]
    paths = [_input_file(kind, name) for name in names if kind == "profile"]
    out = _output_file("out", flags["out"]) if flags["out"] else None
    if kind == "preset":
        schedule_command.export(flags["preset"], out)
    elif kind == "compare":
        schedule_command.compare(names, out)
    else:
        tau, quantile = _threshold(arguments)
        schedule_command.find(
            paths,
            out,
            tau=tau,
            quantile=quantile,
            rule=flags["rule"] or "point",
            monotone=flags["monotone"] is not False,
            extrapolate=bool(flags["extrapolate"]),
        )


def cost(arguments: Arguments) -> None:
    """`sparrow cost`: predict the speed of decoding under a schedule."""
    from common.cost import cost_report
    from common.records import run_dir

    path = arguments.flags["out"]
    out = _output_file("out", path) if path else None
    table, record = cost_report.run(dict(arguments.flags))
    print(table)
    if out is not None:
        run_dir.atomic_write_text(out, json.dumps(record, indent=1) + "\n")
        print(f"wrote {out}")


def _threshold(arguments: Arguments) -> tuple[float, float]:
    """(tau, quantile): from the flags, else from the recipe, else the defaults."""
    given = arguments.config_file or arguments.overrides
    settings = (arguments.config() if given else Config()).mismatch
    tau, quantile = arguments.flags["tau"], arguments.flags["quantile"]
    return (
        settings.tau if tau is None else tau,
        settings.quantile if quantile is None else quantile,
    )


@stopping.safe_points()
def evaluate(arguments: Arguments) -> None:
    """`sparrow eval`: reward of a model on held-out prompts."""
    from common.records import json_checks, run_dir

    flags = arguments.flags
    if bool(flags["run"]) == bool(flags["model"]):
        raise UserError("sparrow eval: give either --run=RUN or --config=RECIPE with --model=DIR")
    if flags["samples"] < 1:
        raise UserError(f"--samples={flags['samples']}: expected at least 1")
    if flags["run"] and arguments.config_file:
        raise UserError("--config has no effect with --run: a run has its own recipe; leave it out")
    if flags["run"]:
        config = run_dir.read_config(flags["run"])
        model = Path(flags["run"]) / "model"
        if not os.path.isfile(model / "config.json"):
            raise UserError(f"--run={flags['run']}: has no finished model yet; train it to the end")
        changes = {**arguments.overrides, "model.path": str(model)}
        config = overrides.apply(config, changes)
    else:
        config = arguments.config(_model_override(arguments))
    most = max(1, MOST_ROWS // config.task.num_eval_prompts)
    json_checks.integer(flags["samples"], "--samples", 1, most)
    _learner(config)
    command = importlib.import_module("common.cli.evaluate")
    command.evaluate_run(config, num_samples=flags["samples"], greedy=flags["greedy"])


@stopping.safe_points()
def study(arguments: Arguments) -> None:
    """`sparrow study`: dense, fixed and scheduled runs over several seeds."""
    flags = arguments.flags
    if arguments.overrides:
        raise UserError(
            "--config.a.b has no effect on sparrow study; write the change into the recipe file"
        )
    config = arguments.config()
    for name in ("seeds", "jobs"):
        if flags[name] > MOST_SEEDS:
            raise UserError(f"--{name}={str(flags[name])[:40]}: expected at most {MOST_SEEDS}")
    # A schedule that cannot be read is refused now, not after the warm-up.
    importlib.import_module("common.setup").resolve_schedule(
        overrides.apply(config, {"rollout.schedule": flags["fixed"]})
    )
    importlib.import_module("common.report.study").run_study(
        str(arguments.config_file),
        Path(flags["out"]),
        seeds=flags["seeds"],
        fixed=flags["fixed"],
        jobs=flags["jobs"],
    )


def report(arguments: Arguments) -> None:
    """`sparrow report`: one HTML page about some runs."""
    for name in arguments.names:
        if not os.path.isfile(Path(name) / "run.json"):
            raise UserError(f"{name}: no run of sparrow; expected a directory that --run=... made")
    runs = [Path(name) for name in arguments.names]
    out = _output_file("out", arguments.flags["out"] or str(runs[0] / "report.html"))
    path = arguments.flags["bench"]
    measured = _input_file("bench", path) if path else None
    importlib.import_module("common.report.report").write_report(runs, out, bench=measured)
    print(f"wrote {out}")


def doctor(arguments: Arguments) -> None:
    """`sparrow doctor`: what this machine can run."""
    from common.cli import doctor

    doctor.print_checks(doctor.diagnose())


def bench(arguments: Arguments) -> None:
    """`sparrow bench`: time decode attention, or a profile."""
    from common.records import run_dir

    names, flags = list(arguments.names), arguments.flags
    if names not in (["decode"], ["profile"]):
        raise UserError(f"sparrow bench {' '.join(names)}: expected decode or profile")
    if (names == ["profile"]) != bool(flags["model"]):
        raise UserError(
            "sparrow bench: profile needs --model=DIR; decode does not take it, leave it out there"
        )
    if flags["context"] is not None and names != ["decode"]:
        raise UserError("--context has no effect on sparrow bench profile; leave it out")
    package = _learner(Config())
    out = _output_file("out", flags["out"]) if flags["out"] else None
    if names == ["decode"]:
        bench = importlib.import_module(f"{package}.bench")
        result = bench.main() if flags["context"] is None else bench.main(flags["context"])
    else:
        _model_override(arguments)
        bench = importlib.import_module(f"{package}.bench_profile")
        result = bench.run(Path(flags["model"]))
        print(bench.show(result))
    if out is not None:
        run_dir.atomic_write_text(out, json.dumps(result, indent=1) + "\n")
