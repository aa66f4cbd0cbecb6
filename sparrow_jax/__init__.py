"""The JAX backend: engine, scorer and learner on TPU, CPU or CUDA; `build` makes them."""

from sparrow_jax.backend import build

__all__ = ["build"]
