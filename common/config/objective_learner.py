"""Settings of the objective and of the optimizer."""

from __future__ import annotations

import dataclasses

from common.config.fields import (
    COUNT_OR_NONE,
    RATE,
    ROWS,
    TOKENS,
    Checked,
    check,
    setting,
)

CORRECTIONS = (
    "none", "token_tis", "sequence_tis", "icepop", "geometric_rejection", "m2po", "jackpot",
)  # fmt: skip
BASELINES = ("group_mean", "leave_one_out", "greedy")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(Checked):
    """The objective (arXiv 2606.08446, section on the RL recipe)."""

    clip_low: float = setting(0.2, "lower clip of the ratio", within="(0, 1)")
    clip_high: float = setting(0.28, "upper clip of the ratio (clip-higher)", within="(0, 100]")
    dual_clip: float = setting(
        0.0,
        "c > 1: where A < 0 the objective is at least c A (arXiv 1912.09729); 0 = off",
        within="[0, 100]",
    )
    normalize_std: bool | None = setting(
        None,
        "divide advantages by the group's standard deviation; auto = for group_mean alone, as in "
        "the papers of the baselines; false with loss_aggregation=constant is Dr. GRPO",
    )
    baseline: str = setting(
        "group_mean",
        "baseline of the advantage: group mean, RLOO, or ReMax (greedy sample)",
        choices=BASELINES,
    )
    loss_aggregation: str = setting(
        "token_mean",
        "of a minibatch: mean over its tokens; mean over its samples of each one's token mean; or "
        "sum over tokens / (samples x max_response_tokens), the constant of Dr. GRPO",
        choices=AGGREGATIONS,
    )
    correction: str = setting(
        "token_tis", "importance correction from sparse to dense", choices=CORRECTIONS
    )
    correction_cap: float = setting(
        2.0,
        "C of TIS; upper bound of the others; m2po's threshold is log(cap)^2",
        within="(0, 1000000]",
    )
    correction_low: float = setting(
        0.5,
        "lower bound of icepop and geometric_rejection; lambda of jackpot",
        within="(0, 1000000]",
    )
    kl_coef: float = setting(
        0.0,
        "coefficient of the k3-KL to the start policy; 0 = no KL, no reference pass",
        within="[0, 1000]",
    )
    num_minibatches: int = setting(2, "optimizer steps per rollout", within=ROWS)
    overlong: str = setting(
        "keep",
        "responses cut at the limit: keep their reward, mask them, or give them 0",
        choices=("keep", "mask", "zero"),
    )

    def validate(self) -> None:
        check(
            self.dual_clip == 0 or self.dual_clip > 1,
            f"dual_clip={self.dual_clip}: expected 0 (off) or more than 1",
        )
        check(
            0 < self.correction_low <= self.correction_cap,
            f"correction_low={self.correction_low}, correction_cap={self.correction_cap}: "
            "expected 0 < low <= cap",
        )
        check(
            self.correction != "m2po" or self.correction_cap > 1,
            f"correction_cap={self.correction_cap}: m2po expects more than 1 (1.2214 = 0.04)",
        )

    @property
    def divides_by_std(self) -> bool:
        """normalize_std with auto resolved: GRPO divides; RLOO, ReMax and Dr. GRPO do not."""
        return self.baseline == "group_mean" if self.normalize_std is None else self.normalize_std

    @property
    def loss_numbers(self) -> tuple[float, float, float, float]:
        """What policy_loss_sum of both backends takes: clip_low, clip_high, kl_coef, dual_clip."""
        return self.clip_low, self.clip_high, self.kl_coef, self.dual_clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """Optimizer and memory."""

    learning_rate: float = setting(3e-4, "peak learning rate of AdamW", within=RATE)
    warmup_steps: int = setting(4, "linear warm-up, in optimizer steps", within=COUNT_OR_NONE)
    beta1: float = setting(0.9, "AdamW beta1", within="[0, 0.99999]")
    beta2: float = setting(0.99, "AdamW beta2", within="[0, 0.99999]")
    weight_decay: float = setting(0.0, "AdamW weight decay", within=RATE)
    max_grad_norm: float = setting(1.0, "clip by global norm", within="[1e-9, 1e9]")
    tokens_per_microbatch: int = setting(
        8192, "padded tokens of one forward/backward pass", within=TOKENS
    )
    length_buckets: tuple[int, ...] = setting(
        (),
        "padded lengths, rising; one compilation each; empty = 128 * {1, 1.5, 2, 3, 4, 6, ...}",
        within=TOKENS,
    )
    remat: bool = setting(True, "recompute layers in the backward pass")
    dtype: str = setting(
        "auto",
        "compute type; auto = bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    mesh: tuple[int, int, int] = setting(
        (1, 1, 1),
        "devices along data, fsdp, tensor; a stopped run may go on with another mesh",
        within="[1, 65536]",
    )

    def validate(self) -> None:
        buckets = self.length_buckets
        rising = list(buckets) == sorted(set(buckets))
        check(rising, f"length_buckets={buckets}: expected rising, positive lengths")
