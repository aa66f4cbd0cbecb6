"""Supervised training of a policy from scratch on the task's own demonstrations.

Stages go from small to large problems. A stage ends when the running probability of the right
look-ups reaches its goal, or at its step limit. The last stage uses imperfect demonstrations and
so leaves room for reinforcement learning. Batches are a pure function of (seed, step), and the
state is checkpointed, so a warm-up that was killed goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from common.config import Config
from common.errors import UserError
from common.records import json_checks, stopping
from common.records.progress import Progress
from common.records.run_dir import RunDir
from common.tasks import registry
from sparrow_jax import backend, hf
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.scorer import token_logprobs

SAVE_EVERY = 200
SMOOTHING = 0.1
RAMP_STEPS = 50
PROMPT_WEIGHT = 0.1
"""Loss weight of prompt tokens that repeat an earlier fact, which also trains look-ups."""


class Trainer:
    """Weights and AdamW state of the warm-up, with the state_dict of a learner."""

    def __init__(self, config: Config, vocab_size: int):
        self.geometry, self.graph, self.params = backend.init_model(config, vocab_size)
        self.dtype = backend.compute_dtype(config.learner.dtype)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(1.0, b2=0.98, weight_decay=0.01)
        )
        self.opt_state = self.optimizer.init(self.params)

    def state_dict(self) -> Any:
        """What a checkpoint holds: plain nested dicts and lists of arrays."""
        return {
            "params": nnx.to_pure_dict(self.params),
            "opt_state": jax.tree.leaves(self.opt_state),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take a state that state_dict of a trainer with the same geometry made."""
        nnx.replace_by_pure_dict(self.params, state["params"])
        tree = jax.tree.structure(self.opt_state)
        self.opt_state = jax.tree.unflatten(tree, state["opt_state"])

    def step(self, tokens, weight, decision, rate: float) -> float:
        """One update at learning rate `rate`; returns the mean probability of right look-ups."""
        self.params, self.opt_state, probability = _step(
            self.params, self.opt_state, tokens, weight, decision, np.float32(rate),
            graph=self.graph, dtype=self.dtype, optimizer=self.optimizer,
        )  # fmt: skip
        return float(probability)


@functools.partial(
    jax.jit, static_argnames=("graph", "dtype", "optimizer"), donate_argnames=("params", "state")
)
def _step(
    params, state, tokens_BT, weight_BT, decision_BT, rate, *, graph, dtype, optimizer
) -> tuple[Any, Any, jax.Array]:
    def loss(params) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        logp, _ = token_logprobs(model, tokens_BT, 1.0, dtype=dtype, remat=False)
        right = jnp.sum(jnp.exp(logp) * decision_BT) / jnp.maximum(decision_BT.sum(), 1)
        return -jnp.sum(logp * weight_BT) / weight_BT.sum(), right

    (_, right), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    updates = jax.tree.map(lambda u: u * rate, updates)
    return optax.apply_updates(params, updates), state, right


def warmup(config: Config, run: RunDir) -> None:
    """Train until every stage is done and write RUN/model; does nothing if that exists.

    Raises: UserError if the task has no demonstrations.
    """
    task = registry.build_task(config.task)
    if not hasattr(task, "demonstration"):
        raise UserError(f"task.name={config.task.name!r} has no demonstrations to warm up on")
    if (run.path / "model" / "config.json").is_file():
        print(f"{run.path}/model is there already; nothing to do")
        return
    run.keep_files(task.files)
    trainer = Trainer(config, task.vocab_size)
    checkpoints = Checkpoints(run.path / "checkpoints", trainer, config.keep_checkpoints)
    state = _goes_on_at(checkpoints.restore())
    size = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(f"warm-up of a policy with {size:,} parameters from step {state['step']}")
    with contextlib.closing(checkpoints), Progress("warm-up") as progress:
        stages = [*config.warmup.stages, _last_stage(config, task)]
        for number in range(state["stage"], len(stages)):
            state = _run_stage(config, task, trainer, checkpoints, stages, number, state, progress)
    hf.save(run.path / "model", trainer.geometry, trainer.params, source=config.model.path)
    print(f"wrote {run.path}/model")


def _goes_on_at(kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state to go on with: that of a checkpoint, or that of the start."""
    if kept is None:
        return {"step": 0, "stage": 0, "stage_step": 0, "right": 0.0}
    names, what = ("step", "stage", "stage_step"), "the checkpoint's"
    counts = {n: json_checks.integer(kept.get(n), f"{what} {n}", 0) for n in names}
    return {**counts, "right": json_checks.number(kept.get("right"), f"{what} right", 0, 1.01)}


def _last_stage(config: Config, task: Any) -> tuple[float, ...]:
    """The stage on imperfect demonstrations, at the task's own sizes, up to its step limit."""
    w = config.warmup
    return (w.noise_steps, w.noise_batch, task.min_entries, task.max_entries, 2.0)


def _run_stage(
    config, task, trainer, checkpoints, stages, number, state, progress
) -> dict[str, Any]:
    """Train one stage to its goal; returns the state with which the next one starts."""
    max_steps, batch, low, high, goal = stages[number]
    last = number == len(stages) - 1
    noise = config.warmup.noise if last else 0.0
    step, right, start = state["step"], state["right"], time.monotonic()
    total = int(sum(s[0] for s in stages))
    for stage_step in range(state["stage_step"], int(max_steps)):
        stopping.check()
        data = demonstrations(
            task, config.warmup.seed, step, int(batch), int(low), int(high), noise
        )
        rate = config.warmup.learning_rate * min(1.0, (step + 1) / RAMP_STEPS)
        if last:
            rate *= 1 - stage_step / max_steps
        probability = trainer.step(*data, rate)
        right += (probability - right) * max(SMOOTHING, 1 / (stage_step + 1))
        step += 1
        progress(step, total)
        done = stage_step >= 10 and right >= goal
        if step % SAVE_EVERY == 0 and not done:
            here = {"step": step, "stage": number, "stage_step": stage_step + 1, "right": right}
            checkpoints.save(step, here)
        if done:
            break
    progress.print(
        f"stage {number + 1}/{len(stages)}: {int(low)}-{int(high)} facts, step {step}, "
        f"right look-ups {right:.3f}, {time.monotonic() - start:.0f} s"
    )
    return {"step": step, "stage": number + 1, "stage_step": 0, "right": 0.0}


def demonstrations(
    task, seed, step, batch, low, high, noise
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens int32 [B, T], loss weight float32 [B, T], and mask float32 [B, T] of the look-ups.

    A pure function of (seed, step) and the sizes.
    """
    rng = np.random.default_rng([seed, step])
    shown = [task.demonstration(rng, low, high, noise) for _ in range(batch)]
    sizes = dataclasses.replace(task, min_entries=low, max_entries=high)
    longest = -(-(sizes.max_prompt_tokens + sizes.max_response_tokens) // 32) * 32
    tokens = np.zeros((batch, longest), np.int32)
    weight, decision = (
        np.zeros((batch, longest), np.float32),
        np.zeros((batch, longest), np.float32),
    )
    for i, (prompt, response, decides) in enumerate(shown):
        n, m = len(prompt), len(prompt) + len(response)
        tokens[i, :n], tokens[i, n:m] = prompt, response
        weight[i, n:m], decision[i, n:m] = 1.0, decides
        weight[i, :n] = PROMPT_WEIGHT * task.stated_before(prompt)
    return tokens, weight, decision
