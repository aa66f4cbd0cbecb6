"""Backend-free core: loop, schedule, mismatch statistics, GRPO, tasks, records. No jax or torch."""
