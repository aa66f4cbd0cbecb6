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
