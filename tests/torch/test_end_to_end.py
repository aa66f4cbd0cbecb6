"""`--config.rollout.engine=torch` trains as the JAX engine does, step by step."""

import json
import types

import numpy as np
import pytest

from common import setup
from common.cli import command_line
from common.config import Config, overrides
from common.errors import UserError
from common.records import metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")
RECIPE = "--config=configs/smoke.py --config.num_steps=2 --config.eval_every=0"


def train(engine, path):
    arguments = f"train {RECIPE} --run={path} --config.rollout.engine={engine}"
    assert command_line.main(arguments.split()) == 0
    return metrics.read_metrics(path)


def test_both_engines_give_the_same_record(tmp_path, capsys):
    """Sampled tokens, rewards and mismatch of two steps, before and after a push."""
    got, want = (train(engine, tmp_path / engine) for engine in ("torch", "jax"))
    assert "engine torch" in capsys.readouterr().out
    assert len(got) == len(want) == 2
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            timed = name.startswith(("time/", "throughput/", "memory/"))
            if isinstance(b[name], (int, float)) and not timed:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert want[0]["rollout/tokens"] > 100


def test_both_engines_give_the_same_profile(tmp_path):
    """The engine has the weights before any training."""
    records = []
    for engine in ("torch", "jax"):
        path = tmp_path / f"{engine}.json"
        line = f"profile --config=configs/smoke.py --config.rollout.engine={engine} --out={path}"
        assert command_line.main(line.split()) == 0
        records.append(json.loads(path.read_text()))
    for a, b in zip(*(r["summary"] + r["rows"] for r in records), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if isinstance(b[name], (int, float)):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert records[0]["versions"].keys() == {"numpy", "torch"}


def test_every_push_reaches_an_engine_of_another_framework():
    """With the learner's weights as they are then, under their version."""
    loaded = []
    engine = types.SimpleNamespace(
        generate=lambda prompts, **how: (prompts, how),
        load_weights=lambda *x: loaded.append(x),
    )
    foreign = setup.ForeignEngine(engine, lambda params: {"w": params})
    assert foreign.generate(["p"], seed=3) == (["p"], {"seed": 3})
    foreign.load_weights(1.5, 0)
    foreign.load_weights(2.5, 1)
    assert loaded == [({"w": 1.5}, 0), ({"w": 2.5}, 1)]


def test_an_engine_that_is_not_installed_is_refused(monkeypatch):
    find = setup.importlib.util.find_spec
    monkeypatch.setattr(
        setup.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    config = overrides.apply(Config(), {"rollout.engine": "torch"})
    with pytest.raises(UserError, match="torch is not installed; run: pip install"):
        setup.engine_package(config)
