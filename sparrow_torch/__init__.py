"""The torch backend: a rollout engine for the Flax learner, on GPU by Triton kernels."""

from sparrow_torch.backend import build_engine

__all__ = ["build_engine"]
