"""Damaged tokenizers, templates and rows: one line, or what transformers makes of them."""

import copy
import json
import random

import pytest

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import registry
from tests.common.task_files import row, write_tokenizer

TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}[bot]"
VALUES = (
    None, 0, -1, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x", "<eos>", [], {}, [1], {"a": 1},
    True, "\ud83d", "9" * 5000, [[[]]],
)  # fmt: skip
TEMPLATES = (
    "{{ messages[5].content }}", "{{ 1 / 0 }}", "{{ 'a' * 100000000000 }}", "{% include 'x' %}",
    "{% for i in range(10**9) %}{% endfor %}", "{{ messages.append(1) }}", "{{ x.y.z }}", "", " ",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages }}", "{{ '{0.__class__}'.format(1) }}", "{{ '\\ud83d' }}",
    "{{ messages[0].role + none }}", "{{",
)  # fmt: skip


def paths(value, path=()):
    """Where in a JSON value one could change something."""
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value[:40]) if isinstance(value, list) else list(items)[:40]
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def changed(value, rng):
    """`value` with one entry left out or replaced, at any depth with equal chance."""
    value, places = copy.deepcopy(value), list(paths(value))
    depth = rng.choice(sorted({len(place) for place in places}))
    *way, last = rng.choice([place for place in places if len(place) == depth])
    inner = value
    for key in way:
        inner = inner[key]
    if rng.random() < 0.35:
        del inner[last]
    else:
        inner[last] = rng.choice(VALUES)
    return json.dumps(value).encode()


def garbled(content, rng):
    """`content` cut off, with a few other bytes, or with a piece left out."""
    kind, at = rng.randrange(3), rng.randrange(len(content))
    if kind == 0:
        return content[:at]
    if kind == 1:
        other = bytes(rng.randrange(256) for _ in range(rng.choice((1, 3, 20))))
        return content[:at] + other + content[at + len(other) :]
    return content[:at] + content[at + rng.choice((1, 5, 100)) :]


def of_transformers(folder, messages):
    import transformers

    hf = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    return list(hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "d.jsonl"]
)
def test_damaged_files_get_one_line_or_the_tokens_of_transformers(tmp_path, name):
    rng = random.Random(name)
    write_tokenizer(tmp_path, TURNS)
    whole = {
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": (tmp_path / "tokenizer_config.json").read_bytes(),
        "d.jsonl": json.dumps(row()).encode(),
    }
    refused = 0
    for number in range(30):
        if name == "chat_template.jinja":
            texts = [template.encode() for template in TEMPLATES]
            damaged = texts[number] if number < len(texts) else garbled(TURNS.encode(), rng)
        elif number % 3:
            damaged = changed(json.loads(whole[name]), rng)
        else:
            damaged = garbled(whole[name], rng)
        for file, content in (whole | {name: damaged}).items():
            (tmp_path / file).write_bytes(content)
        try:
            task = registry.build_task(TaskConfig(name=str(tmp_path / "d.jsonl")), str(tmp_path))
            task.text([1, 2, 250, 255, 7])
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 800, damaged
            continue
        messages = json.loads((tmp_path / "d.jsonl").read_bytes())["prompt"]
        if task.codec.template is not None:
            assert task.prompts[0].tokens.tolist() == of_transformers(tmp_path, messages), damaged
    assert 5 < refused < 30
