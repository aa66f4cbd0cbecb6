"""What is optimised: advantages, GRPO's loss, importance corrections, micro-batches."""
