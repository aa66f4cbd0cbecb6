"""The held-out reward of a policy, with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from common.config import Config
from common.records.progress import Progress
from common.tasks import registry

if TYPE_CHECKING:
    from common.setup import Parts

EVAL_NOISE_SEED = 20_260_608
"""All evaluations sample with the same noise, so that only their policies differ."""


def evaluate(
    parts: Parts, *, num_samples: int = 1, greedy: bool = False, sparse: bool = False
) -> dict[str, Any]:
    """Mean reward on the held-out prompts, decoded densely or, if `sparse`, under the schedule.

    Keys: reward (avg@k: mean over prompts of the mean over k samples), reward_low, reward_high
    (95 % bootstrap over prompts; None if there is one prompt only), pass_at_k (share of prompts
    with a sample of reward 1), num_prompts, num_samples, len_mean, finished.
    """
    prompts = parts.prompts.eval_batch(parts.config.task.num_eval_prompts)
    with Progress("evaluation") as progress:
        rollout = parts.backend.engine.generate(
            prompts,
            num_samples=num_samples,
            schedule=parts.schedule if sparse else None,
            seed=EVAL_NOISE_SEED,
            temperature=0.0 if greedy else None,
            progress=progress,
        )
    rewards = registry.score(parts.task, rollout, parts.pool).reshape(len(prompts), num_samples)
    low, high = bootstrap_interval(rewards.mean(1))
    return {
        "reward": float(rewards.mean()),
        "reward_low": low,
        "reward_high": high,
        "pass_at_k": float((rewards >= 1).any(1).mean()),
        "num_prompts": len(prompts),
        "num_samples": num_samples,
        "len_mean": float((rollout.total_len_B - rollout.prompt_len_B).mean()),
        "finished": float(rollout.finished_B.mean()),
    }


def due(config: Config, steps_done: int) -> bool:
    """True after every eval_every steps and after the last step; False if eval_every is 0."""
    every = config.eval_every
    return every > 0 and (steps_done % every == 0 or steps_done == config.num_steps)


def record(parts: Parts, prefix: str = "") -> dict[str, float]:
    """Metrics eval/* of a step, or eval/start_* with prefix "start_"; empty if eval_every is 0."""
    if not parts.config.eval_every:
        return {}
    result = evaluate(parts)
    names = ("reward", "reward_low", "reward_high")
    return {f"eval/{prefix}{name}": result[name] for name in names if result[name] is not None}


def bootstrap_interval(
    values: np.ndarray, *, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """95 % bootstrap interval of the mean of independent values; (None, None) for one value."""
    if len(values) < 2:
        return None, None
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.asarray(values, np.float64)[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)
