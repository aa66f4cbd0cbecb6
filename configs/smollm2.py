"""Profile of SmolLM2-135M on its own samples: it goes on with a text, under each budget.

`make smollm2-sampled` runs it.
"""

from common.config import Config, LearnerConfig, MismatchConfig, RolloutConfig, TaskConfig


def get_config() -> Config:
    """Four prompts of about 1,000 tokens, 384 tokens sampled after each."""
    return Config(
        name="smollm2",
        task=TaskConfig(name="runs/smollm2/prompts.jsonl", num_eval_prompts=4),
        rollout=RolloutConfig(
            prompts_per_step=4,
            samples_per_prompt=2,
            max_prompt_tokens=1664,
            max_response_tokens=384,
            num_slots=4,
            decode_chunk=32,
        ),
        learner=LearnerConfig(tokens_per_microbatch=2048, length_buckets=(2048,)),
        mismatch=MismatchConfig(
            bin_tokens=512, budgets=(4, 12, 29, 61), profile_prompts=4, profile_samples=1
        ),
    )
