"""Tasks from .jsonl and .parquet files in verl's columns (common/tasks/prompt_rows.py).

The scorer of a row is chosen by data_source:

    pointer_chase               content: the text of a prompt as `PointerChase.text` writes it;
                                ground_truth: {"chain": [12, 5, ...]}; a file with such a row
                                may hold no others
    gsm8k, .../gsm8k            the number at the end of a response; ground_truth: "72" or
                                "... #### 72"
    reasoning_gym:NAME          ground_truth: the generator's entry {"answer", "metadata", ...};
                                the prompt has to ask for <answer>...</answer>

The whole file is read and checked when the task is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.config import TaskConfig
from common.errors import UserError
from common.records import stopping
from common.tasks import reasoning
from common.tasks.chat import TextCodec, load_codec, require
from common.tasks.grading import GraderPool, Job
from common.tasks.number_answers import number_job, score_number, truth_number
from common.tasks.pointer_chase import PointerChase
from common.tasks.prompt_rows import Row, read_rows
from common.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask:
    """A finite set of problems; the seed has no influence on row `index`.

    prompts: one per row; prompt_id is the row's number, from 0, among the rows that are kept.
    num_dropped: rows left out because they are longer than `max_prompt_tokens`. codec: None for
    pointer_chase files, which use the tokens of `chase`.
    """

    name: str
    prompts: tuple[Prompt, ...]
    num_dropped: int
    codec: TextCodec | None
    chase: PointerChase | None
    deadline_seconds: float | None

    @property
    def files(self) -> tuple[Path, ...]:
        """The data file, then the files of the tokenizer."""
        return (Path(self.name), *(self.codec.files if self.codec else ()))

    @property
    def _reader(self) -> TextCodec | PointerChase:
        """The codec or the task that turns tokens into text and back."""
        reader = self.codec or self.chase
        assert reader is not None, "one of the two is always there"
        return reader

    @property
    def vocab_size(self) -> int:
        return self._reader.vocab_size

    @property
    def pad_id(self) -> int:
        return self._reader.pad_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._reader.stop_ids

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
        """The job of scoring in a worker; None if `score` can be called here."""
        if self.codec is None:
            return None
        if "generator" in answer:
            return reasoning.make_job(answer, self.codec.text(response))
        return number_job(answer, self.codec.text(response))

    def score(self, answer: Mapping[str, Any], response: np.ndarray) -> float:
        """Score of one response in [0, 1], by the scorer of the row."""
        if self.chase is not None:
            return self.chase.score(answer, response)
        assert self.codec is not None and self.deadline_seconds is not None
        if job := self.job(answer, response):
            with GraderPool(1, self.deadline_seconds) as pool:
                return pool.score([job])[0]
        return score_number(answer, self.codec.text(response))

    def text(self, tokens: np.ndarray) -> str:
        return self._reader.text(tokens)

    def describe(self, eval_seed: int) -> list[str]:
        """Lines for the console: how the rows are used, and warnings about duplicate rows."""
        train, held_out, profile = split_rows(self.num_items, eval_seed)
        dropped = f" ({self.num_dropped} more are too long and left out)" * bool(self.num_dropped)
        lines = [
            f"{self.name}: {self.num_items} rows{dropped}, {len(train)} to train on, "
            f"{len(held_out)} held out for evaluation, {len(profile)} for profiles"
        ]
        trained = {self.prompts[row].tokens.tobytes() for row in train}
        for rows, use in ((held_out, "evaluation"), (profile, "profiles")):
            twice = sum(self.prompts[row].tokens.tobytes() in trained for row in rows)
            if twice:
                lines.append(
                    f"warning: {self.name}: {twice} of the {len(rows)} prompts for {use} are also "
                    "trained on (duplicate rows); leave the duplicates out of the file"
                )
        return lines


def split_rows(num_rows: int, eval_seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers for training, evaluation and profiles (see common/tasks/prompts.py)."""
    if num_rows < 3:
        raise UserError(f"{num_rows} rows: expected at least 3 (training, evaluation, profile)")

    def key(row: int) -> bytes:
        return hashlib.blake2b(f"{eval_seed}:{row}".encode(), digest_size=16).digest()

    order, tenth = np.asarray(sorted(range(num_rows), key=key)), max(1, num_rows // 10)
    return np.sort(order[2 * tenth :]), order[:tenth], order[tenth : 2 * tenth]


def load_file_task(
    config: TaskConfig, model_path: str, max_prompt_tokens: int | None = None
) -> FileTask:
    """Read, check and tokenize the file `config.name`; UserError names the first bad row."""
    path = Path(config.name)
    if not path.is_file():
        raise UserError(f"task.name={config.name!r}: no such file")
    codec = chase = None
    prompts: list[Prompt] = []
    num_dropped = 0
    for row in read_rows(path):
        stopping.check()
        is_chase = row.source == PointerChase.name
        if codec is None and chase is None:
            codec, chase = _reader(config, model_path, is_chase)
        elif is_chase != (chase is not None):
            raise UserError(
                f"{row.where}: expected only pointer_chase rows or only text rows in a file"
            )
        prompt = _prompt(row, len(prompts), codec, chase)
        if max_prompt_tokens is not None and len(prompt.tokens) > max_prompt_tokens:
            if not config.drop_long_prompts:
                raise UserError(
                    f"{row.where}: {len(prompt.tokens)} tokens, over rollout.max_prompt_tokens="
                    f"{max_prompt_tokens}; raise it, or leave such rows out by "
                    "task.drop_long_prompts=True"
                )
            num_dropped += 1
        else:
            prompts.append(prompt)
    if not prompts:
        why = f"; {num_dropped} are over rollout.max_prompt_tokens" if num_dropped else ""
        raise UserError(f"{path}: no rows{why}")
    return FileTask(
        name=str(path),
        prompts=tuple(prompts),
        num_dropped=num_dropped,
        codec=codec,
        chase=chase,
        deadline_seconds=None if chase else config.deadline_seconds,
    )


def _reader(
    config: TaskConfig, model_path: str, is_chase: bool
) -> tuple[TextCodec | None, PointerChase | None]:
    """(codec, None) for a file of text rows, (None, task) for one of pointer_chase rows."""
    if is_chase:
        return None, make_chase(dataclasses.replace(config, drop_long_prompts=False))
    if config.args:
        raise UserError(
            f"task.args={config.args}: has no effect on a file of text rows; leave it out"
        )
    return load_codec(config.tokenizer, model_path, config.date), None


def _prompt(
    row: Row, prompt_id: int, codec: TextCodec | None, chase: PointerChase | None
) -> Prompt:
    try:
        answer = _answer(row, chase)
        if chase is None:
            assert codec is not None, "one of the two is always there"
            tokens = codec.encode(row.messages, loading=True)
        else:
            tokens = chase.tokens(" ".join(message["content"] for message in row.messages))
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
    if len(tokens) == 0:
        raise UserError(f"{row.where}: empty prompt (no tokens)")
    return Prompt(prompt_id=prompt_id, tokens=tokens, task=row.source, answer=answer)


def make_chase(config: TaskConfig) -> PointerChase:
    """PointerChase from `config.args`; UserError for unknown options or a tokenizer."""
    known = [field.name for field in dataclasses.fields(PointerChase)]
    for key in config.args:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise UserError(f"task.args: unknown option {key!r}; did you mean {near!r}?")
    if config.date or config.drop_long_prompts:
        raise UserError(
            "task.date, task.drop_long_prompts: have no effect on pointer_chase; leave them out"
        )
    if config.tokenizer:
        raise UserError(
            f"task.tokenizer={config.tokenizer!r}: has no effect, pointer_chase has its own tokens"
        )
    return PointerChase(**config.args)


def _answer(row: Row, chase: PointerChase | None) -> dict[str, Any]:
    """The answer of a row, in the form that its scorer takes."""
    source, truth = row.source, row.truth
    if chase is not None:
        chain = truth.get("chain") if isinstance(truth, dict) else None
        symbols = range(chase.num_symbols)
        if not isinstance(chain, list) or not chain or not all(x in symbols for x in chain):
            raise UserError(
                f"ground_truth={str(truth)[:100]}: expected {{'chain': [symbol numbers]}}"
            )
        return {"chain": [int(x) for x in chain]}
    if source.rpartition("/")[2] == "gsm8k":
        require("math_verify")
        return {"number": truth_number(truth)}
    if source.startswith(reasoning.PREFIX):
        generator = source.removeprefix(reasoning.PREFIX)
        reasoning.check_generator(generator, {})
        if not isinstance(truth, dict) or "answer" not in truth:
            raise UserError(f"ground_truth={str(truth)[:100]}: expected the generator's entry")
        answer = reasoning.make_answer(generator, {}, {"metadata": {}, **truth})
        reasoning.check_scorer(answer)
        return answer
    raise UserError(
        f"data_source={source[:80]!r}: no scorer; known: pointer_chase, openai/gsm8k, "
        "reasoning_gym:<generator>"
    )
