"""Pointer chasing: problems can be solved, answers are judged as documented, garbage scores 0."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.tasks.pointer_chase import EOS, QUERY, PointerChase

TINY = PointerChase(num_symbols=8, min_entries=4, max_entries=4, header_tokens=2, fact_repeats=1)
CLASSIC = dataclasses.replace(
    TINY, shared_values=True, arrow_tokens=1, separator_tokens=1, hop_repeats=1, fact_copies=2
)

tasks = st.builds(
    PointerChase,
    num_symbols=st.just(12),
    shared_values=st.booleans(),
    min_entries=st.integers(2, 4),
    max_entries=st.integers(4, 12),
    chain_low=st.floats(0.1, 0.5),
    chain_high=st.floats(0.5, 1),
    header_tokens=st.integers(1, 20),
    fact_repeats=st.integers(1, 3),
    fact_copies=st.integers(1, 3),
    fact_fillers=st.integers(0, 3),
    hop_repeats=st.integers(1, 3),
    arrow_tokens=st.integers(0, 2),
    separator_tokens=st.integers(0, 2),
)


def solve(task, prompt):
    """Read the table off the words of the prompt and walk it; independent of the generator."""
    words = [w for w in task.text(prompt).split() if w not in ("<bos>", ".", ";", ">")]
    at = words.index("?")
    table = {}
    for key, value in zip(words[:at:2], words[1:at:2], strict=True):
        assert table.setdefault(key, value) == value  # stated several times, always the same
    walk, key = [], words[at + 1]
    while True:
        walk.append((key, table[key]))
        if table[key] == "end":
            break
        key = "k" + table[key][1:]
    arrow, after = [">"] * task.arrow_tokens, [";"] * task.separator_tokens
    hops = [[*([k, *arrow, v] * task.hop_repeats), *after] for k, v in walk]
    return task.tokens(" ".join(sum(hops, []) + ["<eos>"])), len(walk), len(table)


@settings(max_examples=60, deadline=None)
@given(tasks, st.integers(0, 2**40), st.integers(0, 2**30))
def test_problems_can_be_solved_from_the_text_alone(task, seed, index):
    prompt = task.prompt(seed, index)
    response, num_hops, num_facts = solve(task, prompt.tokens)
    assert task.score(prompt.answer, response) == 1.0
    assert task.min_entries <= num_facts <= task.max_entries
    low = max(2, int(task.chain_low * num_facts))
    assert low <= num_hops <= max(low, int(task.chain_high * num_facts))
    assert len(prompt.tokens) <= task.max_prompt_tokens
    assert len(response) <= task.max_response_tokens
    assert 0 < prompt.tokens.min() and prompt.tokens.max() < task.vocab_size
    assert np.array_equal(task.tokens(task.text(prompt.tokens)), prompt.tokens)
    again = task.prompt(seed, index)
    assert np.array_equal(again.tokens, prompt.tokens) and again.answer == prompt.answer
    assert not np.array_equal(task.prompt(seed + 1, index).tokens, prompt.tokens)


def test_what_a_problem_looks_like():
    """4 facts of `k v`, header 2, `? k`: 2 + 4 * 2 + 2 = 12; with two copies of `k > k ;` and a
    separator after the question 2 + 2 * 4 * 4 + 3 = 37. Hops: 2 pairs = 4; `k > k ;` = 4."""
    assert len(TINY.prompt(0, 0).tokens) == TINY.max_prompt_tokens == 12
    assert len(CLASSIC.prompt(0, 0).tokens) == CLASSIC.max_prompt_tokens == 37
    assert TINY.hop_tokens == CLASSIC.hop_tokens == 4
    # 8 special tokens + 8 keys (+ 8 values)
    assert (TINY.vocab_size, CLASSIC.vocab_size) == (24, 16)
    walk = TINY.text(TINY.response([(3, 5), (5, None)]))
    assert walk == "k3 v5 k3 v5 k5 end k5 end <eos>"
    assert CLASSIC.text(CLASSIC.response([(3, 5), (5, None)])) == "k3 > k5 ; k5 > end ; <eos>"


def score(words, partial=False, chain=(3, 5, 1)):
    task = dataclasses.replace(TINY, hop_repeats=1, partial_credit=partial)
    return task.score({"chain": list(chain)}, task.tokens(words))


def test_scores_by_hand():
    """True walk k3 v5 k5 v1 k1 end <eos>: three hops of two tokens."""
    right = "k3 v5 k5 v1 k1 end <eos>"
    assert score(right) == score(right, partial=True) == 1.0
    assert score(right + " k1 k1") == 1.0  # after the stop nothing counts
    # a wrong hop on the way, length and last hop right: the answer is judged, not the way
    assert score("k3 v5 k5 v2 k1 end <eos>") == 1.0
    wrong_end = "k3 v5 k5 v1 k2 end <eos>"
    assert (score(wrong_end), score(wrong_end, partial=True)) == (0.0, 2 / 3)
    early = "k3 v5 k5 end <eos>"  # one hop right, then a wrong look-up
    assert (score(early), score(early, partial=True)) == (0.0, 1 / 3)
    half = "k3 v5 k5 <eos>"  # the second hop is not complete
    assert (score(half), score(half, partial=True)) == (0.0, 1 / 3)
    more = "k3 v5 k5 v1 k1 end k1 end <eos>"  # goes on past the end: never full credit
    assert (score(more), score(more, partial=True)) == (0.0, 2 / 3)
    assert score("<eos>", partial=True) == 0.0
    no_stop = "k3 v5 k5 v1 k1 end"
    assert (score(no_stop), score(no_stop, partial=True)) == (0.0, 0.0)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "response",
    [
        np.zeros(0, np.int32),
        np.array([EOS]),
        np.full(100_000, 9),
        np.append(np.full(100_000, 9), EOS),
        np.array([-1, 10**9, 2**31 - 1, EOS]),
        np.array([2**62, -(2**62), EOS]),
        np.array([0.5, np.nan, EOS]),
        [],
    ],
)
def test_garbage_scores_zero_at_once(response, partial):
    task = PointerChase(partial_credit=partial)
    answer = task.prompt(0, 0).answer
    start = time.perf_counter()
    assert task.score(answer, response) == 0.0
    assert time.perf_counter() - start < 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-5, 200), max_size=60), st.booleans())
def test_any_response_has_a_score_in_range(tokens, partial):
    task = dataclasses.replace(TINY, partial_credit=partial)
    value = task.score(task.prompt(0, 1).answer, np.array(tokens, np.int32))
    assert 0 <= value <= 1


@settings(max_examples=40, deadline=None)
@given(tasks, st.integers(0, 10**6))
def test_clean_demonstrations_are_right_answers(task, seed):
    prompt, response, decisions = task.demonstration(np.random.default_rng(seed), 4, 8)
    truth, num_hops, num_facts = solve(task, prompt)
    assert np.array_equal(response, truth) and 4 <= num_facts <= 8
    assert decisions.sum() == num_hops and len(decisions) == len(response)
    words = [task.text(response[i]) for i in np.flatnonzero(decisions)]
    table_values = [
        task.text(truth[i * task.hop_tokens + 1 + task.arrow_tokens]) for i in range(num_hops)
    ]
    assert words == table_values and words[-1] == "end"


def test_noisy_demonstrations_have_that_many_wrong_look_ups():
    """noise 0.3: a look-up is wrong with 0.3 * (1 - 0.9 / 8) = 0.266 (a random symbol of the eight
    may be the right one; `end` likewise seldom). 300 demonstrations: 0.266 +- 0.02."""
    task = dataclasses.replace(TINY, min_entries=8, max_entries=8)
    rng, wrong, total = np.random.default_rng(0), 0, 0
    for _ in range(300):
        prompt, response, decisions = task.demonstration(rng, 8, 8, noise=0.3)
        words = task.text(prompt).split()
        table = dict(zip(words[2:-2:2], words[3:-2:2], strict=True))
        assert len(response) == decisions.sum() * task.hop_tokens + 1 and response[-1] == EOS
        said = task.text(response[:-1]).split()
        for i in range(0, len(said), 4):
            assert said[i : i + 2] == said[i + 2 : i + 4]  # a wrong hop is repeated as it is
            if i:  # the walk goes on from where it stands
                assert said[i] == "k" + said[i - 1][1:]
            wrong, total = wrong + (table[said[i]] != said[i + 1]), total + 1
    assert 0.22 < wrong / total < 0.31


def test_stated_before_marks_what_can_be_predicted():
    """Two copies of four facts: each value of the second copy, none of the first."""
    tokens = CLASSIC.prompt(0, 0).tokens
    mask = CLASSIC.stated_before(tokens)
    assert mask.nonzero()[0].tolist() == [2 + 16 + 2 + 4 * i for i in range(4)]
    twice = dataclasses.replace(TINY, fact_repeats=2)
    mask = twice.stated_before(twice.prompt(0, 0).tokens)
    assert mask.nonzero()[0].tolist() == [2 + 3 + 4 * i for i in range(4)]
    assert twice.prompt(0, 0).tokens[-2] == QUERY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_entries": 1}, "min_entries=1"),
        ({"min_entries": 9, "max_entries": 8}, "expected 2 <= min <= max"),
        ({"max_entries": 65}, "num_symbols=64"),
        ({"chain_low": 0.0}, "chain_low=0.0"),
        ({"chain_low": 0.95}, "expected 0 < low <= high"),
        ({"hop_repeats": 0}, "hop_repeats=0: expected at least 1"),
        ({"fact_fillers": -1}, "fact_fillers=-1"),
        ({"fact_copies": True}, "fact_copies=True: expected int"),
        ({"fact_copies": 1.0}, "fact_copies=1.0: expected int"),
        ({"partial_credit": 1}, "partial_credit=1: expected bool"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PointerChase(**options)


def test_unknown_words_and_demonstration_sizes_are_refused():
    for word in ("k8", "v8", "x1", "k-1", "kk", "k", "k" + "9" * 5000):
        with pytest.raises(UserError, match="expected a token of pointer_chase"):
            TINY.tokens(word)
    with pytest.raises(UserError, match="expected a token of pointer_chase"):
        CLASSIC.tokens("v1")  # shared values: there are no v tokens
    with pytest.raises(UserError, match="expected 2 <= min"):
        TINY.demonstration(np.random.default_rng(0), 4, 9)
