"""Build the parts that a configuration names: task, prompts, schedule, backend."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterator

from common import schedule as schedules
from common import tasks
from common.config import Config
from common.errors import UserError
from common.grading import GraderPool
from common.prompts import PromptSource
from common.protocols import Backend
from common.schedule import Schedule
from common.tasks import Task

BACKENDS = {"jax": "sparrow_jax"}
"""Package of each rollout engine that is built in; an engine has the name of its framework."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the stages work with. schedule None = dense. pool None = no graders needed."""

    config: Config
    task: Task
    prompts: PromptSource
    schedule: Schedule | None
    backend: Backend
    pool: GraderPool | None


def backend_package(config: Config) -> str:
    """Import name of the configured backend; UserError if it is not built in or not installed."""
    engine = config.rollout.engine
    if engine not in BACKENDS:
        raise UserError(
            f"--config.rollout.engine={engine}: not built in yet; use {', '.join(BACKENDS)}"
        )
    if importlib.util.find_spec(engine) is None:
        raise UserError(f"{engine} is not installed; run: pip install 'sparrow-rl[{engine}]'")
    return BACKENDS[engine]


def resolve_schedule(config: Config) -> Schedule | None:
    """The schedule that config.rollout.schedule names."""
    return schedules.resolve(
        config.rollout.schedule,
        page_size=config.rollout.page_size,
        bin_tokens=config.mismatch.bin_tokens,
    )


@contextlib.contextmanager
def open_parts(config: Config) -> Iterator[Parts]:
    """Everything that can be refused is refused here, the cheap checks first."""
    package = backend_package(config)
    schedule = resolve_schedule(config)
    task = tasks.build_task(config.task, config.model.path)
    prompts = PromptSource(task, config.task, config.rollout)
    backend = importlib.import_module(package).build(
        config, vocab_size=task.vocab_size, stop_ids=task.stop_ids
    )
    with contextlib.ExitStack() as stack:
        pool = None
        if task.deadline_seconds is not None:
            pool = stack.enter_context(GraderPool(os.cpu_count() or 1, task.deadline_seconds))
        yield Parts(
            config=config, task=task, prompts=prompts, schedule=schedule, backend=backend, pool=pool
        )
