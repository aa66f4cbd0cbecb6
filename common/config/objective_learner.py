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

    clip_low: float = setting(0.2, "the ratio is clipped below 1 - clip_low", within="(0, 1)")
    clip_high: float = setting(
        0.28, "the ratio is clipped above 1 + clip_high (clip-higher)", within="(0, 100]"
    )
    dual_clip: float = setting(
        0.0,
        "c > 1 of dual clip: where A < 0 the objective is at least c A (arXiv 1912.09729); 0 = off",
        within="[0, 100]",
    )
    normalize_std: bool | None = setting(
        None,
        "divide advantages by the group's standard deviation; auto = only with baseline=group_mean,"
        " as in the papers of the baselines; false with loss_aggregation=constant is Dr. GRPO",
    )
    baseline: str = setting(
        "group_mean",
        "baseline of the advantage: group mean, leave-one-out (RLOO), or greedy sample (ReMax)",
        choices=BASELINES,
    )
    loss_aggregation: str = setting(
        "token_mean",
        "how token losses of a minibatch become one number: their mean; the mean over samples of "
        "each sample's mean; or their sum / (samples x max_response_tokens), as in Dr. GRPO",
        choices=AGGREGATIONS,
    )
    correction: str = setting(
        "token_tis",
        "correction of importance weights from the sparse actor to the dense policy",
        choices=CORRECTIONS,
    )
    correction_cap: float = setting(
        2.0,
        "cap C of TIS; upper bound of the others; the threshold of m2po is log(cap)^2",
        within="(0, 1000000]",
    )
    correction_low: float = setting(
        0.5,
        "lower bound of icepop and geometric_rejection; lambda of jackpot",
        within="(0, 1000000]",
    )
    kl_coef: float = setting(
        0.0,
        "coefficient of the KL to the start policy (k3 estimate); 0 = no KL, no reference pass",
        within="[0, 1000]",
    )
    num_minibatches: int = setting(2, "minibatches, i.e. optimizer steps, per rollout", within=ROWS)
    overlong: str = setting(
        "keep",
        "responses cut at the limit: keep their reward, leave them out of the loss, or set it to 0",
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
            f"correction_cap={self.correction_cap}: expected more than 1 with correction=m2po "
            "(1.2214 gives its paper's threshold, log(cap)^2 = 0.04)",
        )

    @property
    def divides_by_std(self) -> bool:
        """normalize_std, with auto resolved: true for baseline group_mean, else false."""
        return self.baseline == "group_mean" if self.normalize_std is None else self.normalize_std

    @property
    def loss_numbers(self) -> tuple[float, float, float, float]:
        """(clip_low, clip_high, kl_coef, dual_clip), in the order of policy_loss_sum."""
        return self.clip_low, self.clip_high, self.kl_coef, self.dual_clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """Optimizer, precision, memory and devices of the learner."""

    learning_rate: float = setting(3e-4, "peak learning rate of AdamW", within=RATE)
    warmup_steps: int = setting(
        4, "optimizer steps in which the learning rate rises linearly", within=COUNT_OR_NONE
    )
    beta1: float = setting(0.9, "AdamW beta1", within="[0, 0.99999]")
    beta2: float = setting(0.99, "AdamW beta2", within="[0, 0.99999]")
    weight_decay: float = setting(0.0, "AdamW weight decay", within=RATE)
    max_grad_norm: float = setting(
        1.0, "gradients of a larger global norm are scaled down to it", within="[1e-9, 1e9]"
    )
    tokens_per_microbatch: int = setting(
        8192, "tokens, padding included, of one forward and backward pass", within=TOKENS
    )
    length_buckets: tuple[int, ...] = setting(
        (),
        "lengths to which rows are padded, rising; each costs one compilation; empty = 128 * "
        "{1, 1.5, 2, 3, 4, 6, ...}",
        within=TOKENS,
    )
    remat: bool = setting(True, "recompute the layers in the backward pass, to save memory")
    dtype: str = setting(
        "auto",
        "type of activations; auto = bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    mesh: tuple[int, int, int] = setting(
        (1, 1, 1),
        "devices along the axes data, fsdp, tensor; a stopped run may go on with another mesh",
        within="[1, 65536]",
    )

    def validate(self) -> None:
        buckets = self.length_buckets
        rising = list(buckets) == sorted(set(buckets))
        check(rising, f"length_buckets={buckets}: expected rising, positive lengths")
