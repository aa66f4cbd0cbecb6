"""Log-probs, acceptance rates and samples in float64: by hand and by frequency."""

import numpy as np
import pytest
from scipy import stats

from common import oracles
from common.rollout import noise


def test_token_logprob_and_overlap_by_hand():
    # p = 1/2, 1/4, 1/4: entropy 1.5 log 2
    logits = np.log([[2.0, 1, 1], [2.0, 1, 1]]) + 7
    logp, entropy = oracles.token_logprob(logits, np.array([0, 2]))
    np.testing.assert_allclose(logp, np.log([0.5, 0.25]))
    np.testing.assert_allclose(entropy, 1.5 * np.log(2))
    # temperature 1/2 squares: 4 1 1 over 6
    np.testing.assert_allclose(oracles.token_logprob(logits, [0, 0], 0.5)[0], np.log(4 / 6))
    assert oracles.token_logprob(np.array([[0, -np.inf]]), [0])[1][0] == 0
    # min(.5, .25) + min(.25, .25) + min(.25, .5) = .75
    got = oracles.acceptance_overlap(logits[:1], np.log([[1.0, 1, 2]]))
    np.testing.assert_allclose(got, [0.75])
    # at temperature 1/2: 4/6 1/6 1/6 against 1/6 1/6 4/6: 3/6
    np.testing.assert_allclose(
        oracles.acceptance_overlap(logits[:1], np.log([[1.0, 1, 2]]), 0.5), [0.5]
    )


def test_topk_estimate_by_hand_and_as_a_lower_bound():
    # dense {1: .6, 2: .3}, sparse {2: .5, 3: .4}: only token 2 is in both: min(.3, .5)
    got = oracles.topk_estimate(
        np.log([[0.6, 0.3]]), np.array([[1, 2]]), np.log([[0.5, 0.4]]), np.array([[2, 3]])
    )
    np.testing.assert_allclose(got, [0.3])
    rng = np.random.default_rng(0)
    dense = rng.normal(0, 2, (30, 40))
    sparse = dense + rng.normal(0, 0.5, (30, 40))
    alpha = oracles.acceptance_overlap(dense, sparse)
    logp_dense, logp_sparse = oracles.log_softmax(dense), oracles.log_softmax(sparse)
    previous = np.zeros(30)
    for top in (1, 5, 20, 40):
        ids_d, ids_s = (np.argsort(-x, axis=1)[:, :top] for x in (dense, sparse))
        got = oracles.topk_estimate(
            np.take_along_axis(logp_dense, ids_d, 1),
            ids_d,
            np.take_along_axis(logp_sparse, ids_s, 1),
            ids_s,
        )
        assert (previous <= got + 1e-12).all() and (got <= alpha + 1e-12).all()
        previous = got
    np.testing.assert_allclose(got, alpha, rtol=1e-12)  # all tokens listed: exact


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_gumbel_max_frequencies_match_softmax(temperature):
    logits = np.array([1.0, 0.0, -1.0, 2.0, -3.0], np.float32)
    rows = 40_000
    bits = noise.token_bits(
        noise.row_key(5, np.arange(rows), np.arange(rows) % 8), 33, np.arange(5)
    )
    ids = oracles.gumbel_argmax(np.broadcast_to(logits, (rows, 5)), bits, temperature)
    p = np.exp(logits.astype(np.float64) / temperature)
    expected = p / p.sum() * rows
    assert stats.chisquare(np.bincount(ids, minlength=5), expected).pvalue > 1e-3
    with pytest.raises(ValueError, match="temperature"):
        oracles.gumbel_argmax(logits, bits, 0.0)
