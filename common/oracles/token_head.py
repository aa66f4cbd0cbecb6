"""Log-probs, entropy, acceptance rates and samples from the logits of both policies, in float64."""

from __future__ import annotations

import numpy as np

from common.rollout.noise import uniform


def log_softmax(logits_NV: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log softmax(logits / temperature) over the last axis."""
    x = np.float64(logits_NV) / temperature
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def token_logprob(
    logits_NV: np.ndarray, ids_X: np.ndarray, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(log-prob of ids[i] under row i, entropy of row i in nats); rows and ids are aligned."""
    logp_NV = log_softmax(logits_NV, temperature)
    p_NV = np.exp(logp_NV)
    entropy_X = -(p_NV * np.where(p_NV > 0, logp_NV, 0.0)).sum(axis=-1)
    return np.take_along_axis(logp_NV, np.asarray(ids_X)[:, None], axis=-1)[:, 0], entropy_X


def acceptance_overlap(
    logits_dense_NV: np.ndarray, logits_sparse_NV: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """alpha [X] = sum_v min(p_dense(v), p_sparse(v)) = 1 - total variation (paper, section 3)."""
    p = np.exp(log_softmax(logits_dense_NV, temperature))
    q = np.exp(log_softmax(logits_sparse_NV, temperature))
    return np.minimum(p, q).sum(axis=-1)


def topk_estimate(
    logp_dense_NJ: np.ndarray,
    ids_dense_NJ: np.ndarray,
    logp_sparse_NJ: np.ndarray,
    ids_sparse_NJ: np.ndarray,
) -> np.ndarray:
    """Lower bound of alpha [X] from the top log-probs of both sides (20 in the paper).

        sum over v in both lists of min(p_dense(v), p_sparse(v)) <= alpha

    For engines that return no more than top-k log-probs. Ids of one row must be distinct.
    """
    same_NJJ = np.asarray(ids_dense_NJ)[:, :, None] == np.asarray(ids_sparse_NJ)[:, None, :]
    smaller_NJJ = np.exp(
        np.minimum(
            np.asarray(logp_dense_NJ, np.float64)[:, :, None],
            np.asarray(logp_sparse_NJ, np.float64)[:, None, :],
        )
    )
    return np.where(same_NJJ, smaller_NJJ, 0.0).sum(axis=(1, 2))


def gumbel_argmax(logits_BV: np.ndarray, bits_BV: np.ndarray, temperature: float) -> np.ndarray:
    """Sample ids [B] from softmax(logits / temperature), in numpy (the sampler's reference)."""
    if temperature <= 0:
        raise ValueError(
            f"{temperature=}: expected > 0; for greedy decoding take argmax of the logits"
        )
    u_BV = uniform(bits_BV)
    score_BV = np.asarray(logits_BV, np.float32) / np.float32(temperature) - np.log(-np.log(u_BV))
    return np.argmax(score_BV, axis=-1).astype(np.int32)
