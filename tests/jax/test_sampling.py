"""The sampler: frequencies, top-p, greedy, log-probs; noise of key and position only."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from common import oracles
from common.rollout import noise
from sparrow_jax.sampling import sample

LOGITS = np.float32([1.5, -0.5, 0.0, 2.0, -3.0, 0.7, 0.7])
jitted = jax.jit(sample, static_argnames=("greedy", "nucleus"))


def draw(logits, rows=20_000, temperature=1.0, top_p=1.0, position=5, seed=0, greedy=False):
    """Tokens and log-probs of many samples of one prompt at one position (or at given ones)."""
    key = noise.row_key(seed, np.full(rows, 3, np.uint32), np.arange(rows, dtype=np.uint32))
    position = np.broadcast_to(np.int32(position), rows)
    logits = np.broadcast_to(logits, (rows, logits.shape[-1]))
    out = jitted(logits, key, position, temperature, top_p, greedy=greedy, nucleus=top_p < 1)
    return tuple(map(np.asarray, out))


def p_value(tokens, probabilities):
    kept = probabilities > 0
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[~kept].sum() == 0
    return stats.chisquare(counts[kept], probabilities[kept] * len(tokens)).pvalue


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_and_log_probs_match_softmax(temperature):
    tokens, logp = draw(LOGITS, temperature=temperature)
    want = oracles.log_softmax(LOGITS, temperature)
    assert p_value(tokens, np.exp(want)) > 0.001
    np.testing.assert_allclose(logp, want[tokens], atol=1e-5)
    # the same tokens are rejected as samples of another temperature: the test has power
    assert p_value(tokens, np.exp(oracles.log_softmax(LOGITS, temperature * 1.15))) < 1e-6


def test_positions_are_independent_draws():
    tokens, _ = draw(LOGITS, rows=20_000, position=np.arange(20_000))
    assert p_value(tokens, np.exp(oracles.log_softmax(LOGITS))) > 0.001
    first, second = draw(LOGITS, position=5)[0], draw(LOGITS, position=6)[0]
    p = np.exp(oracles.log_softmax(LOGITS))
    assert p_value(first * 7 + second, np.outer(p, p).ravel()) > 0.001


# p = .4 .3 .2 .1 in another order: top-p 0.6 keeps .4 .3; 0.71 keeps .4 .3 .2; 0.05 keeps .4
@pytest.mark.parametrize(("top_p", "kept"), [
    (0.05, [2]), (0.39, [2]), (0.6, [2, 0]), (0.69, [2, 0]), (0.71, [2, 0, 3]),
    (0.95, [2, 0, 3, 1]),
])  # fmt: skip
def test_top_p_keeps_the_smallest_set_and_renormalises(top_p, kept):
    p = np.array([0.3, 0.1, 0.4, 0.2])
    tokens, logp = draw(np.float32(np.log(p)), rows=4000, top_p=top_p)
    assert set(tokens) == set(kept)
    want = np.zeros(4)
    want[kept] = p[kept] / p[kept].sum()
    np.testing.assert_allclose(np.exp(logp), want[tokens], rtol=1e-5)
    assert sum(np.exp(logp[tokens == v][0]) for v in kept) == pytest.approx(1, abs=1e-5)
    if len(kept) > 1:
        assert p_value(tokens, want) > 0.001


def test_top_p_is_taken_after_temperature_and_equals_go_to_the_lower_id():
    # softmax(log p / 0.5) of .4 .3 .2 .1 = .16 .09 .04 .01 / .30 = .53 .3 .13 .03: 0.8 keeps two
    logits = np.float32(np.log([0.4, 0.3, 0.2, 0.1]))
    assert set(draw(logits, rows=2000, temperature=0.5, top_p=0.8)[0]) == {0, 1}
    assert set(draw(logits, rows=2000, top_p=0.8)[0]) == {0, 1, 2}
    assert set(draw(np.zeros(4, np.float32), rows=2000, top_p=0.5)[0]) == {0, 1}


def test_greedy_takes_the_argmax_with_the_log_prob_at_temperature_one():
    tokens, logp = draw(LOGITS, rows=50, temperature=0.3, greedy=True)
    assert (tokens == 3).all()
    np.testing.assert_allclose(logp, oracles.log_softmax(LOGITS)[3], atol=1e-6)


def test_token_does_not_depend_on_the_rows_around_it():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 33)).astype(np.float32)
    key = noise.row_key(9, np.arange(6, dtype=np.uint32), np.ones(6, np.uint32))
    run = functools.partial(jitted, greedy=False, nucleus=False)
    together, logp = run(logits, key, np.arange(6, dtype=np.int32), 1.0, 1.0)
    order = np.array([4, 1, 5, 0])
    some, some_logp = run(
        logits[order], tuple(k[order] for k in key), order.astype(np.int32), 1.0, 1.0
    )
    np.testing.assert_array_equal(some, together[order])
    np.testing.assert_allclose(some_logp, logp[order], atol=1e-6)
    bits = noise.token_bits(key, np.arange(6, dtype=np.uint32), np.arange(33, dtype=np.uint32))
    np.testing.assert_array_equal(together, oracles.gumbel_argmax(logits, bits, 1.0))
