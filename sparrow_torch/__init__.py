"""The torch backend: a rollout engine for the Flax learner, with Triton kernels on a GPU."""

from sparrow_torch.backend import build_engine

__all__ = ["build_engine"]
