"""The training loop, backend-blind: read this file first.

    1 prompts -> 2 rollout -> 3 rewards -> 4 scored -> 5 batch -> 6 mismatch -> 7 update
    -> 8 push -> 9 record -> 10 checkpoint

A step is a pure function of (weights, optimizer state, controller state, step number,
configuration): prompts, noise, shuffling and replayed rows are all derived from the step number. So
a killed run resumes from its last complete checkpoint and writes the same record. The record of a
step is written before the checkpoint that counts it; on resume, steps past the checkpoint are
repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.mismatch import measure, rollout_stats
from common.mismatch.alarms import Watch
from common.mismatch.controller import ADAPTED, Controller, check_controller, open_controller
from common.objective.prepare import prepare_batch
from common.records import metrics
from common.records.progress import Progress
from common.records.run_dir import RunDir
from common.rollout import noise
from common.setup import (
    Parts,
    announce,
    check_response_limit,
    open_parts,
    resolve_schedule,
    resume_point,
)
from common.tasks import evaluation, registry
from common.types import Prompt, Rollout

SAMPLE, SHUFFLE, REJECT, GREEDY = range(4)
"""Each use of randomness in a step has a seed of its own: fold_in(rollout.seed, step, USE)."""


def train(config: Config, run: RunDir) -> None:
    """Start or resume the training run in `run`; at the end, save the policy as RUN/model.

    Raises UserError if the configuration, a file that it names or the kept run does not fit.
    """
    if config.rollout.top_p < 1:
        raise UserError(
            f"rollout.top_p={config.rollout.top_p}: training needs 1.0, since the dense policy's "
            "log-probs are not renormalised over the nucleus"
        )
    check_controller(config, resolve_schedule(config))
    with open_parts(config) as parts:
        check_response_limit(parts)
        checkpoints = parts.backend.open_checkpoints(run.path / "checkpoints")
        extra = checkpoints.restore()
        step, version = resume_point(extra)
        push(parts, version)
        announce(parts, run, step)
        controller = open_controller(config, parts.schedule, extra)
        writer = metrics.MetricsWriter(
            run.path,
            resume_step=step,
            console=True,
            total_steps=config.num_steps,
            tau=config.mismatch.tau,
        )
        with contextlib.closing(checkpoints), writer:
            saving: dict[str, Any] = {}
            watch = Watch(metrics.read_metrics(run.path))
            while step < config.num_steps:
                if controller:
                    parts = dataclasses.replace(parts, schedule=controller.schedule)
                before = evaluation.record(parts, "start_") if step == 0 else {}
                values, bins, alarms = train_step(parts, step, version, controller)
                alarms += watch.alarms(values)
                version += 1
                # 8 push
                with _timed(values, "time/push"):
                    push(parts, version)
                # 9 record
                if evaluation.due(config, step + 1):
                    values |= evaluation.record(parts)
                writer.write(step, before | values | saving, bins=bins, alarms=alarms)
                step += 1
                # 10 checkpoint
                if step % config.checkpoint_every == 0 or step == config.num_steps:
                    with _timed(saving, "time/checkpoint"):
                        state: dict[str, Any] = {"step": step, "version": version}
                        if controller:
                            state["controller"] = controller.state_dict()
                            controller.save(run.path / ADAPTED, step)
                        checkpoints.save(step, state)
        parts.backend.save_model(run.path / "model")


def train_step(
    parts: Parts, step: int, version: int, controller: Controller | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Steps 1 to 7 for training step `step`: (values, length bins, alarms) of its record."""
    config, backend, schedule = parts.config, parts.backend, parts.schedule
    seed = config.rollout.seed
    values: dict[str, Any] = {"weights/version": version}
    start = time.perf_counter()

    # 1 prompts
    prompts = parts.prompts.batch(step)
    # 2 rollout
    with _timed(values, "time/rollout"), Progress(f"step {step + 1} rollout") as progress:
        rollout = backend.engine.generate(
            prompts,
            num_samples=config.rollout.samples_per_prompt,
            schedule=schedule,
            seed=noise.fold_in(seed, step, SAMPLE),
            progress=progress,
        )
    assert (rollout.version_BT[rollout.response_mask_BT] == version).all(), "stale weights"
    # 3 rewards
    with _timed(values, "time/reward"):
        rewards = registry.score(parts.task, rollout, parts.pool)
        greedy = _greedy_rewards(parts, prompts, rollout, step)
    # 4 scored
    with _timed(values, "time/score"):
        scored = backend.scorer.logprobs(rollout)
        reference = backend.reference.logprobs(rollout).logp_dense_BT if backend.reference else None
    # 5 batch
    with _timed(values, "time/pack"):
        prepared = prepare_batch(
            rollout,
            scored,
            rewards,
            config,
            reject_seed=noise.fold_in(seed, step, REJECT),
            shuffle_seed=noise.fold_in(seed, step, SHUFFLE),
            greedy_reward_B=greedy,
            logp_ref_BT=reference,
        )
    # 6 mismatch: measure, judge, act
    with _timed(values, "time/mismatch"):
        replay = measure.replay_some(rollout, backend.scorer, schedule, config.mismatch, step)
        mismatch = measure.measure(rollout, scored, prepared.correction, replay, c=config.mismatch)
        alarms = measure.judge(mismatch, config)
        moves = controller.follow(rollout, replay) if controller and replay else {}
    # 7 update
    with _timed(values, "time/update"):
        update = backend.learner.update(prepared.batch)

    values |= rollout_stats.describe_rollout(rollout, rewards, schedule, prepared.advantages)
    values |= rollout_stats.describe_update(rollout, scored, prepared.correction, update.values)
    values |= {**rollout_stats.describe_mismatch(mismatch), **moves, **prepared.batch.stats}
    bins = rollout_stats.describe_bins(
        mismatch, rollout, update.clipped_T, schedule, config.mismatch.bin_tokens
    )
    values["time/step"] = time.perf_counter() - start
    for name in ("rollout", "step"):
        speed = values["rollout/tokens"] / values[f"time/{name}"]
        values[f"throughput/{name}_tokens_per_second"] = speed
    return values, bins, alarms


def push(parts: Parts, version: int) -> None:
    """Hand the learner's weights to engine and scorer under a new version number."""
    for part in (parts.backend.engine, parts.backend.scorer):
        part.load_weights(parts.backend.learner.params, version)


def _greedy_rewards(
    parts: Parts, prompts: list[Prompt], rollout: Rollout, step: int
) -> np.ndarray | None:
    """Rewards [B] of a greedy response to each row's prompt, for the ReMax baseline; else None."""
    if parts.config.grpo.baseline != "greedy":
        return None
    seed = noise.fold_in(parts.config.rollout.seed, step, GREEDY)
    greedy = parts.backend.engine.generate(
        prompts, num_samples=1, schedule=parts.schedule, seed=seed, temperature=0.0
    )
    return registry.score(parts.task, greedy, parts.pool)[rollout.group_B]


@contextlib.contextmanager
def _timed(values: dict[str, Any], name: str) -> Iterator[None]:
    """Store the seconds that the block takes as values[name]."""
    start = time.perf_counter()
    yield
    values[name] = time.perf_counter() - start
