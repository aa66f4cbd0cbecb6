"""The commands of `sparrow`: a table of their names, help texts, flags and functions.

`sparrow help` imports this file, so it must load neither numpy nor jax nor matplotlib.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from common.cli import command_runs
from common.cli.command_runs import Arguments


@dataclasses.dataclass(frozen=True)
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

    names: how the help shows positional arguments, "" if there are none; min_names: the fewest of
    them. resumes: started again, the command goes on where it was stopped.
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
    "run", "directory of the run; if it holds an interrupted run, that run goes on", required=True
)
_MODEL = Flag("model", "model directory to start from; default: the recipe's model")
_PROFILES = "file of `sparrow profile`; a.json,b.json compares page sizes and takes the cheapest"
_RULE = "what must meet tau: point = the estimate (default); lower = its 95 % lower bound"
_MONOTONE = "budgets never fall with length (default); --nomonotone judges each bin alone"
_EXTRAPOLATE = (
    "bins with too few tokens take the larger budget of their neighbours, instead of an error"
)
_COST_FLAGS = (
    Flag(
        "model",
        "qwen3-1.7b, -4b, -8b, -14b, a config.json or the directory it lies in",
        required=True,
    ),
    Flag("schedule", "a published name, a schedule file, or k=64 (pages of 16)", required=True),
    Flag(
        "lengths",
        'response tokens: a number, or a file {"edges": [0, 512, 4096], "counts": [30, 8]}',
        required=True,
    ),
    Flag("prompt", "prompt tokens", kind=int, default=1024),
    Flag(
        "samples",
        "responses per prompt; they share its prefill and its full pages",
        kind=int,
        default=8,
    ),
    Flag(
        "chip",
        "a100, h100, h200, b200, mi300x, v5e, v5p, v6e, tpu7x, or this, which measures this CPU",
        default="h200",
    ),
    Flag(
        "chips",
        "chips that share one copy of the model (tensor parallel, free communication)",
        kind=int,
        default=1,
    ),
    Flag(
        "memory_share",
        "share of the memory for weights and cache; a larger cache means a larger batch",
        kind=float,
        default=0.8,
    ),
    Flag(
        "batch",
        "rows decoded at once; 0 = as many as fit, so that each reads the smallest share of "
        "the weights",
        kind=int,
        default=0,
    ),
    Flag(
        "reserve",
        "rows take pages for the longest response at the start, as our engines do, instead of "
        "as they grow",
        kind=bool,
        default=False,
    ),
    Flag(
        "page_sizes",
        "page sizes to compare, each with the same number of selected tokens",
        default="16,32,64,128",
    ),
    Flag("num_dense_layers", "number of first layers that read every page", kind=int, default=2),
    Flag("kv_bytes", "bytes of a number in the KV cache; 1 = float8", kind=int, default=2),
    Flag("weight_bytes", "bytes of a number in the weights", kind=int, default=2),
    Flag(
        "train_share",
        "share of a dense RL step that is not rollout; 0.10 in the paper at 1.7B and 4B",
        kind=float,
        default=0.1,
    ),
    Flag("out", "JSON file to which all numbers are written"),
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="warmup",
            summary="supervised start of a small policy from scratch",
            text="Trains the recipe's model on demonstrations of its task until RL can improve it, "
            "and writes it to RUN/model.",
            example="sparrow warmup --config=configs/demo.py --run=runs/warmup",
            run=command_runs.warmup,
            resumes=True,
            flags=(_RUN,),
        ),
        Command(
            name="train",
            summary="GRPO with dense or scheduled sparse rollouts",
            text="Samples under the schedule that the recipe names, scores the samples with dense "
            "attention and updates the dense policy. Ctrl-C is safe: the same command goes on from "
            "the last checkpoint.",
            example="sparrow train --config=configs/demo.py --model=runs/warmup/model --run=runs/a",
            run=command_runs.train,
            resumes=True,
            flags=(
                _RUN,
                _MODEL,
                Flag("core", "run on the n-th core only, to run several at once", kind=int),
            ),
        ),
        Command(
            name="profile",
            summary="measure the acceptance rate by budget and length",
            text="Samples under each budget in mismatch.budgets, replays the same tokens with "
            "dense attention, and writes statistics of alpha = sum_v min(p_dense, p_sparse) "
            "per length bin as JSON. With --replay it samples nothing and measures every "
            "position of a given text: sparrow profile --model=DIR --replay=FILE "
            "--bin_tokens=512 --topk=4,12,29 --out=profile.json. With --schedule it measures "
            "that schedule instead of uniform budgets, and shows its tail beside the one that "
            "its profile predicted: early keys, computed with a small budget, can lower the "
            "tail later on. This works on samples, or with --replay on a text: sparrow "
            "profile --model=DIR --replay=FILE --schedule=s.json --out=check.json. A stopped "
            "profile goes on where it was.",
            example="sparrow profile --config=configs/demo.py --model=runs/warmup/model "
            "--out=runs/profile.json",
            resumes=True,
            run=command_runs.profile,
            flags=(
                _MODEL,
                Flag(
                    "out",
                    "JSON file to write; a page .html goes beside it, but not with --schedule",
                    required=True,
                ),
                Flag(
                    "topk",
                    "budgets k to measure, e.g. 4,12,29,61; default: the recipe's mismatch.budgets",
                ),
                Flag(
                    "bin_tokens",
                    "width of a length bin; default: the recipe's; a schedule file has its own",
                ),
                Flag(
                    "schedule",
                    "measure this schedule (a file, or any value of rollout.schedule) instead "
                    "of uniform budgets: the tail of each bin that training with it would see",
                ),
                Flag(
                    "replay",
                    "text file (or a .json list of token ids) to replay "
                    "at every position instead of sampling; needs --model and no recipe",
                ),
                Flag("max_tokens", "tokens of a replayed sequence; default 4096", kind=int),
                Flag(
                    "sequences",
                    "number of such sequences, one after the other; default 1",
                    kind=int,
                ),
                Flag(
                    "policy",
                    "how the replay chooses pages: mean (as decode does, the default), quest, "
                    "window, random, oracle; several, e.g. mean,quest, are compared at equal bytes "
                    "and written to OUT-POLICY.json",
                ),
                Flag(
                    "estimate",
                    "also estimate alpha from this number of top log-probs of both policies, "
                    "to see the bias of the estimate (the paper: 20)",
                    kind=int,
                ),
            ),
        ),
        Command(
            name="trace",
            summary="record what a backend computes, to compare it with another",
            text="Runs the model on a few prompts and records results of every stage: sampled "
            "tokens, log-probs, projections of each layer's activations, page scores and pages, "
            "alpha, loss and gradients of one GRPO step, and the weights after it. `sparrow "
            "compare` judges two traces from different backends, machines or number types. Give "
            "the second trace the tokens of the first with --force_tokens=a.npz; transformers and "
            "vllm need it, since they do not sample here. Sparse decode follows rollout.schedule, "
            "or k=2 if that is dense.",
            example="sparrow trace --backend=jax --model=DIR --prompts=FILE --out=a.npz",
            run=command_runs.trace,
            flags=(
                Flag("backend", "jax, torch, transformers or vllm", required=True),
                Flag("model", "Hugging Face model directory", required=True),
                Flag(
                    "prompts",
                    "text, a .json list of lists of token ids, or .jsonl or .parquet rows",
                    required=True,
                ),
                Flag("out", ".npz file to write", required=True),
                Flag(
                    "force_tokens",
                    "trace with the tokens that this backend takes, instead of sampling its own",
                ),
                Flag("num_prompts", "prompts taken from the file; default 4", kind=int),
                Flag("prompt_tokens", "tokens kept of each prompt; default 256", kind=int),
                Flag("num_tokens", "tokens sampled after each prompt; default 64", kind=int),
            ),
        ),
        Command(
            name="compare",
            summary="whether two traces agree, and where they differ first",
            text="Prints a row per quantity: the largest and mean deviation with the limit that "
            "follows from the two number types, the first layer and position beyond it, pages that "
            "differ and whether a tie explains them, the first sampled token that differs, and the "
            "acceptance rate between the two dense policies (no mismatch statistic can be better). "
            "Exit status 0 = the traces agree, 1 = they differ, 2 = they cannot be compared.",
            example="sparrow compare a.npz b.npz --out=compare.html",
            run=command_runs.compare,
            flags=(Flag("out", "HTML page to write"),),
            takes_config=False,
            names="A B",
            min_names=2,
        ),
        Command(
            name="schedule",
            summary="find the smallest budgets that meet tau; show or compare schedules",
            text="Takes in each length bin the smallest budget of the profile such that it and all "
            "larger ones have a quantile of alpha of at least tau. tau and quantile come from the "
            "flags, else from the recipe of --config. Of profiles with different page sizes it "
            "takes the schedule that reads the fewest tokens. If the profile has two halves, a "
            "schedule found on each is judged on the other.",
            example="sparrow schedule --profile=runs/profile.json --out=runs/schedule.json",
            run=command_runs.schedule,
            names="[NAME...]",
            flags=(
                Flag("profile", _PROFILES),
                Flag("preset", "show or export a published schedule instead, e.g. qwen3-1.7b-0.86"),
                Flag(
                    "compare",
                    "compare published schedules and files instead, e.g. qwen3-4b-0.86,s.json",
                ),
                Flag("tau", "threshold, 0 to 1", kind=float),
                Flag("quantile", "tail that must meet it; 0.05 = p5", kind=float),
                Flag("rule", _RULE),
                Flag("monotone", _MONOTONE, kind=bool),
                Flag("extrapolate", _EXTRAPOLATE, kind=bool),
                Flag(
                    "out", "JSON file to write, with a plot .svg beside it; with --compare an .svg"
                ),
            ),
        ),
        Command(
            name="cost",
            summary="tokens/s, speedup and best page size that a schedule allows on a chip",
            text="Two models: the bytes of a decode step (weights, KV of dense and sparse layers, "
            "reserved pages, landmarks, prefill, for the batch that fits) at the chip's peak "
            "rates, and the eFLOPs of the paper. They are bounds, not measurements; the formulas "
            "are in common/cost.",
            example="sparrow cost --model=qwen3-4b --schedule=qwen3-4b-0.86 --lengths=32768 "
            "--chip=h200",
            run=command_runs.cost,
            takes_config=False,
            flags=_COST_FLAGS,
        ),
        Command(
            name="eval",
            summary="held-out reward of a model, with dense decoding",
            text="Samples and scores held-out prompts, either with model and recipe of a finished "
            "run (--run), or with those of --config and --model; under their schedule too, if they "
            "have one.",
            example="sparrow eval --run=runs/a --samples=4",
            run=command_runs.evaluate,
            flags=(
                Flag("run", "directory of a finished run"),
                _MODEL,
                Flag("samples", "samples per prompt", kind=int, default=1),
                Flag("greedy", "decode greedily instead of sampling", kind=bool, default=False),
            ),
        ),
        Command(
            name="study",
            summary="dense, fixed and scheduled rollouts over several seeds, with intervals",
            text="For each seed: warm-up, profile, schedule, then one training run for each arm, "
            "--jobs of them at the same time. A stopped study goes on where it was. Writes "
            "study.json and study.svg.",
            example="sparrow study --config=configs/demo.py --out=runs/study",
            run=command_runs.study,
            resumes=True,
            flags=(
                Flag("out", "directory of the study", required=True),
                Flag("seeds", "number of seeds", kind=int, default=3),
                Flag("fixed", "schedule of the fixed arm", default="k=2"),
                Flag("jobs", "number of runs at the same time, one core each", kind=int, default=2),
            ),
        ),
        Command(
            name="report",
            summary="one self-contained HTML page about one or more runs",
            text="Shows reward, response length, mismatch per length bin with tau, schedule, "
            "throughput and the time of each stage; several runs share the axes.",
            example="sparrow report runs/dense runs/scheduled --out=runs/report.html",
            run=command_runs.report,
            flags=(
                Flag("out", "page to write; default: report.html in the first run"),
                Flag("bench", "file of `sparrow bench decode --out=FILE`, to be shown too"),
            ),
            takes_config=False,
            names="RUN...",
            min_names=1,
        ),
        Command(
            name="doctor",
            summary="what this machine can run, and why not the rest",
            text="Checks Python, packages, devices and tools, and changes nothing.",
            example="sparrow doctor",
            run=command_runs.doctor,
            takes_config=False,
        ),
        Command(
            name="bench",
            summary="time sparse against dense decode, or a profile against dense passes",
            text="decode: dense and sparse decode of the same weights, with 8 sequences of "
            "--context tokens and the pages that the published schedule qwen3-1.7b-0.86 reads "
            "there (256 of 16 tokens at 32K); prints times, GB/s, memory and the number of "
            "compilations. profile: four budgets at 4,096 tokens against five dense forward "
            "passes of the model in --model.",
            example="sparrow bench decode",
            run=command_runs.bench,
            flags=(
                Flag("model", "model directory, for profile only"),
                Flag(
                    "context",
                    "cached tokens of a sequence, for decode only; default 32768",
                    kind=int,
                ),
                Flag("out", "JSON file to which the numbers are written"),
            ),
            takes_config=False,
            names="decode|profile",
            min_names=1,
        ),
    )
}
