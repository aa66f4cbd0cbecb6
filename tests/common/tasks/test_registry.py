"""Tasks by name, scoring of a rollout, and files in verl's columns."""

import dataclasses
import json

import numpy as np
import pytest

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import registry
from common.tasks.grading import GraderPool
from common.tasks.pointer_chase import PointerChase
from tests.common.task_files import rollout, row, write_jsonl, write_tokenizer


def test_pointer_chase_by_name_and_scores_of_a_rollout():
    args = {"min_entries": 4, "max_entries": 6, "partial_credit": True}
    task = registry.build_task(TaskConfig(args=args))
    assert task == PointerChase(**args)
    a, b = task.prompt(0, 0), task.prompt(0, 1)
    chain = a.answer["chain"]
    right = task.response(list(zip(chain, [*chain[1:], None], strict=True)))
    half = np.append(right[: task.hop_tokens], right[-1])  # one hop, then the stop
    rewards = registry.score(task, rollout([a, a, b, a], [right, half, right, []]))
    assert rewards.dtype == np.float32
    assert rewards[[0, 1, 3]].tolist() == [1.0, np.float32(1 / len(chain)), 0.0]
    assert rewards[2] < 1  # the answer to another problem


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "pointer_chaser"}, "unknown task; nearest: pointer_chase;"),
        ({"name": "reasoning_gim:x"}, "nearest: reasoning_gym:<generator>"),
        ({"args": {"min_entry": 3}}, "unknown option 'min_entry'; did you mean 'min_entries'"),
        ({"args": {"min_entries": 1}}, "min_entries=1: expected|min_entries=1, max"),
        ({"tokenizer": "t.json"}, "pointer_chase has its own tokens"),
        ({"name": "no.jsonl"}, "no such file"),
        ({"seed": -1}, "^seed=-1: expected at least 0"),
    ],
)
def test_wrong_settings_get_one_line(config, message):
    with pytest.raises(UserError, match=message) as error:
        registry.build_task(TaskConfig(**config))
    assert "\n" not in str(error.value)


def test_streams_differ():
    for config in (TaskConfig(), TaskConfig(seed=8, eval_seed=7), TaskConfig(seed=6, eval_seed=7)):
        assert len(set(registry.stream_seeds(config))) == 3


class Wild(PointerChase):
    def score(self, answer, response):
        return float("nan") if len(response) == 1 else 7.0


def test_scores_that_are_no_scores_count_as_zero():
    prompt = PointerChase().prompt(0, 0)
    assert registry.score(Wild(), rollout([prompt, prompt], [[1], [1, 2]])).tolist() == [0, 0]


def test_text_file_from_prompt_to_reward(tmp_path):
    """gsm8k rows: rendered without a template, answered in text, graded by the final number."""
    name = write_jsonl(tmp_path / "d.jsonl", [row(), row("2 * 3?", "so\n#### 6", extra_info={})])
    tokenizer = write_tokenizer(tmp_path / "t")
    for config, model in [
        (TaskConfig(name=name, tokenizer=tokenizer), ""),
        (TaskConfig(name=name), str(tmp_path / "t")),
    ]:
        task = registry.build_task(config, model)
        assert (task.num_items, task.stop_ids, task.vocab_size) == (2, (256,), 257)
        prompts = [task.prompt(0, 0), task.prompt(5, 1)]
        assert task.text(prompts[1].tokens) == "User: 2 * 3?\nAssistant:"
        assert prompts[1].answer == {"number": "6"} and prompts[1].task == "openai/gsm8k"
        encode = task.codec.tokenizer.encode
        answers = [[*encode("It is 2.").ids, 256, *encode(" 7").ids], encode("7 or #### 6").ids]
        assert registry.score(task, rollout(prompts, answers)).tolist() == [1, 1]
        answers = [[256], [-1, 10**6, 256]]
        assert registry.score(task, rollout(prompts, answers)).tolist() == [0, 0]
    # Expressions are evaluated in a worker; 1/2 is not the number 2.
    texts = ["It is 2/1", "#### 3 * 2", "It is 1/2", "6 or"]
    answers = [[*encode(text).ids, 256] for text in texts]
    with GraderPool(1, 60.0) as pool:
        rewards = registry.score(task, rollout(prompts * 2, answers), pool)
        assert rewards.tolist() == [1, 1, 0, 1] and pool.counts["graded"] == 3


def bad(change):
    data = row()
    change(data)
    return data


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "d.jsonl: no rows"),
        ([row(), bad(lambda r: r.pop("prompt"))], "line 2: column 'prompt' is missing"),
        ([bad(lambda r: r.pop("data_source"))], "line 1: column 'data_source' is missing"),
        (
            [bad(lambda r: r["reward_model"].pop("ground_truth"))],
            "line 1: column 'reward_model.ground_truth' is missing",
        ),
        ([row(), row(" \n")], "line 2: empty prompt"),
        ([bad(lambda r: r.update(prompt=[]))], "line 1: empty prompt"),
        ([bad(lambda r: r.update(prompt="hi"))], "prompt is a str, expected a list of chat"),
        ([bad(lambda r: r.update(prompt=[{"role": "user"}]))], "needs 'role' and 'content'"),
        ([bad(lambda r: r.update(prompt=["hi"]))], "needs 'role' and 'content'"),
        ([row(source="my/set")], "data_source='my/set': no scorer; known: pointer_chase"),
        ([row(truth="none")], "line 1: ground_truth='none': expected a number"),
        ([row(truth=["5", "6"])], "line 1: ground_truth=.*: expected a number"),
        ([row(), row("a\ud83d")], r"line 2: text with half of a surrogate pair, '.ud83d'"),
        (
            [row(truth={"answer": "\ud83d"}, source="reasoning_gym:chain_sum")],
            "line 1: text with half",
        ),
        ([[1]], "line 1: expected a JSON object, got list"),
        (
            [row(), row(source="pointer_chase")],
            "line 2: expected only pointer_chase rows or only text",
        ),
        ([row(source="reasoning_gym:countdown")], "not offered: its scorer evaluates"),
        ([row(source="reasoning_gym:leg_counting")], "expected the generator's entry"),
    ],
)
def test_bad_rows_get_one_line_with_their_number(tmp_path, rows, message):
    name = write_jsonl(tmp_path / "d.jsonl", rows)
    config = TaskConfig(name=name, tokenizer=write_tokenizer(tmp_path / "t"))
    with pytest.raises(UserError, match=message) as error:
        registry.build_task(config)
    assert "\n" not in str(error.value)


def test_broken_json_line_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    config = TaskConfig(name=str(path), tokenizer=write_tokenizer(tmp_path / "t"))
    path.write_text(json.dumps(row()) + "\n\n{'data_source'\n")
    with pytest.raises(UserError, match="line 3: not a JSON object"):
        registry.build_task(config)
    path.write_bytes(b"\xff\xff\n")
    with pytest.raises(UserError, match="line 1: not a JSON object"):
        registry.build_task(config)
    path.write_text('{"a": ' + "9" * 5000 + "}")  # Python refuses such integers
    with pytest.raises(UserError, match="line 1: not a JSON object"):
        registry.build_task(config)
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="line 1: not a JSON object"):
        registry.build_task(config)
    path.write_text(json.dumps(row()) + "\n")
    with pytest.raises(UserError, match="has no effect on a file of text rows"):
        registry.build_task(TaskConfig(name=str(path), args={"a": 1}))


def test_parquet_is_read_like_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [row(f"{i} + 1?", str(i + 1), extra_info={"index": i}) for i in range(5)]
    tokenizer = write_tokenizer(tmp_path / "t")
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    a = registry.build_task(TaskConfig(name=str(path), tokenizer=tokenizer))
    jsonl = write_jsonl(tmp_path / "d.jsonl", rows)
    b = registry.build_task(TaskConfig(name=jsonl, tokenizer=tokenizer))
    assert a.num_items == 5
    for p, q in zip(a.prompts, b.prompts, strict=True):
        assert np.array_equal(p.tokens, q.tokens) and (p.answer, p.task) == (q.answer, q.task)
    pq.write_table(pa.Table.from_pylist(rows[:2]).drop(["reward_model"]), path)
    with pytest.raises(UserError, match="row 1: column 'reward_model' is missing"):
        registry.build_task(TaskConfig(name=str(path), tokenizer=tokenizer))
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="not a readable parquet file") as error:
        registry.build_task(TaskConfig(name=str(path), tokenizer=tokenizer))
    assert "\n" not in str(error.value)


def test_pointer_chase_file(tmp_path):
    chase = PointerChase(num_symbols=8, min_entries=4, max_entries=4)
    prompts = [chase.prompt(0, i) for i in range(3)]
    rows = [row(chase.text(p.tokens), p.answer, "pointer_chase") for p in prompts]
    args = {"num_symbols": 8, "min_entries": 4, "max_entries": 4}
    task = registry.build_task(TaskConfig(name=write_jsonl(tmp_path / "d.jsonl", rows), args=args))
    assert (task.num_items, task.vocab_size, task.stop_ids) == (3, chase.vocab_size, chase.stop_ids)
    for i, p in enumerate(prompts):
        q = task.prompt(0, i)
        assert np.array_equal(p.tokens, q.tokens) and p.answer == q.answer
    chain = prompts[0].answer["chain"]
    right = chase.response(list(zip(chain, [*chain[1:], None], strict=True)))
    assert registry.score(task, rollout([task.prompt(0, 0)], [right])).tolist() == [1]
    for truth in ({"chain": [8]}, {"chain": []}, {"chain": [0.5]}, {}, "k1"):
        name = write_jsonl(tmp_path / "d.jsonl", [row("k1 v1", truth, "pointer_chase")])
        with pytest.raises(UserError, match="line 1: ground_truth="):
            registry.build_task(TaskConfig(name=name, args=args))
    name = write_jsonl(tmp_path / "d.jsonl", [row("k9 v1", {"chain": [1]}, "pointer_chase")])
    with pytest.raises(UserError, match="line 1: word='k9'"):
        registry.build_task(TaskConfig(name=name, args=args))


def test_a_task_names_every_file_it_was_made_from(tmp_path):
    """Whoever goes on with a run compares their content."""
    assert registry.build_task(TaskConfig()).files == ()
    data = tmp_path / "d.jsonl"
    config = TaskConfig(name=write_jsonl(data, [row()]), tokenizer=write_tokenizer(tmp_path / "t"))
    folder = tmp_path / "t"
    expected = (data, folder / "tokenizer.json", folder / "tokenizer_config.json")
    assert registry.build_task(config).files == expected
    (folder / "chat_template.jinja").write_text("A")
    assert registry.build_task(config).files == (*expected, folder / "chat_template.jinja")


def test_rows_too_long_are_named_or_left_out_and_counted(tmp_path):
    """ "User: " + text + newline + "Assistant:" is the text and 17 bytes more, one token each."""
    rows = [row("a" * n, str(n)) for n in (3, 4, 5, 3, 4)]
    name, tokenizer = write_jsonl(tmp_path / "d.jsonl", rows), write_tokenizer(tmp_path / "t")
    config = TaskConfig(name=name, tokenizer=tokenizer)
    assert registry.build_task(config, "", 22).num_items == 5
    with pytest.raises(UserError, match="line 3: 22 tokens, over .*max_prompt_tokens=21; .*drop_"):
        registry.build_task(config, "", 21)
    config = TaskConfig(name=name, tokenizer=tokenizer, drop_long_prompts=True)
    task = registry.build_task(config, "", 21)
    assert [p.answer["number"] for p in task.prompts] == ["3", "4", "3", "4"]
    assert [p.prompt_id for p in task.prompts] == [0, 1, 2, 3] and task.num_dropped == 1
    assert task.describe(7)[0].startswith(
        f"{name}: 4 rows (1 more are too long and left out), 2 to train on, 1 held out for "
    )
    with pytest.raises(UserError, match="no rows; 5 are over rollout.max_prompt_tokens"):
        registry.build_task(config, "", 5)
    with pytest.raises(UserError, match="have no effect on pointer_chase"):
        registry.build_task(TaskConfig(drop_long_prompts=True))


def test_duplicates_of_training_rows_among_the_held_out_are_told(tmp_path):
    """20 rows: 16 to train on, 2 held out, 2 for profiles; all the same, so every one is seen."""
    config = TaskConfig(tokenizer=write_tokenizer(tmp_path / "t"))
    for rows, warnings in (([row()] * 20, 2), ([row(f"{i}?") for i in range(20)], 0)):
        name = write_jsonl(tmp_path / "d.jsonl", rows)
        task = registry.build_task(dataclasses.replace(config, name=name))
        first, *rest = task.describe(config.eval_seed)
        assert first.endswith("20 rows, 16 to train on, 2 held out for evaluation, 2 for profiles")
        assert len(rest) == warnings
        assert all("2 of the 2 prompts for" in line and "also trained on" in line for line in rest)
