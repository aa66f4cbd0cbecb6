"""Settings of sparse rollouts, and of how their mismatch with the dense policy is measured."""

from __future__ import annotations

import dataclasses

from common.config.fields import (
    COUNT,
    COUNT_OR_NONE,
    RATE,
    ROWS,
    SEED,
    TOKENS,
    TOKENS_OR_NONE,
    Checked,
    check,
    setting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked):
    """Rollouts: how the sparse actor samples."""

    engine: str = setting("jax", "rollout backend", choices=("jax", "torch", "vllm"))
    schedule: str = setting(
        "dense",
        "dense, a published schedule (qwen3-1.7b-0.86), a schedule file, or k=8 for a fixed budget",
    )
    page_size: int = setting(16, "tokens per page C", within="[1, 65536]")
    num_dense_layers: int = setting(
        2, "number of first layers that always read every page", within="[0, 1024]"
    )
    prompts_per_step: int = setting(8, "prompts in a training step", within=ROWS)
    samples_per_prompt: int = setting(8, "group size G", within="[1, 65536]")
    max_prompt_tokens: int = setting(512, "longest prompt that is accepted, tokens", within=TOKENS)
    max_response_tokens: int = setting(
        512, "a response is cut at this number of tokens", within=TOKENS
    )
    ignore_eos: bool = setting(
        False, "ignore stop tokens and sample up to the limit, for profiles of long contexts"
    )
    temperature: float = setting(
        1.0,
        "sampling temperature, also of the scorer (for greedy decoding: sparrow eval --greedy)",
        within="[0.01, 100]",
    )
    top_p: float = setting(1.0, "nucleus filter (top-p); training needs 1.0", within="(0, 1]")
    num_slots: int = setting(64, "sequences decoded at the same time", within="[1, 65536]")
    decode_chunk: int = setting(
        16,
        "tokens that the device decodes before the host looks for finished sequences",
        within="[1, 4096]",
    )
    prefill_chunk: int = setting(
        128, "prompt tokens of a row that one prefill call takes", within="[1, 65536]"
    )
    cache_pages: int = setting(
        0, "pages in the KV pool; 0 = enough for all slots at full length", within=TOKENS_OR_NONE
    )
    seed: int = setting(0, "seed of the sampling noise", within=SEED)

    def validate(self) -> None:
        rows = self.prompts_per_step * self.samples_per_prompt
        check(
            rows <= 2**20,
            f"prompts_per_step x samples_per_prompt = {rows}: expected at most {2**20}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchConfig(Checked):
    """How the acceptance rate is watched during training and profiled before it."""

    every: int = setting(
        1, "measure alpha by an exact replay every n steps; 0 = never", within=COUNT_OR_NONE
    )
    num_rows: int = setting(8, "rollout rows that are replayed", within=ROWS)
    bin_tokens: int = setting(
        2000, "width of a length bin, in tokens of prompt and response", within=TOKENS
    )
    tau: float = setting(
        0.86, "threshold that the tail of alpha has to stay above", within="(0, 1]"
    )
    quantile: float = setting(
        0.05, "quantile that is the tail: 0.05 = p5, 0.01 = p1", choices=(0.05, 0.01)
    )
    min_tokens: int = setting(
        100, "a bin with fewer tokens is reported, but not compared with tau", within=COUNT_OR_NONE
    )
    budgets: tuple[int, ...] = setting(
        (4, 8, 12, 16, 24, 32),
        "budgets k that `sparrow profile` measures, rising",
        within=TOKENS_OR_NONE,
    )
    profile_prompts: int = setting(
        16, "prompts of a profile (not the evaluation prompts)", within=ROWS
    )
    profile_samples: int = setting(4, "samples per prompt of a profile", within="[1, 65536]")
    controller: bool = setting(
        False,
        "adapt each bin's budget to its tail during training: to the next larger of budgets, "
        "at last to dense, when the tail is significantly below tau, and to the next smaller when "
        "it stays well above; the schedule reached so far is kept in RUN/schedule-adapted.json",
    )
    controller_margin: float = setting(
        0.02,
        "a budget is lowered only where the tail is significantly above tau + margin",
        within=RATE,
    )
    controller_patience: int = setting(
        5,
        "replayed steps in a row above tau + margin before a budget is lowered; a budget that "
        "failed is tried again only after 4, 8, 16, ... 64 times this number of steps",
        within=COUNT,
    )
    controller_window: int = setting(
        8,
        "replayed steps in a bin's running estimate (decay 1 - 1/window), more if they have fewer "
        "than min_tokens tokens; 1 = only the last step",
        within=COUNT,
    )

    def validate(self) -> None:
        check(
            not self.controller or self.tau + self.controller_margin < 1,
            f"controller_margin={self.controller_margin}: expected less than 1 - tau = "
            f"{1 - self.tau:g} with controller=true; otherwise no budget could ever be lowered",
        )
        check(
            list(self.budgets) == sorted(set(self.budgets)),
            f"budgets={self.budgets}: expected rising numbers of pages",
        )
