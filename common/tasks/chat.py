"""Text to tokens and back, by a tokenizer.json and the files beside it, as transformers does it.

With a chat template (chat_template.jinja, or else the one in tokenizer_config.json) messages are
rendered in the sandbox of transformers with add_generation_prompt. Without one the format is

    System: Be brief.
    User: What is 2 + 2?
    Assistant:

with the role of each message capitalised, and the tokenizer's own special tokens around the text.
Only local files are read; code beside them is never run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.tasks import limits

FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "config.json", "generation_config.json",
)  # fmt: skip
"""Files beside a tokenizer that determine tokens, template and stop tokens."""
Messages = Sequence[Mapping[str, str]]
RENDER_SECONDS = 10.0
RENDER_BYTES = 2**30
"""Limits of a chat template for one prompt; usual templates take a millisecond."""
MAX_CHARACTERS = 2**22
"""Longest prompt, about a million tokens; a tokenizer needs over 100 bytes for each character."""
_CLOCK = re.compile(r"\bstrftime_now\s*\(")
_CLOCK_WITH_FORMAT = re.compile(r"""\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCodec:
    """A tokenizer with its chat template and stop tokens.

    tokenizer: object of the `tokenizers` library, without truncation and padding; hf: the same
    tokenizer as an object of transformers. template: source of the chat template, or None.
    stop_ids: tokens that end a response. pad_id: 0 if the model has none. files: those read.
    """

    tokenizer: Any
    hf: Any
    template: str | None
    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    files: tuple[Path, ...] = ()

    def render(self, messages: Messages, *, loading: bool = False) -> str:
        """The prompt as text; UserError if the chat template cannot render the messages.

        The template may take RENDER_SECONDS. loading: limit its memory to RENDER_BYTES too, which
        is possible only while nothing else computes in this process.
        """
        if self.template is None:
            lines = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages]
            return "".join(lines) + "Assistant:"
        _refuse_what_changes(self.template)
        memory = limits.memory_limit(RENDER_BYTES) if loading else contextlib.nullcontext()
        with (
            _in_one_line("the chat template cannot render the messages"),
            memory,
            limits.TimeLimit(RENDER_SECONDS),
        ):
            return self.hf.apply_chat_template(
                [dict(m) for m in messages],
                chat_template=self.template,
                add_generation_prompt=True,
                tokenize=False,
            )

    def encode(self, messages: Messages, *, loading: bool = False) -> np.ndarray:
        """Token ids of the rendered prompt, int32 [prompt_len]; loading: see `render`."""
        text = self.render(messages, loading=loading)
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"a prompt of {len(text)} characters, expected at most {MAX_CHARACTERS}; correct "
                "the row or the chat template"
            )
        check_unicode(text)
        with _in_one_line("the tokenizer cannot encode the prompt"):
            ids = self.tokenizer.encode(text, add_special_tokens=self.template is None).ids
        return np.asarray(ids, np.int32)

    def text(self, tokens: np.ndarray) -> str:
        """The text of the tokens before a stop token; ids outside the vocabulary are left out."""
        ids = np.asarray(tokens).reshape(-1)
        stops = np.flatnonzero(np.isin(ids, self.stop_ids))
        ids = ids[: stops[0]] if len(stops) else ids
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        with _in_one_line("the tokenizer cannot decode a response"):
            return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def load_codec(tokenizer: str, model_path: str, date: str = "") -> TextCodec:
    """Read `tokenizer` (a tokenizer.json or its folder), or else the model's.

    date: e.g. "2026-01-31", given to a chat template that asks for today's date; without it such
    a template is refused when it is used. Stop tokens: see `_stop_ids`.
    Raises UserError if neither is given, for missing or damaged files, and without a stop token.
    """
    path = Path(tokenizer or model_path)
    if not (tokenizer or model_path):
        raise UserError("task.tokenizer is empty and there is no model; set it to a tokenizer.json")
    if path.is_dir():
        path = path / "tokenizer.json"
    content = _json(path)
    if "model" not in content:
        raise UserError(
            f"{path}: expected a tokenizer.json of the tokenizers library, with a key 'model'"
        )
    beside = {
        name: _json(file)
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
        if (file := path.parent / name).is_file()
    }
    require("transformers")
    with _in_one_line(f"{path.parent}: transformers cannot read this tokenizer"):
        hf = _read(path)
        backend = hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        template = None if hf.chat_template is None else hf.get_chat_template()
        backend.decode(backend.encode("a").ids)
    if not isinstance(template, str | None):
        raise UserError(
            f"{path.parent}: chat_template is a {type(template).__name__}, expected text"
        )
    vocab_size = 1 + max(vocab.values())
    return TextCodec(
        tokenizer=backend,
        hf=hf,
        template=_at_date(template, date) if template else template,
        stop_ids=_stop_ids(path, content, beside, hf.eos_token, vocab),
        pad_id=vocab.get(hf.pad_token, 0),
        vocab_size=vocab_size,
        files=tuple(
            dict.fromkeys([path, *(f for p in FILES for f in sorted(path.parent.glob(p)))])
        ),
    )


def require(package: str) -> None:
    """UserError with the command that installs an optional package, if it is missing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed; run: pip install 'sparrow-rl[data]'")


def check_unicode(text: str) -> None:
    """UserError for half of a surrogate pair (a cut emoji), which JSON allows."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"text with half of a surrogate pair, {text[error.start]!a}: expected Unicode; correct "
            "the row or leave it out"
        ) from None


def _read(path: Path) -> Any:
    """The tokenizer by transformers: AutoTokenizer beside a model, else the plain class."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if path.name == "tokenizer.json" and (path.parent / "config.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(
            str(path.parent), local_files_only=True, trust_remote_code=False
        )
    return transformers.PreTrainedTokenizerFast.from_pretrained(
        str(path.parent), tokenizer_file=str(path), local_files_only=True
    )


def _stop_ids(
    path: Path,
    content: Mapping[str, Any],
    beside: Mapping[str, Mapping[str, Any]],
    eos_token: str | None,
    vocab: Mapping[str, int],
) -> tuple[int, ...]:
    """The tokens that end a response, sorted: those that any of the files names.

    These are eos_token of the tokenizer, and eos_token_id of config.json and generation_config.json
    (a number, a list or null). Keys that a file does not have are ignored: the defaults of
    transformers (2 for Llama) mean nothing in another vocabulary.
    """
    folder = path.parent
    stops = set()
    if eos_token is not None:
        added = beside.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
        with _in_one_line(f"{folder}: damaged list of tokens"):
            known = _tokens(content, added)
        if eos_token not in known:
            raise UserError(
                f"{folder}: eos_token {eos_token[:80]!r}: expected a token of {path.name}"
            )
        stops.add(vocab[eos_token])
    for name in ("config.json", "generation_config.json"):
        found = beside.get(name, {}).get("eos_token_id")
        if name == "generation_config.json" and name in beside:
            found = _generation_eos(folder)
        for stop in found if isinstance(found, list) else [] if found is None else [found]:
            if type(stop) is not int or not 0 <= stop <= max(vocab.values()):
                raise UserError(
                    f"{folder / name}: eos_token_id={str(found)[:80]}, expected token ids in "
                    f"[0, {max(vocab.values())}]"
                )
            stops.add(stop)
    if not stops:
        raise UserError(f"{folder}: has no stop token; set eos_token in tokenizer_config.json")
    return tuple(sorted(stops))


def _generation_eos(folder: Path) -> Any:
    import transformers

    with _in_one_line(f"{folder / 'generation_config.json'}: transformers cannot read it"):
        config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return config.eos_token_id


def _tokens(content: Mapping[str, Any], added: Any) -> set[Any]:
    """Every token of tokenizer.json, and those that tokenizer_config.json adds."""
    model = content["model"]
    vocab = model.get("vocab", ()) if isinstance(model, dict) else ()
    tokens = {entry[0] if isinstance(entry, list) else entry for entry in vocab}
    more = [*(content.get("added_tokens") or ()), *(added.values() if added else ())]
    return tokens | {entry["content"] for entry in more}


def _at_date(template: str, date: str) -> str:
    """The template with each `strftime_now("%d %b %Y")` replaced by `date` in that format."""
    if not date:
        return template
    day = datetime.datetime.strptime(date, "%Y-%m-%d")
    return _CLOCK_WITH_FORMAT.sub(lambda m: json.dumps(day.strftime(m[1] or m[2] or "")), template)


def _refuse_what_changes(template: str) -> None:
    """UserError for a template that depends on the date or on chance, since runs must repeat."""
    if _CLOCK.search(template):
        raise UserError(
            "the chat template asks for today's date, so that prompts would change from day to "
            "day; set task.date, e.g. 2026-01-31"
        )
    if _CHANCE.search(template):
        raise UserError(
            "the chat template makes random text ('random' or 'lipsum'); use another template"
        )


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """UserError, one line, for any error that the tokenizer libraries raise in the block.

    Damaged files make them raise KeyError, the bare Exception of `tokenizers`, or a panic of its
    Rust code, which is a BaseException.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"{what} ({type(error).__name__}: {said})") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object")
    return data
