"""Settings of the policy, of the task, and of the supervised warm-up on its demonstrations."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from common.config.fields import (
    COUNT,
    COUNT_OR_NONE,
    RATE,
    ROWS,
    SEED,
    TOKENS,
    WIDTH,
    Checked,
    check,
    check_within,
    setting,
)
from common.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """The policy: an HF model directory, or a geometry to start from scratch."""

    path: str = setting(
        "", "Hugging Face directory (config.json, *.safetensors); empty = start from scratch"
    )
    vocab_size: int = setting(128, "number of tokens V", within=TOKENS)
    num_layers: int = setting(3, "layers L", within="[1, 1024]")
    hidden_size: int = setting(96, "model width D", within=WIDTH)
    intermediate_size: int = setting(192, "feed-forward width F", within=WIDTH)
    num_heads: int = setting(4, "query heads N", within="[1, 1024]")
    num_kv_heads: int = setting(2, "key/value heads K; N is a multiple of K", within="[1, 1024]")
    head_dim: int = setting(32, "head width H", within="[2, 1024]")
    rope_theta: float = setting(1e6, "RoPE base", within="[2, 1e12]")
    norm_eps: float = setting(1e-6, "RMSNorm epsilon", within="[1e-12, 0.1]")
    qk_norm: bool = setting(True, "RMSNorm on queries and keys (Qwen3: yes, Llama: no)")
    tie_embeddings: bool = setting(True, "use the embedding as the output head")
    qk_gain: float = setting(
        1.0, "initial gain of the QK norms of a from-scratch model", within="[0, 1000]"
    )
    embed_offset: float = setting(
        0.0,
        "length of a random vector that is added to every embedding at the start; its entries are "
        "all of one size, with random signs",
        within="[-1000, 1000]",
    )
    induction_init: bool = setting(
        False, "start layers 0 and 1 with a rough induction circuit (see sparrow_jax/toy)"
    )
    init_seed: int = setting(0, "seed of from-scratch weights", within=SEED)

    def validate(self) -> None:
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}",
        )
        check(
            self.head_dim % 2 == 0,
            f"head_dim={self.head_dim}: expected an even number (rotary embedding)",
        )


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
        "",
        "tokenizer.json of a text task; empty = the one beside the model, or the task's own tokens",
    )
    date: str = setting(
        "",
        "YYYY-MM-DD, the date given to a chat template that asks for today's; such a template is "
        "refused without it",
    )
    drop_long_prompts: bool = setting(
        False,
        "leave out rows of a file over rollout.max_prompt_tokens, instead of refusing the file",
    )
    seed: int = setting(0, "seed of the training prompts", within=SEED)
    eval_seed: int = setting(1_000_003, "seed of the held-out prompts", within=SEED)
    num_eval_prompts: int = setting(128, "held-out prompts of an evaluation", within=ROWS)
    deadline_seconds: float = setting(
        10.0,
        "seconds that scoring one response may take; after them the reward is 0",
        within="[0.001, 86400]",
    )

    def validate(self) -> None:
        object.__setattr__(self, "args", dict(self.args or {}))
        try:
            datetime.datetime.strptime(self.date or "2026-01-31", "%Y-%m-%d")
        except ValueError:
            raise UserError(f"date={self.date!r}: expected a date such as 2026-01-31") from None
        check(
            self.seed != self.eval_seed,
            f"seed=eval_seed={self.seed}: expected different seeds for training and evaluation",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig(Checked):
    """Supervised start of a from-scratch policy on the task's own demonstrations.

    Each of the stages is (max_steps, batch, min_entries, max_entries, stop_accuracy). A stage ends
    early when the running mean of the probability that the policy gives to the right look-ups
    reaches stop_accuracy. A last phase on imperfect demonstrations follows the stages.
    """

    stages: tuple[tuple[float, ...], ...] = setting(
        ((900, 64, 2, 6, 0.99),),
        "curriculum: (max_steps, batch, min_entries, max_entries, stop_accuracy) of each stage",
    )
    learning_rate: float = setting(
        3e-3,
        "learning rate of AdamW; it rises over the first 50 steps and falls to 0 in the last phase",
        within=RATE,
    )
    seed: int = setting(0, "seed of the demonstrations", within=SEED)
    noise: float = setting(
        0.025, "probability that a look-up of a last-phase demonstration is random", within="[0, 1)"
    )
    noise_steps: int = setting(110, "steps of the last phase", within=COUNT_OR_NONE)
    noise_batch: int = setting(
        16, "demonstrations in a batch of the last phase", within="[1, 65536]"
    )

    def validate(self) -> None:
        for stage in self.stages:
            check(
                len(stage) == 5,
                f"stages: {stage}: expected (max_steps, batch, min_entries, max_entries, accuracy)",
            )
            check_within("stages: max_steps", stage[0], COUNT)
            check_within("stages: batch, min_entries, max_entries", stage[1:4], "[1, 65536]")
            check_within("stages: accuracy", stage[4], "[0, 1e9]")
