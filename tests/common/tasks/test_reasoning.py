"""reasoning-gym tasks: separate streams, refused scorers, grading in workers."""

import json

import numpy as np
import pytest

from common.config import TaskConfig
from common.errors import UserError
from common.tasks import reasoning, registry
from common.tasks.grading import GraderPool
from tests.common.task_files import rollout, row, write_jsonl, write_tokenizer


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("t"))
    config = TaskConfig(name="reasoning_gym:chain_sum", args={"max_terms": 3}, tokenizer=tokenizer)
    return registry.build_task(config)


def test_prompts_are_pure_functions_and_carry_their_answer(task):
    a, b = task.prompt(0, 7), task.prompt(0, 7)
    assert np.array_equal(a.tokens, b.tokens) and a.answer == b.answer and a.prompt_id == 7
    assert json.loads(json.dumps(a.answer)) == a.answer
    text = task.text(a.tokens)
    assert a.answer["entry"]["question"] in text and reasoning.INSTRUCTION in text
    assert text.startswith("User: ") and text.endswith("Assistant:")


def test_streams_of_different_seeds_share_no_item(task):
    """Seeds 0 and 1: items start at 0 and 2^20; index stays below 2^20, so they never meet."""
    assert reasoning.stream(1) - reasoning.stream(0) == reasoning.ITEMS_PER_STREAM
    with pytest.raises(UserError, match="has 1048576 problems"):
        task.prompt(0, reasoning.ITEMS_PER_STREAM)
    # Random(seed + index) would make these two the same problem
    assert not np.array_equal(task.prompt(0, 1).tokens, task.prompt(1, 0).tokens)
    last = task.prompt(0, reasoning.ITEMS_PER_STREAM - 1)
    assert not np.array_equal(last.tokens, task.prompt(1, 0).tokens)
    # 4096 streams: eval_seed = seed + 4096 would be the training set itself
    with pytest.raises(UserError, match="would overlap"):
        registry.build_task(TaskConfig(name=task.name, seed=3, eval_seed=3 + 4096))


def test_a_rollout_is_graded_in_workers(task):
    prompts = [task.prompt(0, i) for i in range(3)]
    right = [p.answer["entry"]["answer"] for p in prompts]
    texts = ["<answer>no</answer>", f"so <answer> {right[1]} </answer>.", f"{right[2]}"]
    encode = task.codec.tokenizer.encode
    sampled = rollout(prompts, [[*encode(t).ids, 256] for t in texts])
    with GraderPool(1, 20.0) as pool:
        rewards = registry.score(task, sampled, pool)
        assert rewards[1] == 1.0 and rewards[0] < 0.1
        assert rewards[2] == 0  # the right number, but no tag
        # a generator whose scorer raises on nonsense costs nothing but its own score
        hostile = rollout(prompts[:1], [encode("<answer>" + "9" * 100_000).ids])
        assert registry.score(task, hostile, pool)[0] < 0.1
        assert pool.counts["graded"] == 4


def test_every_offered_scorer_accepts_its_own_kind_of_answer():
    """A few generators through JSON: the entry that a worker gets gives the same score."""
    for name in ("leg_counting", "spell_backward", "basic_arithmetic", "sudoku", "game_of_life"):
        entry = reasoning._dataset(name, "{}", 5)[0]
        answer = json.loads(json.dumps(reasoning.make_answer(name, {}, entry)))
        assert reasoning.score_entry(answer, entry["answer"]) == 1.0
        assert reasoning.score_entry(answer, "") < 0.5


def test_a_scorer_that_cannot_work_is_refused_at_start(task, tmp_path, monkeypatch):
    """Else each of its responses would score 0 without a word."""
    tokenizer = write_tokenizer(tmp_path / "t")
    # this scorer reads metadata["solution"], which the row lacks
    rows = [row("?", {"answer": "x"}, "reasoning_gym:futoshiki")]
    config = TaskConfig(name=write_jsonl(tmp_path / "d.jsonl", rows), tokenizer=tokenizer)
    with pytest.raises(UserError, match="line 1: .*its scorer fails on the right answer"):
        registry.build_task(config)

    def missing(self, answer, entry):
        raise ImportError("No module named 'far'")

    monkeypatch.setattr(type(reasoning._dataset("chain_sum", "{}", 0)), "score_answer", missing)
    with pytest.raises(UserError, match="fails on the right answer .ImportError: No module") as e:
        registry.build_task(TaskConfig(name="reasoning_gym:chain_sum", tokenizer=tokenizer))
    assert "\n" not in str(e.value)
    dated = write_tokenizer(tmp_path / "u", "{{ strftime_now('%d %B %Y') }}")
    with pytest.raises(UserError, match="set task.date"):  # before anything is compiled
        registry.build_task(TaskConfig(name="reasoning_gym:leg_counting", tokenizer=dated))


@pytest.mark.parametrize(
    ("generator", "args", "message"),
    [
        *[(name, {}, "is not offered: ") for name in reasoning.REFUSED],
        ("leg_countin", {}, "unknown generator; nearest: leg_counting"),
        ("chain_sum", {"max_term": 3}, "unknown option 'max_term'; did you mean 'max_terms'"),
        ("chain_sum", {"seed": 3}, "unknown option 'seed'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "options {'min_terms': 9"),
        ("chain_sum", {"min_terms": "x"}, "options {'min_terms': 'x'"),
    ],
)
def test_refusals_are_one_line(generator, args, message):
    with pytest.raises(UserError, match=message) as error:
        registry.build_task(TaskConfig(name=f"reasoning_gym:{generator}", args=args))
    assert "\n" not in str(error.value)


def test_text_that_evaluates_code_is_refused_by_name():
    """The list of toolchain.md: scorers that eval the model's text or hang on it."""
    assert {
        *("spiral_matrix", "binary_matrix", "n_queens", "string_insertion", "countdown"),
        *("puzzle24", "polynomial_multiplication", "simple_integration"),
        "intermediate_integration",
    } <= set(reasoning.REFUSED)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer> yes", "4"),
        ("<answer>4", "4"),
        ("<answer></answer>", ""),
        (" 4 ", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert reasoning.final_answer(text) == answer
