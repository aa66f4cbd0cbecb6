"""Shared by all tests: JAX on CPU, repeatable hypothesis, the command line as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Stay off the accelerator unless its tests are asked for with -m gpu or -m tpu."""
    if config.getoption("markexpr") not in ("gpu", "tpu"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would wait for each other
    if config.getoption("markexpr") != "vllm":  # which has kernels of its own
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: at the end, one worker would wait for it."""
    items.sort(key=lambda item: item.path.name != "test_tpu_compile.py")


@pytest.fixture(scope="module")
def quick_compilation():
    """Half the time of XLA's compilation; the logic is the same."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def sparrow() -> Callable[..., subprocess.CompletedProcess[str]]:
    """sparrow("train", "--run=x", cwd=tmp_path): one run of the command line, text captured."""

    def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "common.cli", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
        )

    return run
