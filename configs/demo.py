"""Pointer chasing with a tiny policy: the whole method on two CPU cores (make demo)."""

from common.config import (
    Config,
    GrpoConfig,
    LearnerConfig,
    MismatchConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    WarmupConfig,
)


def get_config() -> Config:
    """2 layers (the first dense), 0.2 M parameters, 24 to 40 facts."""
    return Config(
        name="demo",
        num_steps=20,
        eval_every=5,
        model=ModelConfig(
            num_layers=2,
            hidden_size=96,
            intermediate_size=192,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=1e6,
            qk_gain=1.5,
            embed_offset=1.0,
            induction_init=True,
        ),
        task=TaskConfig(
            name="pointer_chase",
            args={
                "num_symbols": 64,
                "min_entries": 24,
                "max_entries": 40,
                "fact_repeats": 4,
                "hop_repeats": 4,
                "partial_credit": True,
            },
            num_eval_prompts=128,
        ),
        rollout=RolloutConfig(
            num_dense_layers=1,
            prompts_per_step=8,
            samples_per_prompt=8,
            max_prompt_tokens=352,
            max_response_tokens=320,
            num_slots=64,
        ),
        grpo=GrpoConfig(num_minibatches=2),
        learner=LearnerConfig(learning_rate=3e-4, tokens_per_microbatch=8192),
        mismatch=MismatchConfig(
            bin_tokens=64, tau=0.9, quantile=0.01, budgets=(1, 2, 4, 6, 8, 12, 16), min_tokens=100
        ),
        warmup=WarmupConfig(
            stages=((300, 12, 4, 16, 0.95), (100, 6, 24, 40, 0.95)),
            noise=0.02,
            noise_steps=100,
            noise_batch=6,
        ),
    )
