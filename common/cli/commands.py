"""The commands of `sparrow`: a table of their names, help texts, flags and functions.

`sparrow help` imports this file, so it must load neither numpy nor jax nor matplotlib.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from common.cli import command_runs
from common.cli.command_runs import Arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command; without a default its value is None when it is not given."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table.

    names: how the help shows positional arguments, "" if there are none; min_names: their least
    number. resumes: started again, the command goes on where it was stopped.
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


_RUN = Flag(
    name="run",
    help="directory of the run; if it holds an interrupted run, that run goes on",
    required=True,
)
_MODEL = Flag(name="model", help="model directory to start from; default: the recipe's model")
_PROFILES = "file of `sparrow profile`; a.json,b.json compares page sizes and takes the cheapest"
_RULE = "what must meet tau: point = the estimate (default); lower = its 95 % lower bound"
_MONOTONE = "budgets never fall with length (default); --nomonotone judges each bin alone"
_EXTRAPOLATE = (
    "bins with too few tokens take the larger budget of their neighbours, instead of an error"
)
_COST_FLAGS = (
    Flag(
        name="model",
        help="qwen3-1.7b, -4b, -8b, -14b, a config.json or the directory it lies in",
        required=True,
    ),
    Flag(
        name="schedule",
        help="a published name, a schedule file, or k=64 (pages of 16)",
        required=True,
    ),
    Flag(
        name="lengths",
        help='response tokens: a number, or a file {"edges": [0, 512, 4096], "counts": [30, 8]}',
        required=True,
    ),
    Flag(name="prompt", help="prompt tokens", kind=int, default=1024),
    Flag(
        name="samples",
        help="responses per prompt; they share its prefill and its full pages",
        kind=int,
        default=8,
    ),
    Flag(
        name="chip",
        help="a100, h100, h200, b200, mi300x, v5e, v5p, v6e, tpu7x, or this: measures this CPU",
        default="h200",
    ),
    Flag(
        name="chips",
        help="chips that share one copy of the model (tensor parallel, free communication)",
        kind=int,
        default=1,
    ),
    Flag(
        name="memory_share",
        help="share of the memory for weights and cache; a larger cache means a larger batch",
        kind=float,
        default=0.8,
    ),
    Flag(
        name="batch",
        help="rows decoded at once; 0 = as many as fit, so that each reads the smallest share of "
        "the weights",
        kind=int,
        default=0,
    ),
    Flag(
        name="reserve",
        help="rows take pages for the longest response at the start, as our engines do, instead of "
        "as they grow",
        kind=bool,
        default=False,
    ),
    Flag(
        name="page_sizes",
        help="page sizes to compare, each with the same number of selected tokens",
        default="16,32,64,128",
    ),
    Flag(
        name="num_dense_layers",
        help="number of first layers that read every page",
        kind=int,
        default=2,
    ),
    Flag(
        name="kv_bytes", help="bytes of a number in the KV cache; 1 = float8", kind=int, default=2
    ),
    Flag(name="weight_bytes", help="bytes of a number in the weights", kind=int, default=2),
    Flag(
        name="train_share",
        help="share of a dense RL step that is not rollout; 0.10 in the paper at 1.7B and 4B",
        kind=float,
        default=0.1,
    ),
    Flag(name="out", help="JSON file to which all numbers are written"),
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="warmup",
            summary="supervised start of a small policy from scratch",
            text="Trains the recipe's model on the task's own demonstrations until RL can improve "
            "it, and writes it to RUN/model.",
            example="sparrow warmup --config=configs/demo.py --run=runs/warmup",
            run=command_runs.warmup,
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
            run=command_runs.train,
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
            "--topk=4,12,29,61 --out=profile.json. A stopped profile goes on where it was. "
            "With --schedule: the tail of that schedule itself, whose early keys are written with "
            "fewer pages than those of a uniform budget, beside what its profile promised; on "
            "samples, or with --replay on given text, e.g. sparrow profile --model=DIR "
            "--replay=FILE --schedule=s.json --out=check.json.",
            example="sparrow profile --config=configs/demo.py --model=runs/warmup/model "
            "--out=runs/profile.json",
            resumes=True,
            run=command_runs.profile,
            flags=(
                _MODEL,
                Flag(
                    name="out",
                    help="profile to write, JSON; a page .html goes beside it, of --schedule none",
                    required=True,
                ),
                Flag(
                    name="topk",
                    help="budgets k to measure, e.g. 4,12,29,61; default: the "
                    "recipe's mismatch.budgets",
                ),
                Flag(
                    name="bin_tokens",
                    help="width of a length bin; default: the recipe's. A schedule file has its "
                    "own",
                ),
                Flag(
                    name="schedule",
                    help="measure this schedule (a file, or what rollout.schedule takes) instead "
                    "of uniform budgets: the tail that it has when it is trained with, by bin",
                ),
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
            name="trace",
            summary="record what a backend computes, to compare it with another",
            text="Runs the model on a few prompts and records facts of every stage: sampled "
            "tokens, log-probs, projections of each layer's activations, page scores and pages, "
            "alpha, loss and gradients of one GRPO step, the weights after it. `sparrow compare` "
            "judges two traces, of other backends, machines or types. Give the second the tokens "
            "of the first: --force_tokens=a.npz; transformers and vllm need it, as they sample "
            "nothing here. Sparse decode follows rollout.schedule; k=2 unless it names one.",
            example="sparrow trace --backend=jax --model=DIR --prompts=FILE --out=a.npz",
            run=command_runs.trace,
            flags=(
                Flag(name="backend", help="jax, torch, transformers or vllm", required=True),
                Flag(name="model", help="Hugging Face model directory", required=True),
                Flag(
                    name="prompts",
                    help="text, .json list of lists of token ids, or .jsonl/.parquet of a task",
                    required=True,
                ),
                Flag(name="out", help="trace to write, .npz", required=True),
                Flag(
                    name="force_tokens",
                    help="trace whose sampled tokens go through this backend, instead of its own",
                ),
                Flag(name="num_prompts", help="prompts taken from the file; default 4", kind=int),
                Flag(
                    name="prompt_tokens", help="tokens kept of each prompt; default 256", kind=int
                ),
                Flag(
                    name="num_tokens", help="tokens sampled after each prompt; default 64", kind=int
                ),
            ),
        ),
        Command(
            name="compare",
            summary="do two traces agree, and if not, where do they part?",
            text="A row per quantity: largest and mean deviation against a limit that follows "
            "from the two types, the first layer and position beyond it, pages that differ and "
            "whether a tie explains them, where sampled tokens part, and the acceptance rate of "
            "the two dense policies (the floor of any mismatch statistic). Exit status 0 = the "
            "same, 1 = different, 2 = cannot be compared.",
            example="sparrow compare a.npz b.npz --out=compare.html",
            run=command_runs.compare,
            flags=(Flag(name="out", help="also write an HTML page there"),),
            takes_config=False,
            names="A B",
            min_names=2,
        ),
        Command(
            name="schedule",
            summary="find the smallest budgets that meet tau; show or compare schedules",
            text="Per length bin the smallest profiled budget from which on the quantile of alpha "
            "is at least tau. tau and quantile come from the flags, else from the recipe given by "
            "--config. Profiles of several page sizes: the schedule that reads least wins. A "
            "profile with halves is validated: found on half of the sequences, judged on the rest.",
            example="sparrow schedule --profile=runs/profile.json --out=runs/schedule.json",
            run=command_runs.schedule,
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
            "eFLOPs. Bounds, not measurements; the formulas are in common/cost.",
            example="sparrow cost --model=qwen3-4b --schedule=qwen3-4b-0.86 --lengths=32768 "
            "--chip=h200",
            run=command_runs.cost,
            takes_config=False,
            flags=_COST_FLAGS,
        ),
        Command(
            name="eval",
            summary="held-out reward of a model, dense decoding",
            text="Scores held-out prompts, either with a finished run's model and config (--run), "
            "or with a recipe and a model directory (--config, --model).",
            example="sparrow eval --run=runs/a --samples=4",
            run=command_runs.evaluate,
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
            run=command_runs.study,
            resumes=True,
            flags=(
                Flag(name="out", help="directory of the study", required=True),
                Flag(name="seeds", help="replications", kind=int, default=3),
                Flag(name="fixed", help="schedule of the fixed arm", default="k=2"),
                Flag(name="jobs", help="runs at the same time, one core each", kind=int, default=2),
            ),
        ),
        Command(
            name="report",
            summary="one self-contained HTML page on one or more runs",
            text="Reward, response length, mismatch per length bin against tau, schedule, "
            "throughput and stage times; several runs share the axes.",
            example="sparrow report runs/dense runs/scheduled --out=runs/report.html",
            run=command_runs.report,
            flags=(
                Flag(name="out", help="page to write; default: report.html in the first run"),
                Flag(
                    name="bench", help="numbers of `sparrow bench decode --out=FILE`, to show too"
                ),
            ),
            takes_config=False,
            names="RUN...",
            min_names=1,
        ),
        Command(
            name="doctor",
            summary="what this machine can run, and why not the rest",
            text="Looks at Python, packages, devices and tools; changes nothing.",
            example="sparrow doctor",
            run=command_runs.doctor,
            takes_config=False,
        ),
        Command(
            name="bench",
            summary="decode attention, dense against sparse; a profile against dense passes",
            text="decode: same weights, 8 sequences of --context tokens, as many pages as the "
            "published schedule qwen3-1.7b-0.86 reads there (256 of 16 tokens at 32K); prints "
            "times, GB/s, memory and the number of compilations. profile: four budgets at 4,096 "
            "tokens against five dense forward passes of the model in --model.",
            example="sparrow bench decode",
            run=command_runs.bench,
            flags=(
                Flag(name="model", help="model directory; for profile only"),
                Flag(name="context", help="cached tokens; for decode only; 32768", kind=int),
                Flag(name="out", help="also write the numbers there, JSON"),
            ),
            takes_config=False,
            names="decode|profile",
            min_names=1,
        ),
    )
}
