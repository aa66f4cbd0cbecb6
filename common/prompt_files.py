"""Prompts from .jsonl and .parquet files in verl's columns.

    {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}],
     "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {...}}

The scorer of a row is chosen by data_source:

    pointer_chase               content: the text of a prompt as `PointerChase.text` writes it;
                                ground_truth: {"chain": [12, 5, ...]}; every row has to be one
    gsm8k, .../gsm8k            exact final number; ground_truth: "72" or "... #### 72"
    reasoning_gym:NAME          ground_truth: the generator's entry {"answer", "metadata", ...}

Further columns are ignored. The whole file is read and checked when the task is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from common import reasoning
from common.chat import TextCodec, load_codec, require
from common.config import TaskConfig
from common.grading import GraderPool, Job
from common.pointer_chase import PointerChase
from common.types import Prompt

SUFFIXES = (".jsonl", ".parquet")
_COLUMNS = ("data_source", "prompt", "reward_model")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_TAIL = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask:
    """A finite set of problems; row `index` is the same whatever the seed.

    prompts: one per row, prompt_id = row number from 0. codec: None for pointer_chase files, which
    use the tokens of `chase`. Raises ValueError, one line with the row, for rows it cannot use.
    """

    name: str
    prompts: tuple[Prompt, ...]
    codec: TextCodec | None
    chase: PointerChase | None
    deadline_seconds: float

    @property
    def files(self) -> tuple[Path, ...]:
        """The data file, then the tokenizer's files."""
        return (Path(self.name), *(self.codec.files if self.codec else ()))

    @property
    def vocab_size(self) -> int:
        return (self.codec or self.chase).vocab_size

    @property
    def pad_id(self) -> int:
        return (self.codec or self.chase).pad_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self.codec or self.chase).stop_ids

    @property
    def num_items(self) -> int:
        return len(self.prompts)

    @property
    def max_prompt_tokens(self) -> int:
        return max(len(prompt.tokens) for prompt in self.prompts)

    def prompt(self, seed: int, index: int) -> Prompt:
        """Row `index`; the seed has no influence."""
        return self.prompts[index]

    def job(self, answer: Mapping[str, Any], response: np.ndarray) -> Job | None:
        """Job of a row that needs a worker, None if `score` does it at once."""
        if "generator" in answer and self.codec is not None:
            return reasoning.make_job(answer, self.codec.text(response))
        return None

    def score(self, answer: Mapping[str, Any], response: np.ndarray) -> float:
        """Score of one response in [0, 1], by the row's scorer."""
        if self.codec is None:
            return self.chase.score(answer, response)
        if job := self.job(answer, response):
            with GraderPool(1, self.deadline_seconds) as pool:
                return pool.score([job])[0]
        return score_final_number(answer, self.codec.text(response))

    def text(self, tokens: np.ndarray) -> str:
        return (self.codec or self.chase).text(tokens)


def score_final_number(answer: Mapping[str, Any], text: str) -> float:
    """1 if the final number of `text` equals answer["number"] exactly, else 0.

    Final: after the last "####", else in the last \\boxed{...}, else the last number of the text.
    Only the last 4,000 characters are looked at. 1,000 = 1000 = 1000.0; $ and % are ignored.
    """
    number = final_number(text[-_TAIL:])
    return float(number is not None and number == Decimal(answer["number"]))


def final_number(text: str) -> Decimal | None:
    """See `score_final_number`; None if there is no number at that place."""
    _, marked, rest = text.rpartition("####")
    if marked:
        found = _NUMBER.findall(rest.lstrip().partition("\n")[0])[:1]
    elif "\\boxed{" in text:
        found = _NUMBER.findall(text.rpartition("\\boxed{")[2].partition("}")[0])[:1]
    else:
        found = _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "")) if found else None


def load_file_task(config: TaskConfig, model_path: str) -> FileTask:
    """Read, check and tokenize the file `config.name`; ValueError, one line, names the row."""
    path = Path(config.name)
    if not path.is_file():
        raise ValueError(f"task.name={config.name!r}: no such file")
    read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
    codec = chase = None
    prompts: list[Prompt] = []
    for where, row in read(path):
        source, messages, truth = _check_row(where, row)
        is_chase = source == PointerChase.name
        if prompts and is_chase != (chase is not None):
            raise ValueError(f"{where}: a file holds either pointer_chase rows or text, not both")
        if not prompts and is_chase:
            chase = make_chase(config)
        elif not prompts:
            if config.args:
                raise ValueError(f"task.args={config.args}: a text file takes no options")
            codec = load_codec(config.tokenizer, model_path, config.date)
        try:
            answer = _answer(source, truth, chase)
            tokens = codec.encode(messages) if codec else _chase_tokens(chase, messages)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if len(tokens) == 0:
            raise ValueError(f"{where}: empty prompt (no tokens)")
        prompts.append(Prompt(prompt_id=len(prompts), tokens=tokens, task=source, answer=answer))
    if not prompts:
        raise ValueError(f"{path}: no rows")
    return FileTask(
        name=str(path),
        prompts=tuple(prompts),
        codec=codec,
        chase=chase,
        deadline_seconds=config.deadline_seconds,
    )


def make_chase(config: TaskConfig) -> PointerChase:
    """PointerChase from `config.args`; ValueError for unknown options or a tokenizer."""
    known = [field.name for field in dataclasses.fields(PointerChase)]
    for key in config.args:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise ValueError(f"task.args: unknown option {key!r}; did you mean {near!r}?")
    if config.tokenizer:
        raise ValueError(f"task.tokenizer={config.tokenizer!r}: pointer_chase has its own tokens")
    return PointerChase(**config.args)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # an integer of 5,000 digits: ValueError
                raise ValueError(f"{where}: not a JSON object ({error})") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    require("pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [c for c in _COLUMNS if c in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable parquet file ({message})") from None


def _check_row(where: str, row: Any) -> tuple[str, list[dict[str, str]], Any]:
    """data_source, messages and ground truth of one row."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for column in _COLUMNS:
        if row.get(column) is None:
            raise ValueError(f"{where}: column {column!r} is missing")
    source, messages, model = (row[column] for column in _COLUMNS)
    if not isinstance(source, str):
        raise ValueError(f"{where}: data_source={source!r}, expected a string")
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise ValueError(f"{where}: column 'reward_model.ground_truth' is missing")
    if not isinstance(messages, list):
        kind = type(messages).__name__
        raise ValueError(f"{where}: prompt is a {kind}, expected a list of chat messages")
    for message in messages:
        parts = [message.get(k) for k in ("role", "content")] if isinstance(message, dict) else [0]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{where}: prompt: each message needs 'role' and 'content' as text")
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: empty prompt")
    return source, messages, model["ground_truth"]


def _answer(source: str, truth: Any, chase: PointerChase | None) -> dict[str, Any]:
    """Answer of a row in the form its scorer takes."""
    if chase is not None:
        chain = truth.get("chain") if isinstance(truth, dict) else None
        symbols = range(chase.num_symbols)
        if not isinstance(chain, list) or not chain or not all(x in symbols for x in chain):
            raise ValueError(f"ground_truth={truth!r}: expected {{'chain': [symbol numbers]}}")
        return {"chain": [int(x) for x in chain]}
    if source.rpartition("/")[2] == "gsm8k":
        number = final_number(str(truth))
        if number is None:
            raise ValueError(f"ground_truth={truth!r}: expected a number")
        return {"number": str(number)}
    if source.startswith(reasoning.PREFIX):
        generator = source.removeprefix(reasoning.PREFIX)
        reasoning.check_generator(generator, {})
        if not isinstance(truth, dict) or "answer" not in truth:
            raise ValueError(f"ground_truth={truth!r}: expected the generator's entry")
        return reasoning.make_answer(generator, {}, {"metadata": {}, **truth})
    raise ValueError(
        f"data_source={source!r}: no scorer; known: pointer_chase, openai/gsm8k, "
        "reasoning_gym:<generator>"
    )


def _chase_tokens(chase: PointerChase, messages: list[dict[str, str]]) -> np.ndarray:
    return chase.tokens(" ".join(message["content"] for message in messages))
