"""Mistakes in configs, schedules, data, models: each gets one line and loses nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.config import overrides
from common.records import run_dir
from sparrow_jax import backend, hf
from tests.jax.test_end_to_end import RECIPE, sparrow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model directory of the recipe's geometry."""
    folder = tmp_path_factory.mktemp("untrained")
    (folder / "tiny.py").write_text(RECIPE)
    config = overrides.load(str(folder / "tiny.py"))
    geometry, _, params = backend.init_model(config, vocab_size=16)
    hf.save(folder / "model", geometry, params)
    return folder / "model"


@pytest.fixture
def desk(model, tmp_path, monkeypatch):
    """A folder with the recipe and a model to spoil, and a file that must survive."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(RECIPE)
    shutil.copytree(model, "model")
    (tmp_path / "precious.json").write_text("{}")
    return tmp_path


def spoil_tensors(change):
    path = "model/model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_schedule(**changes):
    bins = [{"start": 0, "end": 16, "k": 1}, {"start": 16, "end": 32, "k": 2}]
    entry = {"format": "sparrow-schedule-1", "page_size": 4, "bin_tokens": 16, "bins": bins}
    Path("s.json").write_text(json.dumps(entry | changes))


def write_rows(**changes):
    row = {
        "data_source": "pointer_chase",
        "prompt": [{"role": "user", "content": "<bos> k0 v1 k1 end ? k0"}],
        "reward_model": {"ground_truth": {"chain": [0, 1]}},
    }
    rows = [row] * 11 + [{k: v for k, v in (row | changes).items() if v is not None}]
    Path("d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def message(text):
    return [{"role": "user", "content": text}]


HOLE = [{"start": 0, "end": 16, "k": 1}, {"start": 32, "end": 48, "k": 2}]
SCHEDULE = "--config.rollout.schedule=s.json"
FILE = "--config.task.name=d.jsonl"
MISTAKES = {
    "unknown key": (None, "--config.rollout.page_sise=4", "--config.rollout.page_size?"),
    "type": (None, "--config.rollout.page_size=four", "page_size=four: expected a whole number"),
    "page size": (lambda: write_schedule(page_size=16), SCHEDULE, "made for page_size=16, got"),
    "hole": (lambda: write_schedule(bins=HOLE), SCHEDULE, "s.json: bins[1] covers 32..48"),
    "column": (lambda: write_rows(prompt=None), FILE, "line 12: column 'prompt' is missing"),
    "empty prompt": (lambda: write_rows(prompt=message(" ")), FILE, "line 12: empty prompt"),
    "long prompt": (
        lambda: write_rows(prompt=message("k0 v1 " * 30)), FILE,
        "line 12: 60 tokens, over rollout.max_prompt_tokens=32",
    ),
    "tensor": (
        lambda: spoil_tensors(lambda t: t.pop("model.norm.weight")), "", "model.norm.weight",
    ),
    "shape": (
        lambda: spoil_tensors(lambda t: t.update({"model.norm.weight": np.zeros(7, np.float32)})),
        "", "model.norm.weight",
    ),
    "place": (None, "--run=tiny.py/run", "--run=tiny.py/run: cannot be written"),
    "top_p": (None, "--config.rollout.top_p=0.9", "training needs 1.0"),
    "mesh": (None, "--config.learner.mesh=64,1,1", "needs 64 devices"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_gets_one_line_and_loses_nothing(desk, capsys, mistake):
    prepare, flags, words = MISTAKES[mistake]
    if prepare:
        prepare()
    run = "" if "--run" in flags else "--run=run"
    sparrow(f"train --config=tiny.py --model=model {run} {flags}", status=2)
    out, err = capsys.readouterr()
    assert err.startswith("sparrow: ") and err.count("\n") == 1 and "Traceback" not in err
    assert words in err, err
    assert (desk / "precious.json").read_text() == "{}"
    # the run directory is none yet: the corrected command may use it
    config = overrides.load("tiny.py")
    run_dir.open_run(desk / "run", config, "train").close()
