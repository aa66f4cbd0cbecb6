"""Which problems a step sees: pure functions of (seed, step); held-out ones are held out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RolloutConfig, TaskConfig
from common.errors import UserError
from common.tasks import registry
from common.tasks.prompts import PromptSource
from common.types import Prompt
from tests.common.task_files import row, write_jsonl, write_tokenizer

SMALL = {"num_symbols": 16, "min_entries": 12, "max_entries": 16}


def source(config=None, **rollout):
    config = config or TaskConfig(args=SMALL)
    return PromptSource(registry.build_task(config), config, RolloutConfig(**rollout))


class Rows:
    """A finite task without tokenizer: row i is the prompt [i + 1]."""

    name, vocab_size, pad_id, stop_ids, deadline_seconds = "rows", 10**6, 0, (1,), None

    def __init__(self, num_items, longest=1):
        self.num_items, self.max_prompt_tokens = num_items, longest

    def prompt(self, seed, index):
        tokens = np.array([index + 1], np.int32)
        return Prompt(prompt_id=index, tokens=tokens, task=self.name, answer={})


def ids(prompts):
    return [p.prompt_id for p in prompts]


def test_steps_are_pure_functions_of_seed_and_step():
    a, b = source(prompts_per_step=4), source(prompts_per_step=4)
    b.batch(0), b.eval_batch(3), b.batch(9)  # what was asked before has no influence
    for p, q in zip(a.batch(5), b.batch(5), strict=True):
        assert p.prompt_id == q.prompt_id and np.array_equal(p.tokens, q.tokens)
    # step 5 of 4 prompts: problems 20..23
    assert ids(a.batch(5)) == [20, 21, 22, 23]
    other = source(TaskConfig(args=SMALL, seed=1), prompts_per_step=4)
    assert not any(
        np.array_equal(p.tokens, q.tokens) for p, q in zip(a.batch(5), other.batch(5), strict=True)
    )


def test_training_evaluation_and_profile_have_no_problem_in_common():
    s = source(prompts_per_step=8)
    groups = [sum((s.batch(i) for i in range(8)), []), s.eval_batch(64), s.profile_batch(64)]
    everything = sum(groups, [])
    assert len({p.prompt_id for p in everything}) == 3 * 64
    assert len({p.tokens.tobytes() for p in everything}) == 3 * 64
    assert all(0 <= p.prompt_id < 2**31 for p in everything)
    assert ids(s.eval_batch(3)) == ids(s.eval_batch(64))[:3]
    with pytest.raises(ValueError, match="n=0: expected"):
        s.eval_batch(0)
    with pytest.raises(ValueError, match="step=-1"):
        s.batch(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 300), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))
def test_epochs_of_a_finite_task(num_rows, per_step, seed, eval_seed):
    """Tenths are held out; an epoch shows every training row at most once and leaves out less than
    a step; every batch is full; the next epoch has another order."""
    config = TaskConfig(seed=seed, eval_seed=eval_seed + 10)
    rollout = RolloutConfig(prompts_per_step=per_step)
    num_train = num_rows - 2 * max(1, num_rows // 10)
    if num_train < per_step:
        with pytest.raises(UserError, match=f"{num_train} training rows"):
            PromptSource(Rows(num_rows), config, rollout)
        return
    s = PromptSource(Rows(num_rows), config, rollout)
    held = [ids(s.eval_batch(num_rows)), ids(s.profile_batch(num_rows))]
    assert [len(h) for h in held] == [max(1, num_rows // 10)] * 2
    train = set(range(num_rows)) - set(held[0]) - set(held[1])
    assert len(train) == num_train
    steps_per_epoch = num_train // per_step
    for epoch in range(2):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        seen = [i for step in steps for i in ids(s.batch(step))]
        assert len(seen) == len(set(seen)) == steps_per_epoch * per_step
        assert set(seen) <= train


def test_orders_change_with_epoch_and_seed_and_the_split_with_eval_seed():
    def epoch(number, **config):
        config = TaskConfig(**config)
        s = PromptSource(Rows(100), config, RolloutConfig(prompts_per_step=10))
        return [ids(s.batch(8 * number + i)) for i in range(8)], ids(s.eval_batch(10))

    orders = [epoch(0), epoch(1), epoch(0, seed=5), epoch(0, eval_seed=5)]
    assert len({str(order) for order, _ in orders}) == 4
    assert orders[0][1] == orders[1][1] == orders[2][1] != orders[3][1]
    assert sorted(sum(orders[0][0], [])) == sorted(sum(orders[1][0], []))  # 80 of 80 rows


def test_prompts_over_the_limit_give_both_numbers(tmp_path):
    with pytest.raises(UserError, match="of 82 tokens, over rollout.max_prompt_tokens=81"):
        # header 16, 16 facts of 2 * 2 tokens, `? k`: 16 + 64 + 2 = 82
        source(max_prompt_tokens=81)
    source(max_prompt_tokens=82)
    name = write_jsonl(tmp_path / "d.jsonl", [row(f"{i}?") for i in range(11)] + [row("x" * 99)])
    config = TaskConfig(name=name, tokenizer=write_tokenizer(tmp_path / "t"))
    # "User: " + 99 + newline + "Assistant:" = 6 + 99 + 1 + 10 = 116 bytes = tokens
    with pytest.raises(UserError, match="of 116 tokens, over rollout.max_prompt_tokens=115"):
        source(config, max_prompt_tokens=115)
    s = source(config, max_prompt_tokens=116, prompts_per_step=10)
    assert len(ids(s.batch(0) + s.eval_batch(9) + s.profile_batch(9))) == 12


def test_too_few_rows_are_refused():
    with pytest.raises(UserError, match="2 rows: expected at least 3"):
        PromptSource(Rows(2), TaskConfig(), RolloutConfig())
