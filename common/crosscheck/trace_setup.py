"""Settings of a trace: backend, sizes, schedule, and the trace that its tokens come from."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.crosscheck.trace_file import IDENTITY, Trace, differ
from common.errors import UserError
from common.schedule.schedule import Schedule
from common.setup import resolve_schedule
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
