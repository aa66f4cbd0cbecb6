"""`sparrow eval`: the held-out reward of a model, dense and under its schedule."""

from __future__ import annotations

from typing import Any

from common.config import Config
from common.setup import open_parts
from common.tasks.evaluation import evaluate


def evaluate_run(config: Config, *, num_samples: int, greedy: bool) -> None:
    """Print the held-out reward of dense decoding, then under the schedule if there is one."""
    with open_parts(config) as parts:
        if few := parts.prompts.fewer_held_out(config.task.num_eval_prompts):
            print(few)
        for sparse in (False, True) if parts.schedule is not None else (False,):
            r = evaluate(parts, num_samples=num_samples, greedy=greedy, sparse=sparse)
            how = "greedy" if greedy else f"T = {config.rollout.temperature:g}"
            print(
                f"{'scheduled' if sparse else 'dense':9} {how}: avg@{num_samples} "
                f"{r['reward']:.3f} ({_interval(r)}), pass@{num_samples} {r['pass_at_k']:.3f}, "
                f"{r['num_prompts']} prompt{'s' * (r['num_prompts'] > 1)}, "
                f"length {r['len_mean']:.0f}, finished {r['finished']:.2f}"
            )


def _interval(result: dict[str, Any]) -> str:
    low, high = result["reward_low"], result["reward_high"]
    return "no interval from one prompt" if low is None else f"95 % {low:.3f} to {high:.3f}"
