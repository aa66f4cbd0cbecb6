"""The settings of a whole run: frozen keyword-only dataclasses, validated when they are made.

A recipe in configs/ is a Python file with `get_config() -> Config`; the command line changes single
fields (`--config.rollout.temperature=0.8`, see common/config/overrides.py). The resolved
configuration is saved with the run as config.json.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field

from common.config.fields import COUNT, COUNT_OR_NONE, Checked, check, setting
from common.config.model_task import ModelConfig, TaskConfig, WarmupConfig
from common.config.objective_learner import GrpoConfig, LearnerConfig
from common.config.rollout_mismatch import MismatchConfig, RolloutConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """The whole run."""

    name: str = setting("run", "shown in reports")
    num_steps: int = setting(20, "training steps", within=COUNT)
    eval_every: int = setting(
        5,
        "evaluate on held-out prompts, with dense decoding, every n steps, before the first and "
        "after the last; 0 = never",
        within=COUNT_OR_NONE,
    )
    checkpoint_every: int = setting(1, "steps between checkpoints", within=COUNT)
    keep_checkpoints: int = setting(
        2,
        "complete checkpoints that are kept; at least two, in case the newest is damaged",
        within="[2, 1000000]",
    )
    attention: str = setting(
        "auto",
        "kernel = Pallas or Triton, reference = plain JAX or torch, auto = kernels where they can "
        "run; kernel is refused if the rollout engine cannot run them, while a learner of another "
        "framework falls back to the reference",
        choices=("auto", "kernel", "reference"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

    def validate(self) -> None:
        context = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        longest = max(self.learner.length_buckets, default=context)
        check(
            longest >= context,
            f"learner.length_buckets end at {longest}: expected at least the longest sequence, "
            f"rollout.max_prompt_tokens + max_response_tokens = {context}",
        )
        rows = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        check(
            rows % self.grpo.num_minibatches == 0,
            f"grpo.num_minibatches={self.grpo.num_minibatches}: expected a number that divides the "
            f"{rows} samples of a step",
        )
        check(
            self.rollout.page_size * 3 <= context,
            f"rollout.page_size={self.rollout.page_size}: expected at most a third of the longest "
            f"sequence, {context} tokens; otherwise there are no pages to select",
        )
        grpo = self.grpo
        check(
            self.rollout.samples_per_prompt > 1
            or (grpo.baseline == "greedy" and not grpo.divides_by_std),
            f"rollout.samples_per_prompt=1 with grpo.baseline={grpo.baseline}"
            f"{' and grpo.normalize_std' if grpo.baseline == 'greedy' else ''}: every advantage "
            "would be 0; set 2 or more samples, or baseline=greedy with normalize_std=false",
        )
