"""Prompts of a trace: token sequences from a text, a list of ids, or task rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from common.config import Config, TaskConfig
from common.errors import UserError
from common.tasks import chat
from common.tasks.prompt_files import load_file_task
from common.tasks.prompt_rows import SUFFIXES
from common.types import Prompt


def read_prompts(
    config: Config, path: Path, count: int, tokens: int, *, least: int
) -> list[Prompt]:
    """The first `count` prompts of `path`, each cut to `tokens` tokens; prompt_id = 0, 1, ...

    .jsonl and .parquet: rows of a task, by the model's chat template. .json: a list of lists of
    token ids. Anything else: UTF-8 text by the model's tokenizer, consecutive pieces. Prompts under
    `least` tokens are skipped, since their decode would read every page. Raises UserError if fewer
    than `count` remain.
    """
    if not config.model.path:
        raise UserError("trace needs --model=DIR, a Hugging Face model directory")
    if path.suffix in SUFFIXES:
        task = load_file_task(TaskConfig(name=str(path), date=config.task.date), config.model.path)
        rows = [p.tokens for p in task.prompts]
    elif path.suffix == ".json":
        rows = _ids(path)
    else:
        rows = _pieces(config, path, tokens)
    rows = [np.asarray(row[:tokens], np.int32) for row in rows if len(row[:tokens]) >= least]
    if len(rows) < count:
        raise UserError(
            f"--prompts={path}: {len(rows)} prompts of {least} to {tokens} tokens, expected "
            f"{count}; lower --num_prompts or --prompt_tokens, or give more text"
        )
    return [
        Prompt(prompt_id=i, tokens=row, task="trace", answer={})
        for i, row in enumerate(rows[:count])
    ]


def _ids(path: Path) -> list[list[int]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--prompts={path}: is no JSON ({error})") from None
    known = isinstance(rows, list) and all(
        isinstance(row, list) and all(type(i) is int and 0 <= i < 2**31 for i in row)
        for row in rows
    )
    if not known:
        raise UserError(f"--prompts={path}: expected one JSON list of lists of token ids")
    return rows


def _pieces(config: Config, path: Path, tokens: int) -> list[list[int]]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts={path}: is no UTF-8 text ({error.reason})") from None
    codec = chat.load_codec(config.task.tokenizer, config.model.path)
    ids = codec.tokenizer.encode(content, add_special_tokens=False).ids
    return [ids[i : i + tokens] for i in range(0, len(ids), tokens)]
