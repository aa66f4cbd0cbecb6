"""Build the parts that a configuration names: task, prompts, schedule, backend.

Backends are imported here by name, inside functions: this is the only wiring between common/ and a
backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from common.config import Config
from common.errors import UserError
from common.model import hf_config
from common.model.geometry import Geometry
from common.protocols import Backend, RolloutEngine, Scorer, ScorerModule
from common.records import json_checks
from common.records.run_dir import RunDir, atomic_write_text
from common.schedule import schedule as schedules
from common.schedule.schedule import Schedule
from common.tasks import registry
from common.tasks.grading import GraderPool
from common.tasks.prompt_files import FileTask
from common.tasks.prompts import PromptSource
from common.tasks.registry import Task
from common.types import Prompt, Rollout

LEARNER = "sparrow_jax"
"""Package of the learner, the scorer and the checkpoints."""
ENGINES = {"jax": "sparrow_jax", "torch": "sparrow_torch"}
"""Package of each rollout engine by the name of its framework."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the steps of the loop work with.

    schedule: None decodes densely. pool: grader processes, None if the task needs none.
    """

    config: Config
    task: Task
    prompts: PromptSource
    schedule: Schedule | None
    backend: Backend
    pool: GraderPool | None


def engine_package(config: Config) -> str:
    """Import name of the configured engine's package.

    Raises UserError if the engine is not built in, or if its framework or the learner's (jax) is
    not installed.
    """
    engine = config.rollout.engine
    if engine not in ENGINES:
        raise UserError(
            f"--config.rollout.engine={engine}: not built in yet; use {', '.join(ENGINES)}"
        )
    for framework in ("jax", engine):
        if importlib.util.find_spec(framework) is None:
            install = f"pip install 'sparrow-rl[{framework}]'"
            raise UserError(f"{framework} is not installed; run: {install}")
    return ENGINES[engine]


def build_backend(config: Config, *, vocab_size: int, stop_ids: Sequence[int]) -> Backend:
    """Learner, scorer and engine; an engine of another framework gets the learner's weights.

    vocab_size: tokens that the task uses. stop_ids: tokens that end a response.
    """
    package = engine_package(config)
    backend = importlib.import_module(LEARNER).build(
        config, vocab_size=vocab_size, stop_ids=stop_ids
    )
    if config.rollout.engine == "jax":
        return backend
    engine = importlib.import_module(package).build_engine(
        config, geometry=backend.geometry, stop_ids=stop_ids
    )
    foreign = ForeignEngine(engine, backend.export_weights)
    foreign.load_weights(backend.learner.params, 0)
    return dataclasses.replace(
        backend,
        engine=foreign,
        description={**backend.description, "engine": engine.description},
    )


def build_scorer(config: Config) -> tuple[Scorer, Geometry, str]:
    """A scorer of the engine's framework, without engine or learner; see ScorerModule."""
    module = importlib.import_module(f"{engine_package(config)}.backend")
    return cast(ScorerModule, module).build_scorer(config)


class ForeignEngine:
    """Wraps an engine of another framework, so that it takes the params of the learner."""

    def __init__(
        self, engine: RolloutEngine, export_weights: Callable[[Any], Mapping[str, Any]]
    ) -> None:
        self._engine, self._export = engine, export_weights

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> Rollout:
        """See RolloutEngine."""
        return self._engine.generate(prompts, **how)

    def load_weights(self, params: Any, version: int) -> None:
        """Hand the learner's params to the engine by name."""
        self._engine.load_weights(self._export(params), version)


def check_context(config: Config) -> None:
    """Raise UserError if a sequence may be longer than the context of the model in model.path."""
    r = config.rollout
    hf_config.check_context(
        config.model.path,
        r.max_prompt_tokens + r.max_response_tokens,
        f"rollout.max_prompt_tokens={r.max_prompt_tokens} and "
        f"rollout.max_response_tokens={r.max_response_tokens}",
    )


def resolve_schedule(config: Config) -> Schedule | None:
    """The schedule that config.rollout.schedule names; None for "dense"."""
    return schedules.resolve(
        config.rollout.schedule,
        page_size=config.rollout.page_size,
        bin_tokens=config.mismatch.bin_tokens,
    )


@contextlib.contextmanager
def open_parts(config: Config) -> Iterator[Parts]:
    """Build the parts and, at the end, stop the graders.

    Whatever is wrong with the configuration raises UserError here, before the first step; the cheap
    checks come first.
    """
    engine_package(config)
    check_context(config)
    schedule = resolve_schedule(config)
    task = registry.build_task(config.task, config.model.path, config.rollout.max_prompt_tokens)
    prompts = PromptSource(task, config.task, config.rollout)
    if isinstance(task, FileTask):
        print("\n".join(task.describe(config.task.eval_seed)))
    backend = build_backend(config, vocab_size=task.vocab_size, stop_ids=task.stop_ids)
    with contextlib.ExitStack() as stack:
        pool = None
        if task.deadline_seconds is not None:
            pool = stack.enter_context(GraderPool(os.cpu_count() or 1, task.deadline_seconds))
        yield Parts(
            config=config, task=task, prompts=prompts, schedule=schedule, backend=backend, pool=pool
        )


def check_response_limit(parts: Parts) -> None:
    """Raise UserError if the task knows that every response is cut before it can earn a reward."""
    least, limit = getattr(parts.task, "min_response_tokens", 1), parts.config.rollout
    if limit.max_response_tokens < least:
        raise UserError(
            f"rollout.max_response_tokens={limit.max_response_tokens}: no answer of "
            f"{parts.task.name} is that short, every reward would be 0; expected at least {least}"
        )


def resume_point(extra: Mapping[str, Any] | None) -> tuple[int, int]:
    """(next step, version of the weights) from a checkpoint's `extra`; (0, 0) if that is None."""
    if extra is None:
        return 0, 0
    step, version = (
        json_checks.integer(extra.get(key), f"the checkpoint's {key}", 0)
        for key in ("step", "version")
    )
    return step, version


def announce(parts: Parts, run: RunDir, step: int) -> None:
    """Print what runs, and write the schedule into the run directory.

    A resumed run must have the schedule that it was started with: the configuration names a file,
    and its content may have changed since. Raises UserError if it has changed, or if a file of the
    start model or of the task has.
    """
    run.keep_files(parts.task.files)
    schedule, path = parts.schedule, run.path / "schedule.json"
    record = "dense" if schedule is None else schedule.to_json()
    if step and path.is_file() and _effect(_kept(path)) != _effect(record):
        raise UserError(
            f"rollout.schedule={parts.config.rollout.schedule}: is no longer the schedule that "
            f"{run.path} was started with (kept in its schedule.json); restore it or name a new run"
        )
    text = "dense" if schedule is None else schedule.describe()
    facts = ", ".join(f"{k} {v}" for k, v in parts.backend.description.items())
    left = f"; goes on at step {step}" if step < parts.config.num_steps else "; is finished"
    print(f"{run.path}: {facts}; rollout {text}" + (left if step else ""))
    atomic_write_text(path, json.dumps(record, indent=1) + "\n")


def _kept(path: Path) -> str | dict[str, Any]:
    """The schedule in a run directory: "dense", or the content of a schedule file."""
    try:
        if json.loads(path.read_text(encoding="utf-8")) == "dense":
            return "dense"
    except (ValueError, RecursionError):
        pass  # read_object below reports it
    return schedules.parse(json_checks.read_object(path), str(path)).to_json()


def _effect(record: str | dict[str, Any]) -> Any:
    """The part of a schedule file that affects rollouts: all but its name and provenance."""
    return record if isinstance(record, str) else (record["page_size"], record["bins"])
