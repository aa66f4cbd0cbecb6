"""Text to tokens and back: a tokenizer.json and the chat template that lies beside it.

With a chat template (`chat_template` in tokenizer_config.json, or chat_template.jinja) messages are
rendered by jinja2 in a sandbox, as HF does, with add_generation_prompt. Without one, the format is

    System: Be brief.
    User: What is 2 + 2?
    Assistant:

one line start per message, the role capitalised, and the tokenizer's own special tokens around it.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
)  # fmt: skip
"""Files beside a tokenizer that decide about tokens, template and stop tokens."""
Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCodec:
    """tokenizer: of the `tokenizers` library; template: a compiled jinja2 template or None.

    stop_ids: tokens that end a response; pad_id: for those who need one, 0 if the model has none.
    special: text of the special tokens, for the template. files: all that were read.
    """

    tokenizer: Any
    template: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    special: Mapping[str, str]
    files: tuple[Path, ...] = ()

    def render(self, messages: Messages) -> str:
        """The prompt as text. Raises ValueError if the chat template refuses the messages."""
        if self.template is None:
            lines = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages]
            return "".join(lines) + "Assistant:"
        import jinja2

        try:
            return self.template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self.special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot render the messages: {error}") from None

    def encode(self, messages: Messages) -> np.ndarray:
        """Token ids of the rendered prompt, int32 [prompt_len]."""
        text = self.render(messages)
        special = self.template is None
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    def text(self, tokens: np.ndarray) -> str:
        """Tokens as text, up to the first stop token; ids outside the vocabulary are left out."""
        ids = np.asarray(tokens).reshape(-1)
        stops = np.flatnonzero(np.isin(ids, self.stop_ids))
        ids = ids[: stops[0]] if len(stops) else ids
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def load_codec(tokenizer: str, model_path: str) -> TextCodec:
    """Read `tokenizer` (a tokenizer.json or its folder), or else the model's.

    Stop tokens: eos_token of tokenizer_config.json and eos_token_id of generation_config.json.
    Raises ValueError, one line: nothing given, files missing or broken, no stop token.
    """
    path = Path(tokenizer or model_path)
    if not (tokenizer or model_path):
        raise ValueError("task.tokenizer is empty and there is no model: name a tokenizer.json")
    if path.is_dir():
        path = path / "tokenizer.json"
    if "model" not in _json(path):
        raise ValueError(f"{path}: no tokenizer.json of the tokenizers library (no key 'model')")
    require("tokenizers")
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(path))
    config, generation = (
        _json(file) if (file := path.parent / name).is_file() else {}
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value
    }
    ids = generation.get("eos_token_id", [])
    stops = {
        *(ids if isinstance(ids, list) else [ids]),
        tok.token_to_id(special.get("eos_token", "")),
    }
    stop_ids = tuple(sorted(i for i in stops if isinstance(i, int)))
    if not stop_ids:
        raise ValueError(f"{path.parent}: no stop token; set eos_token in tokenizer_config.json")
    vocab = tok.get_vocab(with_added_tokens=True)
    return TextCodec(
        tokenizer=tok,
        template=_template(path.parent, config),
        stop_ids=stop_ids,
        pad_id=vocab.get(special.get("pad_token", ""), 0),
        vocab_size=1 + max(vocab.values()),
        special=special,
        files=tuple(file for name in FILES if (file := path.parent / name).is_file()),
    )


def require(package: str) -> None:
    """ValueError with the command to run if an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed; run: pip install 'sparrow-rl[data]'")


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return data


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source and (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not source:
        return None
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return env.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: chat_template cannot be compiled: {error}") from None
