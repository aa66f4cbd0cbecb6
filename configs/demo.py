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
    """3 layers (the first dense), 0.3 M parameters, 32 to 38 facts, 97 to 153 response tokens.

    In the demonstrations of the warm-up's last phase 6 % of the look-ups are wrong, so that about
    half of the reward is left to win; sixteen steps of dense rollouts win most of it.
    """
    return Config(
        name="demo",
        num_steps=16,
        eval_every=8,
        model=ModelConfig(
            num_layers=3,
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
                "min_entries": 32,
                "max_entries": 38,
                "chain_low": 0.4,
                "chain_high": 0.5,
                "fact_repeats": 4,
                "hop_repeats": 4,
                "partial_credit": True,
            },
            num_eval_prompts=256,
        ),
        rollout=RolloutConfig(
            num_dense_layers=1,
            prompts_per_step=8,
            samples_per_prompt=8,
            max_prompt_tokens=328,
            max_response_tokens=160,
            num_slots=64,
        ),
        grpo=GrpoConfig(num_minibatches=2),
        learner=LearnerConfig(
            learning_rate=3e-4, tokens_per_microbatch=16 * 488, length_buckets=(488,), remat=False
        ),
        mismatch=MismatchConfig(
            bin_tokens=64,
            tau=0.95,
            quantile=0.01,
            budgets=(2, 4, 8, 12, 16, 20),
            num_rows=16,
            profile_prompts=16,
            profile_samples=4,
        ),
        warmup=WarmupConfig(
            stages=((300, 12, 4, 16, 0.93), (250, 6, 32, 38, 0.985)),
            noise=0.06,
            noise_steps=60,
            noise_batch=8,
        ),
    )
