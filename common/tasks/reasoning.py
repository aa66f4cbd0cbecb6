"""Tasks of the package reasoning-gym (0.1.25), by name: `reasoning_gym:<generator>`.

A problem is the question of the generator as one user message; the answer is the text between the
last <answer> and </answer>. Without the tag there is no reward. Scorers run in worker processes
with a deadline (common/tasks/grading.py). Generators with a scorer that evaluates the response as
code, or hangs on some responses, are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.tasks.chat import TextCodec, require
from common.tasks.grading import GraderPool, Job
from common.types import Prompt

PREFIX = "reasoning_gym:"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
ITEMS_PER_STREAM = 2**20
NUM_STREAMS = 2**12

_EVALUATES = "its scorer evaluates the response as code or hangs on some; it would need a sandbox"
_NO_JSON = "its scorer needs Python tuples, which JSON does not have"
REFUSED = {
    **dict.fromkeys(
        (
            "binary_matrix",
            "countdown",
            "intermediate_integration",
            "n_queens",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
            "spiral_matrix",
            "string_insertion",
        ),
        _EVALUATES,
    ),
    "arc_agi": _NO_JSON,
    "rearc": _NO_JSON,
    "composite": "it is a mixture of others; name one of them",
}
"""Generators that are not offered, with the reason."""
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def stream(seed: int) -> int:
    """First item seed of the stream `seed`: (seed mod 2^12) * 2^20; items have seed + index.

    Item `index` of a reasoning-gym data set comes from Random(seed + index), so data sets with
    neighbouring seeds overlap. Two streams are either equal or have no item in common.
    """
    return seed % NUM_STREAMS * ITEMS_PER_STREAM


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningTask:
    """One generator. args: fields of its configuration, except seed and size."""

    generator: str
    codec: TextCodec
    deadline_seconds: float
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    num_items = None
    max_prompt_tokens = None

    def __post_init__(self) -> None:
        check_generator(self.generator, self.args)

    @property
    def name(self) -> str:
        return PREFIX + self.generator

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size

    @property
    def pad_id(self) -> int:
        return self.codec.pad_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.codec.stop_ids

    @property
    def files(self) -> tuple[Path, ...]:
        return self.codec.files

    def prompt(self, seed: int, index: int) -> Prompt:
        """Problem `index` < 2^20 of stream `seed`: a pure function of both."""
        if not 0 <= index < ITEMS_PER_STREAM:
            raise UserError(f"{index=}: a stream of {self.name} has {ITEMS_PER_STREAM} problems")
        entry = _dataset(self.generator, json.dumps(self.args), stream(seed) + index)[0]
        content = f"{entry['question']}\n{INSTRUCTION}"
        return Prompt(
            prompt_id=index,
            tokens=self.codec.encode([{"role": "user", "content": content}]),
            task=self.name,
            answer=make_answer(self.generator, self.args, entry),
        )

    def job(self, answer: Mapping[str, Any], response: np.ndarray) -> Job:
        """The job of scoring the response in a worker."""
        return make_job(answer, self.codec.text(response))

    def score(self, answer: Mapping[str, Any], response: np.ndarray) -> float:
        """Score of one response in a worker of its own; slow, for many use `registry.score`."""
        with GraderPool(1, self.deadline_seconds) as pool:
            return pool.score([self.job(answer, response)])[0]

    def text(self, tokens: np.ndarray) -> str:
        return self.codec.text(tokens)


def make_answer(
    generator: str, args: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer of a Prompt; the entry of the generator is converted to plain JSON types."""
    entry = json.loads(json.dumps(dict(entry), default=str))
    return {"generator": generator, "args": dict(args), "entry": entry}


def make_job(answer: Mapping[str, Any], text: str) -> Job:
    """The job for a grader pool of scoring the response `text`."""
    return Job(
        scorer="common.tasks.reasoning_scorer:score_entry",
        answer=answer,
        response=final_answer(text),
    )


def final_answer(text: str) -> str | None:
    """Text between the last <answer> and the </answer> after it, stripped; None without a tag.

    Without the tag, a response could earn a share of the reward by naming many answers.
    """
    _, opened, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if opened else None


def score_entry(answer: Mapping[str, Any], response: str | None) -> float:
    """The score by the generator's own scorer, 0 if there is no response.

    Runs in a worker process only: it may hang or raise.
    """
    if response is None:
        return 0.0
    dataset = _dataset(answer["generator"], json.dumps(answer["args"]), 0)
    return float(dataset.score_answer(answer=response, entry=answer["entry"]))


def check_scorer(answer: Mapping[str, Any]) -> None:
    """UserError if the scorer fails on the right answer itself.

    Otherwise a missing package, or metadata that a row lacks, would silently score every response
    0.
    """
    try:
        score_entry(answer, answer["entry"]["answer"])
    except _FAILURES as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{PREFIX}{answer['generator']}: its scorer fails on the right answer "
            f"({type(error).__name__}: {said})"
        ) from None


def check_generator(generator: str, args: Mapping[str, Any]) -> None:
    """UserError for unknown or refused generators, and for unknown or impossible options."""
    if generator in REFUSED:
        raise UserError(f"task {PREFIX}{generator} is not offered: {REFUSED[generator]}")
    require("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    if generator not in DATASETS:
        near = difflib.get_close_matches(generator, sorted(set(DATASETS) - set(REFUSED)), 1, 0.0)
        raise UserError(f"task {PREFIX}{generator}: unknown generator; nearest: {near[0]}")
    config = DATASETS[generator][1]
    known = [f.name for f in dataclasses.fields(config) if f.name not in ("seed", "size")]
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"task {PREFIX}{generator}: unknown option {key!r}; {hint}")
    try:
        _dataset(generator, json.dumps(dict(args)), 0)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"task {PREFIX}{generator}: options {dict(args)}: {error}") from None


@functools.lru_cache(maxsize=4)
def _dataset(generator: str, args: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(generator, seed=seed, size=1, **json.loads(args))
