"""The commands of `sparrow`: a table of names, help, flags and functions.

A command imports what it needs when it runs: `sparrow help` loads neither jax nor matplotlib.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import overrides
from common.config import Config
from common.cost_flags import COST_FLAGS
from common.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command; an empty default counts as not given."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A parsed command line. names: what is no flag; flags: value (or default) of every flag."""

    names: Sequence[str]
    config_file: str | None
    overrides: Mapping[str, str]
    flags: Mapping[str, Any]

    def config(
        self, extra: Mapping[str, str] | None = None, *, default: Config | None = None
    ) -> Config:
        """Recipe (without one, `default`), then overrides, then `extra`, validated."""
        if self.config_file is None and default is not None:
            return overrides.apply(default, {**self.overrides, **(extra or {})})
        if self.config_file is None:
            raise UserError("--config is missing; name a recipe, e.g. --config=configs/demo.py")
        return overrides.apply(
            overrides.load(self.config_file), {**self.overrides, **(extra or {})}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table. names: how the help shows positional arguments, "" if there are none.

    resumes: the command goes on where it was stopped.
    """

    name: str
    summary: str
    text: str
    example: str
    run: Callable[[Arguments], None]
    flags: tuple[Flag, ...] = ()
    takes_config: bool = True
    names: str = ""
    min_names: int = 0
    resumes: bool = False


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
    """Refuse an --out that could not be written, before the work and not after it."""
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
    """Package of the learner; UserError if it or the configured engine is not installed."""
    setup = importlib.import_module("common.setup")
    setup.engine_package(config)
    return setup.LEARNER


def _use_core(number: int | None) -> None:
    """Keep this process and its children to one of the cores it may use (Linux)."""
    if number is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        print("--core has no effect on this system: it cannot bind a process to a core")
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _warmup(arguments: Arguments) -> None:
    from common import run_dir

    config = arguments.config()
    package = _learner(config)
    with run_dir.open_run(arguments.flags["run"], config, "warmup") as run:
        importlib.import_module(f"{package}.warmup").warmup(config, run)


def _train(arguments: Arguments) -> None:
    from common import run_dir

    config = arguments.config(_model_override(arguments))
    _learner(config)
    _use_core(arguments.flags["core"])
    with run_dir.open_run(arguments.flags["run"], config, "train") as run:
        importlib.import_module("common.loop").train(config, run)


def _profile(arguments: Arguments) -> None:
    flags, extra = arguments.flags, _model_override(arguments)
    for flag, name in (("topk", "mismatch.budgets"), ("bin_tokens", "mismatch.bin_tokens")):
        if flags[flag] is not None:
            extra[name] = flags[flag]
    out = _output_file("out", flags["out"])
    if out.suffix == ".html":
        raise UserError(f"--out={out}: name the .json; the page .html goes beside it")
    text_only = {"max_tokens": 4096, "sequences": 1, "policy": "mean", "estimate": 0}
    given = {name: flags[name] for name in text_only if flags[name] is not None}
    if not flags["replay"]:
        if given:
            raise UserError(f"--{next(iter(given))} has no effect without --replay; leave it out")
        config = arguments.config(extra)
        _learner(config)
        importlib.import_module("common.profiling").profile(config, out)
        return
    config = arguments.config(extra, default=Config())
    how = text_only | given
    for name, least in (("max_tokens", 1), ("sequences", 1), ("estimate", 0)):
        if how[name] < least:
            raise UserError(f"--{name}={how[name]}: expected at least {least}")
    importlib.import_module("common.text_profile").profile_text(
        config,
        _input_file("replay", flags["replay"]),
        out,
        max_tokens=how["max_tokens"],
        sequences=how["sequences"],
        names=how["policy"].split(","),
        top=how["estimate"],
    )


def _schedule(arguments: Arguments) -> None:
    from common import schedule_command

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


def _cost(arguments: Arguments) -> None:
    from common import cost_report, run_dir

    path = arguments.flags["out"]
    out = _output_file("out", path) if path else None
    table, record = cost_report.run(arguments.flags)
    print(table)
    if out is not None:
        run_dir.atomic_write_text(out, json.dumps(record, indent=1) + "\n")
        print(f"wrote {out}")


def _threshold(arguments: Arguments) -> tuple[float, float]:
    """(tau, quantile): the flags, else the recipe's, else the defaults of MismatchConfig."""
    given = arguments.config_file or arguments.overrides
    settings = (arguments.config() if given else Config()).mismatch
    tau, quantile = arguments.flags["tau"], arguments.flags["quantile"]
    return (
        settings.tau if tau is None else tau,
        settings.quantile if quantile is None else quantile,
    )


def _eval(arguments: Arguments) -> None:
    from common import run_dir

    flags = arguments.flags
    if bool(flags["run"]) == bool(flags["model"]):
        raise UserError("sparrow eval: give either --run=RUN or --config=RECIPE with --model=DIR")
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
    _learner(config)
    evaluation = importlib.import_module("common.evaluation")
    evaluation.evaluate_run(config, num_samples=flags["samples"], greedy=flags["greedy"])


def _study(arguments: Arguments) -> None:
    flags = arguments.flags
    if arguments.overrides:
        raise UserError("sparrow study takes a recipe as it is; put the changes into a recipe file")
    arguments.config()
    importlib.import_module("common.study").run_study(
        str(arguments.config_file),
        Path(flags["out"]),
        seeds=flags["seeds"],
        fixed=flags["fixed"],
        jobs=flags["jobs"],
    )


def _report(arguments: Arguments) -> None:
    for name in arguments.names:
        if not os.path.isfile(Path(name) / "run.json"):
            raise UserError(f"{name}: no run of sparrow; expected a directory that --run=... made")
    runs = [Path(name) for name in arguments.names]
    out = _output_file("out", arguments.flags["out"] or str(runs[0] / "report.html"))
    importlib.import_module("common.report").write_report(runs, out)
    print(f"wrote {out}")


def _doctor(arguments: Arguments) -> None:
    from common import doctor

    doctor.print_checks(doctor.diagnose())


def _bench(arguments: Arguments) -> None:
    names, flags = list(arguments.names), arguments.flags
    if names not in (["decode"], ["profile"]):
        raise UserError(f"sparrow bench {' '.join(names)}: expected decode or profile")
    if (names == ["profile"]) != bool(flags["model"]):
        raise UserError("sparrow bench: profile needs --model=DIR, decode has no use for it")
    package = _learner(Config())
    out = _output_file("out", flags["out"]) if flags["out"] else None
    if names == ["decode"]:
        result = importlib.import_module(f"{package}.bench").main()
    else:
        _model_override(arguments)
        bench = importlib.import_module(f"{package}.bench_profile")
        result = bench.run(Path(flags["model"]))
        print(bench.show(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


_RUN = Flag(
    name="run", help="directory of the run; an interrupted run goes on there", required=True
)
_MODEL = Flag(name="model", help="model directory to start from; default: the recipe's model")
_PROFILES = "what `sparrow profile` wrote; a.json,b.json: one for each page size, cheapest wins"
_RULE = "what must meet tau: point = the estimate (default), lower = its 95 % lower bound, safer"
_MONOTONE = "budgets never fall with length (default); --nomonotone: each bin by itself"
_EXTRAPOLATE = "bins with too few tokens take the larger budget of their neighbours, no error"

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="warmup",
            summary="supervised start of a small policy from scratch",
            text="Trains the recipe's model on the task's own demonstrations until RL can improve "
            "it, and writes it to RUN/model.",
            example="sparrow warmup --config=configs/demo.py --run=runs/warmup",
            run=_warmup,
            resumes=True,
            flags=(_RUN,),
        ),
        Command(
            name="train",
            summary="GRPO with dense or scheduled sparse rollouts",
            text="Samples with the schedule that the recipe names, scores with dense attention, "
            "updates the dense policy. Ctrl-C is safe: the same command goes on from the "
            "last checkpoint.",
            example="sparrow train --config=configs/demo.py --model=runs/warmup/model --run=runs/a",
            run=_train,
            resumes=True,
            flags=(
                _RUN,
                _MODEL,
                Flag(name="core", help="run on the n-th core only, for two runs at once", kind=int),
            ),
        ),
        Command(
            name="profile",
            summary="measure the acceptance rate by budget and length",
            text="Samples with each budget in mismatch.budgets, replays the same tokens "
            "densely, and writes statistics of alpha = sum_v min(p_dense, p_sparse) "
            "per length bin as JSON. With --replay: on given text, every position, nothing "
            "sampled, e.g. sparrow profile --model=DIR --replay=FILE --bin_tokens=512 "
            "--topk=4,12,29,61 --out=profile.json. A stopped profile goes on where it was.",
            example="sparrow profile --config=configs/demo.py --model=runs/warmup/model "
            "--out=runs/profile.json",
            resumes=True,
            run=_profile,
            flags=(
                _MODEL,
                Flag(
                    name="out",
                    help="profile to write, JSON; a page .html goes beside it",
                    required=True,
                ),
                Flag(
                    name="topk",
                    help="budgets k to measure, e.g. 4,12,29,61; default: the "
                    "recipe's mismatch.budgets",
                ),
                Flag(name="bin_tokens", help="width of a length bin; default: the recipe's"),
                Flag(
                    name="replay",
                    help="text file (or a .json list of token ids) to replay "
                    "at every position instead of sampling; needs --model and no recipe",
                ),
                Flag(
                    name="max_tokens", help="tokens of a replayed sequence; default 4096", kind=int
                ),
                Flag(
                    name="sequences",
                    help="how many of them, one after the other; default 1",
                    kind=int,
                ),
                Flag(
                    name="policy",
                    help="how pages are chosen in the replay: mean (as in decode; "
                    "the default), quest, window, random, oracle; several, e.g. mean,quest, "
                    "are compared at equal bytes and written to OUT-POLICY.json",
                ),
                Flag(
                    name="estimate",
                    help="also estimate alpha from so many top log-probs of each "
                    "side (20 in the paper), to see its bias",
                    kind=int,
                ),
            ),
        ),
        Command(
            name="schedule",
            summary="find the smallest budgets that meet tau; show or compare schedules",
            text="Per length bin the smallest profiled budget from which on the quantile of alpha "
            "is at least tau. tau and quantile come from the flags, else from the recipe given by "
            "--config. Profiles of several page sizes: the schedule that reads least wins. A "
            "profile with halves is validated: found on half of the sequences, judged on the rest.",
            example="sparrow schedule --profile=runs/profile.json --out=runs/schedule.json",
            run=_schedule,
            names="[NAME...]",
            flags=(
                Flag(name="profile", help=_PROFILES),
                Flag(name="preset", help="a published schedule instead, e.g. qwen3-1.7b-0.86"),
                Flag(name="compare", help="or presets and files, A,B: print and draw side by side"),
                Flag(name="tau", help="threshold, 0 to 1", kind=float),
                Flag(name="quantile", help="tail that must meet it; 0.05 = p5", kind=float),
                Flag(name="rule", help=_RULE),
                Flag(name="monotone", help=_MONOTONE, kind=bool),
                Flag(name="extrapolate", help=_EXTRAPOLATE, kind=bool),
                Flag(
                    name="out", help="JSON to write, a plot .svg beside it; of --compare: an .svg"
                ),
            ),
        ),
        Command(
            name="cost",
            summary="tokens/s, speedup and best page size that a schedule allows on a chip",
            text="Two models: bytes per decode step (weights once, KV by kind of layer, reserved "
            "pages, landmarks, prefill, the batch that fits) at the chip's peaks, and the paper's "
            "eFLOPs. Bounds, not measurements; common/cost.py and common/eflops.py have the "
            "formulas.",
            example="sparrow cost --model=qwen3-4b --schedule=qwen3-4b-0.86 --lengths=32768 "
            "--chip=h200",
            run=_cost,
            takes_config=False,
            flags=tuple(Flag(**flag) for flag in COST_FLAGS),
        ),
        Command(
            name="eval",
            summary="held-out reward of a model, dense decoding",
            text="Scores held-out prompts, either with a finished run's model and config (--run), "
            "or with a recipe and a model directory (--config, --model).",
            example="sparrow eval --run=runs/a --samples=4",
            run=_eval,
            flags=(
                Flag(name="run", help="a finished run"),
                _MODEL,
                Flag(name="samples", help="samples per prompt", kind=int, default=1),
                Flag(
                    name="greedy",
                    help="the most probable token instead of a sample",
                    kind=bool,
                    default=False,
                ),
            ),
        ),
        Command(
            name="study",
            summary="dense, fixed and scheduled rollouts over several seeds, with intervals",
            text="Per seed: warm-up, profile, schedule, then one training run for each arm, "
            "--jobs of them side by side. Stopped studies go on. Writes study.json and study.svg.",
            example="sparrow study --config=configs/demo.py --out=runs/study",
            run=_study,
            resumes=True,
            flags=(
                Flag(name="out", help="directory of the study", required=True),
                Flag(name="seeds", help="replications", kind=int, default=3),
                Flag(name="fixed", help="schedule of the fixed arm", default="k=4"),
                Flag(name="jobs", help="runs at the same time, one core each", kind=int, default=2),
            ),
        ),
        Command(
            name="report",
            summary="one self-contained HTML page on one or more runs",
            text="Reward, response length, mismatch per length bin against tau, schedule, "
            "throughput and stage times; several runs share the axes.",
            example="sparrow report runs/dense runs/scheduled --out=runs/report.html",
            run=_report,
            flags=(Flag(name="out", help="page to write; default: report.html in the first run"),),
            takes_config=False,
            names="RUN...",
            min_names=1,
        ),
        Command(
            name="doctor",
            summary="what this machine can run, and why not the rest",
            text="Looks at Python, packages, devices and tools; changes nothing.",
            example="sparrow doctor",
            run=_doctor,
            takes_config=False,
        ),
        Command(
            name="bench",
            summary="decode attention, dense against sparse; a profile against dense passes",
            text="decode: same weights, 8 sequences, 32K context, 256 pages of 16; prints times, "
            "GB/s, memory and the number of compilations. profile: four budgets at 4,096 tokens "
            "against five dense forward passes of the model in --model.",
            example="sparrow bench decode",
            run=_bench,
            flags=(
                Flag(name="model", help="model directory; for profile only"),
                Flag(name="out", help="also write the numbers there, JSON"),
            ),
            takes_config=False,
            names="decode|profile",
            min_names=1,
        ),
    )
}
