"""The held-out reward: how many prompts it takes, and the interval that they can have."""

import types

import numpy as np
import pytest

from common.cli import evaluate
from common.config import Config
from common.tasks import evaluation
from common.tasks.prompts import PromptSource
from common.types import Prompt


def test_one_prompt_has_no_interval():
    assert evaluation.bootstrap_interval(np.array([1.0])) == (None, None)
    low, high = evaluation.bootstrap_interval(np.array([0.0, 1.0, 1.0, 0.0]))
    assert low == 0 and high == 1  # all zeros in 1 of 16 draws


def source(num_rows):
    """Prompts of a file of so many rows."""
    prompt = lambda seed, i: Prompt(prompt_id=i, tokens=np.zeros(3, np.int32), task="", answer={})  # noqa: E731
    config = Config()
    task = types.SimpleNamespace(
        name="rows", num_items=num_rows, max_prompt_tokens=None, prompt=prompt
    )
    rollout = types.SimpleNamespace(max_prompt_tokens=9, prompts_per_step=2)
    return PromptSource(task, config.task, rollout)


@pytest.mark.parametrize(("num_rows", "asked", "taken"), [(16, 4, 1), (45, 5, 4), (45, 4, 4)])
def test_fewer_held_out_prompts_than_asked_are_told(num_rows, asked, taken):
    prompts = source(num_rows)
    assert len(prompts.eval_batch(asked)) == taken
    said = prompts.fewer_held_out(asked)
    if taken == asked:
        assert said is None
    else:
        assert said.startswith(f"{taken} held-out prompt")
        assert f"num_eval_prompts={asked}: rows has {num_rows} rows" in said and "\n" not in said


@pytest.mark.parametrize(("taken", "words"), [(1, "no interval from one prompt"), (2, "95 % 0.")])
def test_eval_says_what_it_took(taken, words, monkeypatch, capsys):
    prompts = [
        Prompt(prompt_id=i, tokens=np.zeros(3, np.int32), task="", answer={}) for i in range(taken)
    ]
    rollout = types.SimpleNamespace(
        total_len_B=np.full(taken, 5), prompt_len_B=np.full(taken, 3), finished_B=np.ones(taken)
    )
    parts = types.SimpleNamespace(
        config=Config(), schedule=None, task=None, pool=None,
        prompts=types.SimpleNamespace(
            eval_batch=lambda n: prompts, fewer_held_out=lambda n: f"{taken} held-out"
        ),
        backend=types.SimpleNamespace(
            engine=types.SimpleNamespace(generate=lambda *args, **how: rollout)
        ),
    )  # fmt: skip

    class Open:
        def __enter__(self):
            return parts

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(evaluate, "open_parts", lambda config: Open())
    monkeypatch.setattr(evaluation.registry, "score", lambda *args: np.arange(taken) / 2)
    evaluate.evaluate_run(Config(), num_samples=1, greedy=True)
    said = capsys.readouterr().out
    assert f"{taken} held-out\n" in said and words in said
    assert f", {taken} prompt{'s' * (taken > 1)}, " in said
