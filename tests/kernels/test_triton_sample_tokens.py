"""The fused draw: noise bit-equal to common.rollout.noise, tokens equal to the plain sampler's."""

import functools

import numpy as np
import pytest
import torch

from common.rollout import noise
from sparrow_torch import sampling

triton = pytest.importorskip("triton", reason="there is no triton for this machine")
import triton.language as tl  # noqa: E402

from kernels_triton import sample_tokens as module  # noqa: E402
from kernels_triton.tuning import SampleTuning, tune_sample  # noqa: E402

SMALL = SampleTuning(block=128, parts=2, num_warps=1)
WORDS = 0, 1, 2**31 - 1, 2**31, 2**32 - 1
POSITIONS = 0, 1, 2**15, 2**20, 2**31 - 1


def rows(num=5):
    """Keys with words at both ends of their range, positions up to the largest int32."""
    words = torch.tensor(WORDS[:num])
    return (words, words.flip(0)), torch.tensor(POSITIONS[:num], dtype=torch.int32)


@triton.jit
def _write(key0_ptr, key1_ptr, position_ptr, words_ptr, u_ptr, start, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    key0 = tl.load(key0_ptr + b).to(tl.uint32)
    key1 = tl.load(key1_ptr + b).to(tl.uint32)
    position = tl.load(position_ptr + b).to(tl.uint32)
    words = module._words(key0, key1, position, start, BLOCK)
    at = b * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + at, words.to(tl.int64))
    tl.store(u_ptr + at, module._uniform(words))


@pytest.mark.parametrize("start", [0, 151_872])
def test_noise_is_bit_equal(start):
    key, position = rows()
    words, u = torch.zeros((5, 64), dtype=torch.int64), torch.zeros(5, 64)
    _write[(5,)](*key, position, words, u, start, BLOCK=64)
    in_numpy = [x.numpy().astype(np.uint32) for x in (*key, position)]
    want = noise.token_bits(
        tuple(in_numpy[:2]), in_numpy[2], np.arange(start, start + 64, dtype=np.uint32)
    )
    np.testing.assert_array_equal(words.numpy(), want.astype(np.int64))
    np.testing.assert_array_equal(u.numpy(), noise.uniform(want))


def logits(V, num=5):
    made = np.random.default_rng(V).normal(size=(num, V)).astype(np.float32) * 2
    return torch.from_numpy(made)


def gap(x, key, position, temperature):
    """The smallest distance between the best two scores of a row."""
    if x.shape[1] == 1:
        return np.inf
    score = x / (temperature or 1.0)
    if temperature:
        words = noise.token_bits(key, position.long(), torch.arange(x.shape[1]))
        score = score - torch.log(-torch.log(noise.uniform(words)))
    best = score.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def check(draw, V, temperature, top_p=1.0):
    """Tokens and log-probs of both, on rows in which rounding cannot swap the best two scores."""
    key, position = rows(3)
    x = logits(V, 3)
    want, want_logp = sampling.sample(x, key, position, temperature, top_p)
    assert gap(x, key, position, temperature) > 1e-4
    token, logp = draw(x, key, position, temperature)
    assert token.dtype == torch.int64
    np.testing.assert_array_equal(token.numpy(), want.numpy())
    np.testing.assert_allclose(logp.numpy(), want_logp.numpy(), atol=2e-6, rtol=1e-6)


small = functools.partial(module.sample_tokens, tuning=SMALL)


@pytest.mark.parametrize(("V", "temperature"), [(1, 1.0), (33, 0.6), (301, 1.0), (301, 0.0)])
def test_tokens_are_those_of_the_plain_sampler(V, temperature):
    """301 entries: three blocks of 128 in parts of two and one, the last block not full."""
    check(small, V, temperature)


def test_top_p():
    def draw(x, key, position, temperature):
        return sampling.fused_sample(x, key, position, temperature, 0.7)

    check(draw, 301, 0.8, 0.7)


def test_equal_logits_take_the_lowest_token():
    key, position = rows(2)
    x = torch.full((2, 300), -1.0)  # two blocks of 128 in one part, the third in another
    x[0, [40, 70, 170, 299]], x[1, [5, 137]] = 2.0, 3.0
    token, logp = small(x, key, position, 0.0)
    assert token.tolist() == [40, 5]
    # log of e^2 / (4 e^2 + 296 e^-1), and of e^3 / (2 e^3 + 298 e^-1)
    np.testing.assert_allclose(
        logp.numpy(), [-np.log(4 + 296 * np.exp(-3)), -np.log(2 + 298 * np.exp(-4))], rtol=1e-6
    )


def test_rows_of_any_stride_and_dropped_tokens():
    key, position = rows(3)
    wide = torch.full((3, 400), torch.nan)
    wide[:, :301] = logits(301, 3)
    wide[:, :256] = -torch.inf  # a part of two blocks
    want = sampling.sample(wide[:, :301].clone(), key, position, 1.0, 1.0)
    got = small(wide[:, :301], key, position, 1.0)
    np.testing.assert_array_equal(got[0].numpy(), want[0].numpy())
    np.testing.assert_allclose(got[1].numpy(), want[1].numpy(), atol=2e-6)


def test_nan_is_passed_on():
    """Token ids stay in range, so that nothing is read past the embedding."""
    key, position = rows(2)
    x = logits(100, 2)
    x[0, 50] = torch.nan
    token, logp = small(x, key, position, 1.0)
    assert ((token >= 0) & (token < 100)).all()
    assert logp.isnan().tolist() == [True, False]


def test_what_does_not_belong_together_is_refused():
    key, position = rows()
    with pytest.raises(ValueError, match="expected 4 each, as many as rows"):
        small(logits(33, 4), key, position, 1.0)
    with pytest.raises(ValueError, match="expected rows of stride 1"):
        small(logits(5).T, key, position, 1.0)


def other_lane(key0, key1, position, start, BLOCK, right):
    return right(key0, key1, position, start + 2, BLOCK)


def last_of_equals(high, top):
    return high >= top


@pytest.mark.parametrize(("place", "fault", "message"), [
    ("_words", functools.partial(other_lane, right=module._words), "not equal"),
    ("_better", last_of_equals, "40"),
])  # fmt: skip
def test_planted_faults_are_rejected(place, fault, message, monkeypatch):
    monkeypatch.setattr(module, place, fault)
    with pytest.raises(AssertionError, match=message):
        if place == "_words":
            check(small, 301, 1.0)
        test_equal_logits_take_the_lowest_token()


@pytest.mark.parametrize(("rows", "V", "parts"), [(64, 151_936, 17), (1, 151_936, 64), (9, 48, 1)])
def test_parts_fill_the_card(rows, V, parts):
    """8 x 132 processors / 64 rows = 16.5; one row: not more than 64; 48 entries: one block."""
    assert tune_sample(rows, V).parts == parts
