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
