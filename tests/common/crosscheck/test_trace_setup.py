"""--force_tokens: a trace whose arrays are no such tokens is refused before it is unpacked."""

import random
import tracemalloc

import numpy as np
import pytest

from common.crosscheck import trace_setup
from common.crosscheck.trace_file import TraceWriter
from common.errors import UserError
from common.types import Prompt
from tests.common.made_up_traces import META

NEW, VOCAB = 3, 9
PROMPTS = [
    Prompt(prompt_id=i, tokens=np.array(row, np.int32), task="trace", answer={})
    for i, row in enumerate(([1, 2, 3, 4], [5, 6]))
]


def sound():
    """Two prompts of 4 and 2 tokens, two samples of each, at most 3 new tokens: 4 x 7."""
    tokens = np.zeros((4, 7), np.int32)
    for row, prompt in zip(tokens, [p for p in PROMPTS for _ in range(2)], strict=True):
        row[: len(prompt.tokens)] = prompt.tokens
    return {
        "tokens": tokens, "logp": np.full((4, 7), -0.5, np.float32),
        "prompt_len": np.array([4, 4, 2, 2], np.int32),
        "total_len": np.array([7, 5, 5, 3], np.int32),
    }  # fmt: skip


def forced(path, arrays):
    with TraceWriter(path) as file:
        file.put_all("tokens", arrays)
        file.finish(META)
    return trace_setup.forced_tokens(path, META, PROMPTS, NEW, VOCAB)


def test_sound_tokens_come_back(tmp_path):
    found = forced(tmp_path / "a.npz", sound())
    for name, array in sound().items():
        assert found[name].dtype == array.dtype and (found[name] == array).all()
    assert trace_setup.forced_tokens(None, META, PROMPTS, NEW, VOCAB) is None


@pytest.mark.parametrize("name, at, value, words", [
    ("tokens", (0, 6), 9, "token ids outside of 0 to 8"),
    ("tokens", (0, 6), -1, "token ids outside of 0 to 8"),
    ("tokens", (2, 0), 6, "tokens of other prompts"),
    ("total_len", 1, 4, "total_len outside of 1 to 3"),
    ("total_len", 3, 6, "total_len outside of 1 to 3"),
    ("prompt_len", 2, 3, "prompt_len of other prompts"),
    ("logp", (0, 0), np.nan, "logp that are no log-probs"),
    ("logp", (0, 0), 0.5, "logp that are no log-probs"),
])  # fmt: skip
def test_what_is_no_token_of_these_prompts_is_named(tmp_path, name, at, value, words):
    arrays = sound()
    arrays[name][at] = value
    with pytest.raises(UserError, match=f"--force_tokens=.*: has {words}.*; record it anew"):
        forced(tmp_path / "a.npz", arrays)


def test_random_arrays_end_in_one_line(tmp_path):
    rng, names = random.Random(4), tuple(sound())
    odd = (
        np.zeros(0), np.zeros((4, 7)), np.float64(3), np.full((4, 7), "x"), np.zeros((4, 7), bool),
        np.full(4, 2**62), np.full(4, -1.5), np.full((4, 7), np.inf), np.zeros((7, 4), np.int32),
        np.full((4, 7), 2**63, np.uint64), np.zeros((4, 7), np.complex64), np.zeros((4, 8)),
    )  # fmt: skip
    for _ in range(60):
        arrays = sound() | {name: rng.choice(odd) for name in rng.sample(names, 2)}
        for name in rng.sample(names, rng.choice((0, 0, 1))):
            del arrays[name]
        with pytest.raises(UserError) as error:
            forced(tmp_path / "a.npz", arrays)
        assert "\n" not in str(error.value)


def test_a_small_file_of_huge_tokens_is_not_unpacked(tmp_path):
    """64 MiB of zeros in 65 kB: the refusal allocates less than 8 MiB."""
    arrays = sound() | {"tokens": np.zeros(2**24, np.int32)}
    with TraceWriter(tmp_path / "a.npz") as file:
        file.put_all("tokens", arrays)
        file.finish(META)
    assert (tmp_path / "a.npz").stat().st_size < 2**17
    del arrays
    tracemalloc.start()
    with pytest.raises(UserError, match=r"tokens of shape \(16777216,\), not \(4, 7\)"):
        trace_setup.forced_tokens(tmp_path / "a.npz", META, PROMPTS, NEW, VOCAB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
