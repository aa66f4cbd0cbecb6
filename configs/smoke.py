"""A few seconds of everything, to see that an installation works. It learns nothing.

sparrow train --config=configs/smoke.py --run=runs/smoke
"""

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
    """Two layers, four facts, three steps."""
    return Config(
        name="smoke",
        num_steps=3,
        eval_every=2,
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
        ),
        task=TaskConfig(
            name="pointer_chase",
            args={"num_symbols": 16, "min_entries": 8, "max_entries": 12, "partial_credit": True},
            num_eval_prompts=8,
        ),
        rollout=RolloutConfig(
            schedule="k=1",
            num_dense_layers=1,
            prompts_per_step=2,
            samples_per_prompt=4,
            max_prompt_tokens=96,
            max_response_tokens=64,
            num_slots=8,
            prefill_chunk=32,
        ),
        grpo=GrpoConfig(num_minibatches=2),
        learner=LearnerConfig(tokens_per_microbatch=512),
        mismatch=MismatchConfig(
            bin_tokens=32,
            num_rows=4,
            min_tokens=20,
            budgets=(1, 2),
            profile_prompts=2,
            profile_samples=2,
        ),
        warmup=WarmupConfig(stages=((20, 8, 2, 4, 0.99),), noise_steps=5, noise_batch=4),
    )
