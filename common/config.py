"""Every setting of a run: frozen keyword-only dataclasses, validated when they are made.

A recipe in configs/ is a Python file with `get_config() -> Config`; the command line changes single
fields (`--config.rollout.temperature=0.8`, see common/overrides.py). The resolved configuration is
saved with the run as config.json.
"""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import field
from typing import Any

CORRECTIONS = (
    "none",
    "token_tis",
    "sequence_tis",
    "icepop",
    "geometric_rejection",
    "m2po",
    "jackpot",
)
BASELINES = ("group_mean", "leave_one_out", "greedy")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def setting(default: Any, doc: str, *, choices: tuple[Any, ...] | None = None) -> Any:
    """A field with its help text (shown by `sparrow help config`) and, optionally, its choices."""
    return field(default=default, metadata={"doc": doc, "choices": choices})


def _at_least(config: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value >= low, f"{name}={value}: expected at least {low}")


class _Checked:
    """Mixin: refuses values outside a field's choices; subclasses add `validate`."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            _check(
                choices is None or value in choices,
                f"{f.name}={value!r}: expected one of {choices}",
            )
        self.validate()

    def validate(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(_Checked):
    """The policy: an HF model directory, or a geometry to start from scratch."""

    path: str = setting("", "HF directory (config.json + *.safetensors); empty = from scratch")
    vocab_size: int = setting(128, "number of tokens V")
    num_layers: int = setting(3, "layers L")
    hidden_size: int = setting(96, "model width D")
    intermediate_size: int = setting(192, "feed-forward width F")
    num_heads: int = setting(4, "query heads N")
    num_kv_heads: int = setting(2, "key/value heads K; N must be a multiple of K")
    head_dim: int = setting(32, "head width H")
    rope_theta: float = setting(1e6, "RoPE base")
    norm_eps: float = setting(1e-6, "RMSNorm epsilon")
    qk_norm: bool = setting(True, "RMSNorm on queries and keys (Qwen3: yes, Llama: no)")
    tie_embeddings: bool = setting(True, "output head = embedding")
    qk_gain: float = setting(1.0, "initial gain of the QK norms of a from-scratch model")
    embed_offset: float = setting(0.0, "common random +-offset added to all embeddings at init")
    induction_init: bool = setting(
        False, "draw a rough induction circuit into layers 0 and 1 (sparrow_jax/induction_init.py)"
    )
    init_seed: int = setting(0, "seed of from-scratch weights")

    def validate(self) -> None:
        _at_least(self, 1, "vocab_size", "num_layers", "hidden_size", "intermediate_size")
        _at_least(self, 1, "num_heads", "num_kv_heads", "head_dim")
        _at_least(self, 0, "init_seed")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}",
        )
        _check(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: RoPE needs an even number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(_Checked):
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
    seed: int = setting(0, "seed of the training prompts")
    eval_seed: int = setting(1_000_003, "seed of the held-out prompts")
    num_eval_prompts: int = setting(128, "held-out prompts of an evaluation")
    deadline_seconds: float = setting(
        10.0, "hard limit for scoring one response; past it the reward is 0"
    )

    def validate(self) -> None:
        object.__setattr__(self, "args", dict(self.args or {}))
        _at_least(self, 1, "num_eval_prompts")
        _check(self.deadline_seconds > 0, f"deadline_seconds={self.deadline_seconds}: expected > 0")
        try:
            datetime.datetime.strptime(self.date or "2026-01-31", "%Y-%m-%d")
        except ValueError:
            raise ValueError(f"date={self.date!r}: expected a date such as 2026-01-31") from None
        _check(
            self.seed != self.eval_seed,
            "seed and eval_seed are equal: held-out prompts would be training prompts",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(_Checked):
    """Sampling: the sparse actor."""

    engine: str = setting("jax", "rollout backend", choices=("jax", "torch", "vllm"))
    schedule: str = setting(
        "dense", "'dense', a preset (qwen3-1.7b-0.86), a schedule JSON, or 'k=8' for a fixed budget"
    )
    page_size: int = setting(16, "tokens per page C")
    num_dense_layers: int = setting(2, "first layers that always read every page")
    prompts_per_step: int = setting(8, "prompts of one training step")
    samples_per_prompt: int = setting(8, "group size G")
    max_prompt_tokens: int = setting(512, "longer prompts are refused")
    max_response_tokens: int = setting(512, "response limit; the response is cut there")
    ignore_eos: bool = setting(False, "sample on to the limit, for profiles of long contexts")
    temperature: float = setting(1.0, "sampling temperature; the scorer uses the same")
    top_p: float = setting(1.0, "nucleus filter; only 1.0 can be trained on")
    num_slots: int = setting(64, "sequences decoded at the same time")
    decode_chunk: int = setting(16, "tokens decoded on the device between two looks of the host")
    prefill_chunk: int = setting(128, "prompt tokens prefilled in one call and row")
    cache_pages: int = setting(0, "pages of the KV pool; 0 = enough for all slots at full length")
    seed: int = setting(0, "seed of the sampling noise")

    def validate(self) -> None:
        _at_least(self, 1, "page_size", "prompts_per_step", "samples_per_prompt", "num_slots")
        _at_least(self, 1, "max_prompt_tokens", "max_response_tokens")
        _at_least(self, 1, "decode_chunk", "prefill_chunk")
        _at_least(self, 0, "num_dense_layers", "cache_pages")
        _check(
            self.temperature > 0,
            f"temperature={self.temperature}: expected > 0 (greedy: sparrow eval --greedy)",
        )
        _check(0 < self.top_p <= 1, f"top_p={self.top_p}: expected in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(_Checked):
    """The objective (arXiv 2606.08446, section on the RL recipe)."""

    clip_low: float = setting(0.2, "lower clip of the ratio")
    clip_high: float = setting(0.28, "upper clip of the ratio (clip-higher)")
    normalize_std: bool = setting(
        True, "divide advantages by the group's standard deviation; False = Dr. GRPO"
    )
    baseline: str = setting(
        "group_mean",
        "baseline of the advantage: group mean, RLOO, or ReMax (greedy sample)",
        choices=BASELINES,
    )
    correction: str = setting(
        "token_tis", "importance correction from sparse to dense", choices=CORRECTIONS
    )
    correction_cap: float = setting(
        2.0, "C of TIS; upper bound of the others; m2po's threshold is log(cap)^2"
    )
    correction_low: float = setting(
        0.5, "lower bound of icepop and geometric_rejection; lambda of jackpot"
    )
    kl_coef: float = setting(
        0.0, "coefficient of the k3-KL to the start policy; 0 = no KL, no reference pass"
    )
    num_minibatches: int = setting(2, "optimizer steps per rollout")
    overlong: str = setting(
        "keep",
        "responses cut at the limit: keep their reward, mask them, or give them 0",
        choices=("keep", "mask", "zero"),
    )

    def validate(self) -> None:
        _check(
            0 < self.clip_low < 1 and self.clip_high > 0,
            f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected 0 < low < 1, high > 0",
        )
        _check(
            0 < self.correction_low <= self.correction_cap,
            f"correction_low={self.correction_low}, correction_cap={self.correction_cap}: "
            "expected 0 < low <= cap",
        )
        _check(
            self.correction != "m2po" or self.correction_cap > 1,
            f"correction_cap={self.correction_cap}: m2po expects more than 1 (1.2214 = 0.04)",
        )
        _at_least(self, 1, "num_minibatches")
        _check(self.kl_coef >= 0, f"kl_coef={self.kl_coef}: expected >= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(_Checked):
    """Optimizer and memory."""

    learning_rate: float = setting(3e-4, "peak learning rate of AdamW")
    warmup_steps: int = setting(4, "linear warm-up, in optimizer steps")
    beta1: float = setting(0.9, "AdamW beta1")
    beta2: float = setting(0.99, "AdamW beta2")
    weight_decay: float = setting(0.0, "AdamW weight decay")
    max_grad_norm: float = setting(1.0, "clip by global norm")
    tokens_per_microbatch: int = setting(8192, "padded tokens of one forward/backward pass")
    length_buckets: tuple[int, ...] = setting(
        (), "padded lengths, rising; one compilation each; empty = 128 * {1, 1.5, 2, 3, 4, 6, ...}"
    )
    remat: bool = setting(True, "recompute layers in the backward pass")
    dtype: str = setting(
        "auto",
        "compute type; auto = bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    mesh: tuple[int, int, int] = setting(
        (1, 1, 1), "devices along data, fsdp, tensor; a stopped run may go on with another mesh"
    )

    def validate(self) -> None:
        buckets = self.length_buckets
        _check(
            list(buckets) == sorted(set(buckets)) and min(buckets, default=1) >= 1,
            f"length_buckets={buckets}: expected rising, positive lengths",
        )
        _at_least(self, 1, "tokens_per_microbatch")
        _at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay")
        _check(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            f"beta1={self.beta1}, beta2={self.beta2}: expected in [0, 1)",
        )
        _check(self.max_grad_norm > 0, f"max_grad_norm={self.max_grad_norm}: expected > 0")
        _check(min(self.mesh) >= 1, f"mesh={self.mesh}: expected at least 1 along each axis")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchConfig(_Checked):
    """How the acceptance rate is watched during training and profiled before it."""

    every: int = setting(1, "exact replay every n-th step; 0 = never")
    num_rows: int = setting(8, "rows replayed exactly")
    bin_tokens: int = setting(2000, "width of a length bin, in tokens of the sequence")
    tau: float = setting(0.86, "threshold of the statistic")
    quantile: float = setting(0.05, "tail that must stay above tau: p5 or p1", choices=(0.05, 0.01))
    min_tokens: int = setting(100, "a bin with fewer tokens is reported but not judged")
    budgets: tuple[int, ...] = setting(
        (4, 8, 12, 16, 24, 32), "values of k that `sparrow profile` measures"
    )
    profile_prompts: int = setting(16, "prompts of a profile (not the evaluation prompts)")
    profile_samples: int = setting(4, "samples per prompt of a profile")
    controller: bool = setting(
        False,
        "let each bin's budget follow its measured tail during training: a rung up (budgets, then "
        "dense) when it is under tau beyond doubt, a rung down when it is well above for a while; "
        "the schedule that it arrives at is kept in RUN/schedule-adapted.json",
    )
    controller_margin: float = setting(
        0.02, "a budget comes down only where the tail is above tau + margin, beyond doubt"
    )
    controller_patience: int = setting(
        5,
        "replayed steps in a row above tau + margin before a budget comes down; a budget that "
        "failed waits 4, 8, 16 ... 64 times as long before it is tried again",
    )
    controller_window: int = setting(
        8,
        "replayed steps that a bin's estimate remembers (decay 1 - 1/window), more for a bin with "
        "fewer than min_tokens in them; 1 = the last alone",
    )

    def validate(self) -> None:
        _at_least(self, 0, "every", "min_tokens")
        _at_least(self, 1, "num_rows", "bin_tokens", "profile_prompts", "profile_samples")
        _at_least(self, 1, "controller_patience", "controller_window")
        _check(0 < self.tau <= 1, f"tau={self.tau}: expected in (0, 1]")
        _check(
            self.controller_margin >= 0
            and (not self.controller or self.tau + self.controller_margin < 1),
            f"controller_margin={self.controller_margin}: expected at least 0 and, with the "
            f"controller, under 1 - tau = {1 - self.tau:g}: no budget could ever come down",
        )
        _check(
            list(self.budgets) == sorted(set(self.budgets)) and min(self.budgets, default=0) >= 0,
            f"budgets={self.budgets}: expected rising, non-negative integers",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig(_Checked):
    """Supervised start of a from-scratch policy on the task's own demonstrations.

    stages: (max_steps, batch, min_entries, max_entries, stop_accuracy) each; a stage ends early
    when the running decision accuracy reaches stop_accuracy.
    """

    stages: tuple[tuple[float, ...], ...] = setting(
        ((900, 64, 2, 6, 0.99),), "curriculum, see the class docstring"
    )
    learning_rate: float = setting(
        3e-3, "AdamW, linear ramp over 50 steps; falls to 0 in the last phase"
    )
    seed: int = setting(0, "seed of demonstrations")
    noise: float = setting(0.025, "wrong look-ups in the demonstrations of the last phase")
    noise_steps: int = setting(110, "steps of the last phase")
    noise_batch: int = setting(16, "batch of the last phase")

    def validate(self) -> None:
        for stage in self.stages:
            _check(
                len(stage) == 5 and min(stage[:4]) >= 1,
                f"stages: {stage}: expected (max_steps, batch, min_entries, max_entries, accuracy)",
            )
        _at_least(self, 0, "seed", "noise_steps", "learning_rate")
        _at_least(self, 1, "noise_batch")
        _check(0 <= self.noise < 1, f"noise={self.noise}: expected in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_Checked):
    """A whole run."""

    name: str = setting("run", "shown in reports")
    num_steps: int = setting(20, "training steps")
    eval_every: int = setting(5, "dense evaluation on held-out prompts every n steps; 0 = never")
    checkpoint_every: int = setting(1, "steps between checkpoints")
    keep_checkpoints: int = setting(2, "older complete checkpoints are deleted")
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
        _at_least(self, 1, "num_steps", "checkpoint_every")
        _at_least(self, 0, "eval_every")
        _check(
            self.keep_checkpoints >= 2,
            "keep_checkpoints must be at least 2: the newest may turn out damaged",
        )
        context = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        longest = max(self.learner.length_buckets, default=context)
        _check(
            longest >= context, f"length_buckets end at {longest}, sequences at {context} tokens"
        )
        rows = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        _check(
            rows % self.grpo.num_minibatches == 0,
            f"{rows} samples a step do not split into num_minibatches={self.grpo.num_minibatches}",
        )
        _check(
            self.rollout.page_size * 3 <= context,
            "context shorter than three pages: nothing to select",
        )
