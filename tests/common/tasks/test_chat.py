"""Tokenizer, chat template and stop tokens, held against transformers itself."""

import json

import numpy as np
import pytest

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import registry
from common.tasks.chat import load_codec
from tests.common.task_files import row, write_jsonl, write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)


def of_transformers(folder, messages):
    import transformers

    hf = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def with_files(folder, template=TURNS, eos="<eos>", **files):
    """A tokenizer folder, and `config={...}` as config.json beside it."""
    write_tokenizer(folder, template, eos)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_chat_template_is_rendered_in_a_sandbox(tmp_path):
    template = (
        "{%- for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
        "{%- if add_generation_prompt %}[bot]{% endif %}"
    )
    codec = load_codec(write_tokenizer(tmp_path / "t", template), "")
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": " hi "}]
    assert codec.render(messages) == "[system]brief<eos>[user]hi<eos>[bot]"
    ids = codec.encode(messages)
    assert (ids == 256).sum() == 2 and ids.dtype == np.int32  # <eos> is one token
    for bad, message in [
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "cannot render"),
    ]:
        with pytest.raises(UserError, match=message):
            load_codec(write_tokenizer(tmp_path / "t", bad), "").render(messages)


def test_named_and_separate_templates_and_generation_config(tmp_path):
    path = write_tokenizer(tmp_path / "t", [{"name": "default", "template": "A"}], eos=None)
    with pytest.raises(UserError, match="no stop token"):
        load_codec(path, "")
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    codec = load_codec(path, "")
    assert codec.stop_ids == (10, 256) and codec.render(HELLO) == "A"
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    (tmp_path / "t" / "chat_template.jinja").write_text("B")
    assert load_codec(str(tmp_path / "t"), "").render(HELLO) == "B"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}'])
def test_broken_tokenizers_get_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="tokenizer.json"):
        load_codec(str(tmp_path), "")
    with pytest.raises(UserError, match="cannot be read"):
        load_codec(str(tmp_path / "none.json"), "")
    with pytest.raises(UserError, match="set it to a tokenizer.json"):
        load_codec("", "")


@pytest.mark.parametrize(
    "setting",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst",
                        "stride": 0}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}},
    ],
)  # fmt: skip
def test_a_tokenizer_saved_with_truncation_or_padding_gives_whole_prompts(tmp_path, setting):
    """[user]hello, <eos>, [bot]: 11 bytes, one token, 5 bytes."""
    folder = with_files(tmp_path / "t")
    path = tmp_path / "t" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    ids = load_codec(folder, "").encode(HELLO)
    assert len(ids) == 17 and ids.tolist() == of_transformers(folder, HELLO)


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_a_template_sees_no_tools_and_no_documents(tmp_path, name):
    template = f"{{% if {name} is not none %}}PHANTOM{{% endif %}}" + TURNS
    codec = load_codec(with_files(tmp_path / "t", template), "")
    assert codec.render(HELLO) == "[user]hello<eos>[bot]"


def test_forms_of_templates(tmp_path):
    """Marks of TRL, a dict of names; the file beside goes before what tokenizer_config.json has."""
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert load_codec(with_files(tmp_path / "a", marked), "").render(HELLO) == "hello"
    named = {"default": TURNS, "rag": "R"}
    codec = load_codec(with_files(tmp_path / "b", named), "")
    assert codec.render(HELLO) == "[user]hello<eos>[bot]"
    with pytest.raises(UserError, match="default") as error:
        load_codec(with_files(tmp_path / "c", [{"name": "rag", "template": "R"}]), "")
    assert "\n" not in str(error.value)
    folder = with_files(tmp_path / "d")
    (tmp_path / "d" / "chat_template.jinja").write_text(TURNS + "<think>")
    ids = load_codec(folder, "").encode(HELLO)
    assert ids.tolist() == of_transformers(folder, HELLO)
    assert load_codec(folder, "").render(HELLO).endswith("[bot]<think>")


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"config": {"model_type": "llama"}}, (256,)),  # not Llama's default, 2
        ({"config": {"model_type": "llama", "eos_token_id": [5, 7]}}, (5, 7, 256)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": 0}}, (0, 5, 256)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5, 256)),
        ({"generation_config": {"eos_token_id": [256, 9]}}, (9, 256)),
    ],
)
def test_stop_tokens_are_all_that_a_file_names(tmp_path, files, stops):
    assert load_codec(with_files(tmp_path / "t", **files), "").stop_ids == stops


@pytest.mark.parametrize(
    ("eos", "files", "message"),
    [
        (None, {}, "no stop token; set eos_token in tokenizer_config.json"),
        ("<end>", {}, "eos_token '<end>': expected a token of tokenizer.json"),
        ("<eos>", {"config": {"eos_token_id": 257}}, r"eos_token_id=257, expected .* \[0, 256\]"),
        ("<eos>", {"config": {"eos_token_id": True}}, "eos_token_id=True"),
        ("<eos>", {"generation_config": {"eos_token_id": ["a"]}}, "eos_token_id|generation_config"),
    ],
)
def test_wrong_stop_tokens_get_one_line(tmp_path, eos, files, message):
    with pytest.raises(UserError, match=message) as error:
        load_codec(with_files(tmp_path / "t", eos=eos, **files), "")
    assert "\n" not in str(error.value)


def test_a_prompt_has_neither_todays_date_nor_chance_in_it(tmp_path):
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + TURNS
    folder = with_files(tmp_path / "t", dated)
    with pytest.raises(UserError, match="today's date.*set task.date, e.g. 2026-01-31"):
        load_codec(folder, "").render(HELLO)
    assert load_codec(folder, "", "2024-07-26").render(HELLO).startswith("26 Jul 2024[user]hello")
    name = write_jsonl(tmp_path / "d.jsonl", [row()])
    with pytest.raises(UserError, match="line 1: the chat template asks for today's date"):
        registry.build_task(TaskConfig(name=name, tokenizer=folder))
    task = registry.build_task(TaskConfig(name=name, tokenizer=folder, date="2024-07-26"))
    assert task.text(task.prompts[0].tokens).startswith("26 Jul 2024")
    computed = with_files(tmp_path / "u", "{% set f = '%Y' %}{{ strftime_now(f) }}")
    with pytest.raises(UserError, match="today's date"):
        load_codec(computed, "", "2024-07-26").render(HELLO)
    chance = with_files(tmp_path / "v", "{{ ['a', 'b'] | random }}")
    with pytest.raises(UserError, match="random"):
        load_codec(chance, "").render(HELLO)
    with pytest.raises(UserError, match="date='31.1.2026': expected a date such as 2026-01-31"):
        TaskConfig(date="31.1.2026")


def test_text_that_is_no_unicode_is_named(tmp_path):
    """JSON may hold half of a surrogate pair, a cut emoji; no tokenizer takes it."""
    codec = load_codec(with_files(tmp_path / "t"), "")
    with pytest.raises(UserError, match=r"half of a surrogate pair, '\\ud83d'"):
        codec.encode([{"role": "user", "content": "a\ud83d"}])


def test_without_transformers_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"transformers is not installed; run: pip install 'spar"):
        load_codec(with_files(tmp_path / "t"), "")
