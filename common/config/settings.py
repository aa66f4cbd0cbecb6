"""Every setting of a run: frozen keyword-only dataclasses, validated when they are made.

A recipe in configs/ is a Python file with `get_config() -> Config`; the command line changes single
fields (`--config.rollout.temperature=0.8`, see common/config/overrides.py). The resolved
configuration is saved with the run as config.json.
"""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import field
from typing import Any

from common.config.fields import (
    COUNT,
    COUNT_OR_NONE,
    RATE,
    ROWS,
    SEED,
    TOKENS,
    TOKENS_OR_NONE,
    WIDTH,
    Checked,
    check,
    check_within,
    setting,
)

CORRECTIONS = (
    "none", "token_tis", "sequence_tis", "icepop", "geometric_rejection", "m2po", "jackpot",
)  # fmt: skip
BASELINES = ("group_mean", "leave_one_out", "greedy")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """The policy: an HF model directory, or a geometry to start from scratch."""

    path: str = setting("", "HF directory (config.json + *.safetensors); empty = from scratch")
    vocab_size: int = setting(128, "number of tokens V", within=TOKENS)
    num_layers: int = setting(3, "layers L", within="[1, 1024]")
    hidden_size: int = setting(96, "model width D", within=WIDTH)
    intermediate_size: int = setting(192, "feed-forward width F", within=WIDTH)
    num_heads: int = setting(4, "query heads N", within="[1, 1024]")
    num_kv_heads: int = setting(
        2, "key/value heads K; N must be a multiple of K", within="[1, 1024]"
    )
    head_dim: int = setting(32, "head width H", within="[2, 1024]")
    rope_theta: float = setting(1e6, "RoPE base", within="[2, 1e12]")
    norm_eps: float = setting(1e-6, "RMSNorm epsilon", within="[1e-12, 0.1]")
    qk_norm: bool = setting(True, "RMSNorm on queries and keys (Qwen3: yes, Llama: no)")
    tie_embeddings: bool = setting(True, "output head = embedding")
    qk_gain: float = setting(
        1.0, "initial gain of the QK norms of a from-scratch model", within="[0, 1000]"
    )
    embed_offset: float = setting(
        0.0, "common random +-offset added to all embeddings at init", within="[-1000, 1000]"
    )
    induction_init: bool = setting(
        False, "draw a rough induction circuit into layers 0 and 1 (sparrow_jax/induction_init.py)"
    )
    init_seed: int = setting(0, "seed of from-scratch weights", within=SEED)

    def validate(self) -> None:
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: RoPE needs an even number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Checked):
    """Where prompts come from and how answers are scored."""

    name: str = setting(
        "pointer_chase",
        "pointer_chase, reasoning_gym:<generator>, or a .jsonl/.parquet file in verl's columns",
    )
    args: dict[str, Any] = setting(
        None, "options of the task's generator, e.g. {'min_entries': 24}"
    )
    tokenizer: str = setting(
        "", "tokenizer.json for text tasks; empty = the task's own tokens or the model directory's"
    )
    date: str = setting(
        "", "YYYY-MM-DD, for a chat template that asks for today's date; refused if empty"
    )
    drop_long_prompts: bool = setting(
        False, "leave out rows of a file over rollout.max_prompt_tokens; otherwise they are refused"
    )
    seed: int = setting(0, "seed of the training prompts", within=SEED)
    eval_seed: int = setting(1_000_003, "seed of the held-out prompts", within=SEED)
    num_eval_prompts: int = setting(128, "held-out prompts of an evaluation", within=ROWS)
    deadline_seconds: float = setting(
        10.0,
        "hard limit for scoring one response; past it the reward is 0",
        within="[0.001, 86400]",
    )

    def validate(self) -> None:
        object.__setattr__(self, "args", dict(self.args or {}))
        try:
            datetime.datetime.strptime(self.date or "2026-01-31", "%Y-%m-%d")
        except ValueError:
            raise ValueError(f"date={self.date!r}: expected a date such as 2026-01-31") from None
        check(
            self.seed != self.eval_seed,
            "seed and eval_seed are equal: held-out prompts would be training prompts",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked):
    """Sampling: the sparse actor."""

    engine: str = setting("jax", "rollout backend", choices=("jax", "torch", "vllm"))
    schedule: str = setting(
        "dense", "'dense', a preset (qwen3-1.7b-0.86), a schedule JSON, or 'k=8' for a fixed budget"
    )
    page_size: int = setting(16, "tokens per page C", within="[1, 65536]")
    num_dense_layers: int = setting(
        2, "first layers that always read every page", within="[0, 1024]"
    )
    prompts_per_step: int = setting(8, "prompts of one training step", within=ROWS)
    samples_per_prompt: int = setting(8, "group size G", within="[1, 65536]")
    max_prompt_tokens: int = setting(512, "longer prompts are refused", within=TOKENS)
    max_response_tokens: int = setting(
        512, "response limit; the response is cut there", within=TOKENS
    )
    ignore_eos: bool = setting(False, "sample on to the limit, for profiles of long contexts")
    temperature: float = setting(
        1.0,
        "sampling temperature; the scorer uses the same (greedy: sparrow eval --greedy)",
        within="[0.01, 100]",
    )
    top_p: float = setting(1.0, "nucleus filter; only 1.0 can be trained on", within="(0, 1]")
    num_slots: int = setting(64, "sequences decoded at the same time", within="[1, 65536]")
    decode_chunk: int = setting(
        16, "tokens decoded on the device between two looks of the host", within="[1, 4096]"
    )
    prefill_chunk: int = setting(
        128, "prompt tokens prefilled in one call and row", within="[1, 65536]"
    )
    cache_pages: int = setting(
        0, "pages of the KV pool; 0 = enough for all slots at full length", within=TOKENS_OR_NONE
    )
    seed: int = setting(0, "seed of the sampling noise", within=SEED)

    def validate(self) -> None:
        rows = self.prompts_per_step * self.samples_per_prompt
        check(rows <= 2**20, f"{rows} samples a step: expected at most {2**20}")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchConfig(Checked):
    """How the acceptance rate is watched during training and profiled before it."""

    every: int = setting(1, "exact replay every n-th step; 0 = never", within=COUNT_OR_NONE)
    num_rows: int = setting(8, "rows replayed exactly", within=ROWS)
    bin_tokens: int = setting(
        2000, "width of a length bin, in tokens of the sequence", within=TOKENS
    )
    tau: float = setting(0.86, "threshold of the statistic", within="(0, 1]")
    quantile: float = setting(0.05, "tail that must stay above tau: p5 or p1", choices=(0.05, 0.01))
    min_tokens: int = setting(
        100, "a bin with fewer tokens is reported but not judged", within=COUNT_OR_NONE
    )
    budgets: tuple[int, ...] = setting(
        (4, 8, 12, 16, 24, 32), "values of k that `sparrow profile` measures", within=TOKENS_OR_NONE
    )
    profile_prompts: int = setting(
        16, "prompts of a profile (not the evaluation prompts)", within=ROWS
    )
    profile_samples: int = setting(4, "samples per prompt of a profile", within="[1, 65536]")
    controller: bool = setting(
        False,
        "let each bin's budget follow its measured tail during training: a rung up (budgets, then "
        "dense) when it is under tau beyond doubt, a rung down when it is well above for a while; "
        "the schedule that it arrives at is kept in RUN/schedule-adapted.json",
    )
    controller_margin: float = setting(
        0.02,
        "a budget comes down only where the tail is above tau + margin, beyond doubt",
        within=RATE,
    )
    controller_patience: int = setting(
        5,
        "replayed steps in a row above tau + margin before a budget comes down; a budget that "
        "failed waits 4, 8, 16 ... 64 times as long before it is tried again",
        within=COUNT,
    )
    controller_window: int = setting(
        8,
        "replayed steps that a bin's estimate remembers (decay 1 - 1/window), more for a bin with "
        "fewer than min_tokens in them; 1 = the last alone",
        within=COUNT,
    )

    def validate(self) -> None:
        check(
            not self.controller or self.tau + self.controller_margin < 1,
            f"controller_margin={self.controller_margin}: expected, with the controller, under "
            f"1 - tau = {1 - self.tau:g}: no budget could ever come down",
        )
        check(
            list(self.budgets) == sorted(set(self.budgets)),
            f"budgets={self.budgets}: expected rising numbers of pages",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig(Checked):
    """Supervised start of a from-scratch policy on the task's own demonstrations.

    stages: (max_steps, batch, min_entries, max_entries, stop_accuracy) each; a stage ends early
    when the running decision accuracy reaches stop_accuracy.
    """

    stages: tuple[tuple[float, ...], ...] = setting(
        ((900, 64, 2, 6, 0.99),), "curriculum, see the class docstring"
    )
    learning_rate: float = setting(
        3e-3, "AdamW, linear ramp over 50 steps; falls to 0 in the last phase", within=RATE
    )
    seed: int = setting(0, "seed of demonstrations", within=SEED)
    noise: float = setting(
        0.025, "wrong look-ups in the demonstrations of the last phase", within="[0, 1)"
    )
    noise_steps: int = setting(110, "steps of the last phase", within=COUNT_OR_NONE)
    noise_batch: int = setting(16, "batch of the last phase", within="[1, 65536]")

    def validate(self) -> None:
        for stage in self.stages:
            check(
                len(stage) == 5,
                f"stages: {stage}: expected (max_steps, batch, min_entries, max_entries, accuracy)",
            )
            check_within("stages: max_steps", stage[0], COUNT)
            check_within("stages: batch, min_entries, max_entries", stage[1:4], "[1, 65536]")
            check_within("stages: accuracy", stage[4], "[0, 1e9]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """A whole run."""

    name: str = setting("run", "shown in reports")
    num_steps: int = setting(20, "training steps", within=COUNT)
    eval_every: int = setting(
        5, "dense evaluation on held-out prompts every n steps; 0 = never", within=COUNT_OR_NONE
    )
    checkpoint_every: int = setting(1, "steps between checkpoints", within=COUNT)
    keep_checkpoints: int = setting(
        2,
        "older complete checkpoints are deleted; two, since the newest may turn out damaged",
        within="[2, 1000000]",
    )
    attention: str = setting(
        "auto",
        "Pallas or Triton kernels, or plain XLA or torch; auto: kernels where they can run; "
        "kernel: the rollout engine must have them, a learner of another framework may do without",
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
        check(longest >= context, f"length_buckets end at {longest}, sequences at {context} tokens")
        rows = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        check(
            rows % self.grpo.num_minibatches == 0,
            f"{rows} samples a step do not split into num_minibatches={self.grpo.num_minibatches}",
        )
        check(
            self.rollout.page_size * 3 <= context,
            "context shorter than three pages: nothing to select",
        )
        grpo = self.grpo
        check(
            self.rollout.samples_per_prompt > 1
            or (grpo.baseline == "greedy" and not grpo.divides_by_std),
            f"samples_per_prompt=1 with grpo.baseline={grpo.baseline}"
            f"{' and grpo.normalize_std' if grpo.baseline == 'greedy' else ''}: every advantage "
            "would be 0; take 2 or more samples, or baseline=greedy with normalize_std=false",
        )
