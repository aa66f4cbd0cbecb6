"""Tasks by name, and the scoring of a rollout.

pointer_chase               common/tasks/pointer_chase.py; its own tokens
reasoning_gym:<generator>   common/tasks/reasoning.py; needs a tokenizer
FILE.jsonl, FILE.parquet    common/tasks/prompt_files.py; verl's columns
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import prompt_files, reasoning
from common.tasks.chat import load_codec
from common.tasks.grading import GraderPool, Job, checked_score
from common.tasks.pointer_chase import PointerChase
from common.tasks.prompt_rows import SUFFIXES
from common.types import Prompt, Rollout


class Task(Protocol):
    """A source of problems with a scorer.

    num_items: number of problems, None = endless. max_prompt_tokens: None = unknown beforehand.
    deadline_seconds: wall time that one job may take; None if the task never makes jobs.
    files: every file that prompts and answers are made from; a run depends on their content.
    A task that can write answers also has `demonstration`. A task that knows the length of the
    shortest response with a reward also has `min_response_tokens` (see PointerChase).
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def num_items(self) -> int | None: ...
    @property
    def max_prompt_tokens(self) -> int | None: ...
    @property
    def deadline_seconds(self) -> float | None: ...
    @property
    def files(self) -> tuple[Path, ...]: ...

    def prompt(self, seed: int, index: int) -> Prompt:
        """Problem `index` of the stream `seed`, a pure function of both; prompt_id = index."""
        ...

    def job(self, answer: Mapping[str, Any], response: np.ndarray) -> Job | None:
        """The job for a grader pool; None if `score` is pure and quick and can be called here."""
        ...

    def score(self, answer: Mapping[str, Any], response: np.ndarray) -> float:
        """Score in [0, 1] of one response (token ids as sampled, stop token included)."""
        ...

    def text(self, tokens: np.ndarray) -> str:
        """Tokens for people to read."""
        ...


def build_task(
    config: TaskConfig, model_path: str = "", max_prompt_tokens: int | None = None
) -> Task:
    """The task that `config.name` names; text tasks take the model's tokenizer if none is given.

    max_prompt_tokens: longer rows of a file are refused, or left out (`config.drop_long_prompts`).
    Raises UserError for unknown names (with the nearest one), unknown options and bad files.
    """
    name = config.name
    stream_seeds(config)
    if name == PointerChase.name:
        return prompt_files.make_chase(config)
    if name.startswith(reasoning.PREFIX):
        streams = [reasoning.stream(seed) for seed in stream_seeds(config)]
        if len(set(streams)) < 3:
            raise UserError(
                f"seed={config.seed}, eval_seed={config.eval_seed}: training and held-out problems "
                f"of {name} would overlap (seeds count modulo {reasoning.NUM_STREAMS}); change one"
            )
        generator = name.removeprefix(reasoning.PREFIX)
        reasoning.check_generator(generator, config.args)
        task = reasoning.ReasoningTask(
            generator=generator,
            args=config.args,
            codec=load_codec(config.tokenizer, model_path, config.date),
            deadline_seconds=config.deadline_seconds,
        )
        task.codec.encode([{"role": "user", "content": "?"}], loading=True)  # try the template
        reasoning.check_scorer(task.prompt(config.seed, 0).answer)
        return task
    if name.endswith(SUFFIXES):
        return prompt_files.load_file_task(config, model_path, max_prompt_tokens)
    known = [PointerChase.name, f"{reasoning.PREFIX}<generator>"]
    near = difflib.get_close_matches(name, known, 1, 0.0)[0]
    raise UserError(
        f"task.name={name!r}: unknown task; nearest: {near}; or a file *.jsonl, *.parquet"
    )


def stream_seeds(config: TaskConfig) -> tuple[int, int, int]:
    """Seeds of the training, evaluation and profile prompts, all different."""
    profile = config.eval_seed + (2 if config.seed == config.eval_seed + 1 else 1)
    return config.seed, config.eval_seed, profile


def score(task: Task, rollout: Rollout, pool: GraderPool | None = None) -> np.ndarray:
    """Rewards float32 [B] in [0, 1], one per row of the rollout.

    Rows that need a worker go through `pool`, or without one through a pool for this call, which
    takes a second or more to start. A score that is not a number in [0, 1] counts as 0.
    """
    num_rows = len(rollout.prompts)
    rewards = np.zeros(num_rows, np.float32)
    jobs: dict[int, Job] = {}
    for row in range(num_rows):
        answer, response = rollout.prompts[row].answer, rollout.response(row)
        job = task.job(answer, response)
        if job is None:
            rewards[row] = checked_score(task.score(answer, response)) or 0.0
        else:
            jobs[row] = job
    if not jobs:
        return rewards
    if pool is None:
        workers = min(len(jobs), os.cpu_count() or 1)
        assert task.deadline_seconds is not None, "a task that makes jobs has a deadline"
        with GraderPool(workers, task.deadline_seconds) as own:
            rewards[list(jobs)] = own.score(list(jobs.values()))
    else:
        rewards[list(jobs)] = pool.score(list(jobs.values()))
    return rewards
