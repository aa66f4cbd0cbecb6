"""Shared by the tests of the JAX backend."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Half the time of compilation; the logic is the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
