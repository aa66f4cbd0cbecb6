"""What several tests of common/ share."""

import sys
import types

import numpy as np
import pytest

from common import loop, setup
from common.records import metrics, run_dir
from common.tasks import registry
from tests.common import made_up_traces


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(config, fake): one call of loop.train in tmp_path/run; the records."""

    def call(config, fake, reward=None):
        """reward(rollout) -> [B]; by default random in {0, 1}, a function of the tokens."""

        def by_tokens(rollout):
            return (rollout.tokens_BT.sum(1) % 2).astype(np.float32)

        def build(config, *, vocab_size, stop_ids):
            return fake.parts()

        monkeypatch.setattr(setup, "LEARNER", "fake_backend")
        monkeypatch.setitem(sys.modules, "fake_backend", types.SimpleNamespace(build=build))
        monkeypatch.setattr(
            registry, "score", lambda task, rollout, pool: (reward or by_tokens)(rollout)
        )
        fake.path = tmp_path / "run"
        with run_dir.open_run(fake.path, config, "train") as run:
            loop.train(config, run)
        return metrics.read_metrics(fake.path)

    return call


@pytest.fixture
def write(tmp_path):
    """write(name, change, **meta): a made-up trace tmp_path/name.npz (made_up_traces.py)."""
    return lambda name, change=None, **meta: made_up_traces.write(
        tmp_path / f"{name}.npz", change, **meta
    )
