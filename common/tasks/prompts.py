"""The prompts of each step: a pure function of (seed, step), so resuming needs only the step.

An endless task has one stream of prompts for each of training, evaluation and profiles. Their seeds
are `task.seed`, `task.eval_seed` and one derived from these.

The rows of a file are ordered by a hash of (eval_seed, row number). The first tenth, at least one
row, is held out for evaluation, the next tenth is for profiles, and the rest is trained on. An
epoch is a permutation of the training rows by (seed, epoch). The rows at its end that do not fill a
step are left out, different ones in every epoch. `FileTask.describe` warns of problems that a file
states twice.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from common.config import RolloutConfig, TaskConfig
from common.errors import UserError
from common.tasks.prompt_files import split_rows
from common.tasks.registry import Task, stream_seeds
from common.types import Prompt

EVAL_IDS = 2**30
"""prompt_id of the first evaluation prompt of an endless task."""
PROFILE_IDS = 2**30 + 2**29
"""prompt_id of the first profile prompt of an endless task."""
_END_IDS = 2**31


class PromptSource:
    """Prompts of a run; prompt_ids are unique over training, evaluation and profile.

    Raises UserError for prompts that are empty or longer than rollout.max_prompt_tokens, and for a
    file with fewer training rows than a step takes.
    """

    def __init__(self, task: Task, config: TaskConfig, rollout: RolloutConfig) -> None:
        self.task = task
        self._config = config
        self._limit = rollout.max_prompt_tokens
        self._per_step = rollout.prompts_per_step
        self._seeds = stream_seeds(config)
        if task.max_prompt_tokens is not None and task.max_prompt_tokens > self._limit:
            raise UserError(self._too_long(f"{task.name}: prompts of", task.max_prompt_tokens))
        if task.num_items is not None:
            self._rows = split_rows(task.num_items, config.eval_seed)
            if len(self._rows[0]) < self._per_step:
                raise UserError(
                    f"{task.name}: {len(self._rows[0])} training rows (of {task.num_items}), "
                    f"expected at least rollout.prompts_per_step={self._per_step}"
                )

    def batch(self, step: int) -> list[Prompt]:
        """The rollout.prompts_per_step prompts of training step `step`, from 0."""
        if step < 0:
            raise ValueError(f"{step=}: expected at least 0")
        first = step * self._per_step
        if self.task.num_items is None:
            if first + self._per_step > EVAL_IDS:
                raise UserError(f"{step=}: more than {EVAL_IDS} training prompts")
            return [self._endless(0, i, 0) for i in range(first, first + self._per_step)]
        epoch, step_in_epoch = divmod(step, len(self._rows[0]) // self._per_step)
        order = _permutation(self._rows[0], self._config.seed, epoch)
        first = step_in_epoch * self._per_step
        return [self._row(row) for row in order[first : first + self._per_step]]

    def eval_batch(self, n: int) -> list[Prompt]:
        """The first n held-out prompts, always the same; fewer if a file has fewer."""
        return self._held_out(1, n, EVAL_IDS, PROFILE_IDS)

    def fewer_held_out(self, n: int) -> str | None:
        """A line that says how many prompts `eval_batch(n)` has, if they are fewer than n."""
        have = n if self.task.num_items is None else len(self._rows[1])
        if have >= n:
            return None
        return (
            f"{have} held-out prompt{'s' * (have > 1)}, not task.num_eval_prompts={n}: "
            f"{self.task.name} has {self.task.num_items} rows, of which a tenth is held out; "
            "give a file of more rows"
        )

    def profile_batch(self, n: int) -> list[Prompt]:
        """The first n prompts for profiles: neither trained on nor evaluated on."""
        return self._held_out(2, n, PROFILE_IDS, _END_IDS)

    def _held_out(self, split: int, n: int, first_id: int, end_id: int) -> list[Prompt]:
        if not 1 <= n <= end_id - first_id:
            raise ValueError(f"{n=}: expected in [1, {end_id - first_id}]")
        if self.task.num_items is not None:
            return [self._row(row) for row in self._rows[split][:n]]
        return [self._endless(split, i, first_id) for i in range(n)]

    def _endless(self, split: int, index: int, first_id: int) -> Prompt:
        prompt = self._checked(self.task.prompt(self._seeds[split], index))
        return dataclasses.replace(prompt, prompt_id=first_id + index)

    def _row(self, row: int) -> Prompt:
        prompt = self._checked(self.task.prompt(0, int(row)))
        return dataclasses.replace(prompt, prompt_id=int(row))

    def _checked(self, prompt: Prompt) -> Prompt:
        if len(prompt.tokens) == 0:
            raise UserError(f"{self.task.name}: prompt {prompt.prompt_id} is empty")
        if len(prompt.tokens) > self._limit:
            what = f"{self.task.name}: prompt {prompt.prompt_id} of"
            raise UserError(self._too_long(what, len(prompt.tokens)))
        return prompt

    def _too_long(self, what: str, tokens: int) -> str:
        return (
            f"{what} {tokens} tokens, over rollout.max_prompt_tokens={self._limit}; "
            "raise it or drop the prompts"
        )


@functools.lru_cache(maxsize=2)
def _order(rows: bytes, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(np.frombuffer(rows, np.int64))


def _permutation(rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return _order(rows.astype(np.int64).tobytes(), seed, epoch)
