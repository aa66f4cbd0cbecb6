"""Random projections that are the same on every machine: two numbers in place of a long vector.

A vector x of n numbers becomes x . s_j / sqrt(n), j = 1, 2, with random signs s_j; the result is
about as large as the rms of x. The signs come from the counter-based noise of
common/rollout/noise.py, so that two machines need not exchange them.
"""

from __future__ import annotations

import functools

import numpy as np

from common.rollout import noise

NUM_DIRECTIONS = 2
_SEED = 0x5EED


@functools.cache
def directions(width: int, stream: int = 0) -> np.ndarray:
    """float32 [width, 2]: random signs / sqrt(width)."""
    j = np.arange(NUM_DIRECTIONS, dtype=np.uint32)
    key = noise.row_key(_SEED, j, np.full_like(j, stream))
    bits = noise.token_bits(key, 0, np.arange(width + width % 2, dtype=np.uint32))[:, :width]
    return (np.where(bits >> 31, 1, -1) / np.sqrt(width)).T.astype(np.float32)


def of_parameter(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Norm [L] and two projections [L, 2] of each layer of a parameter [L, ...], in float64.

    Random signs multiply the last axis, others the flattened axes between, and everything is
    summed: so the number of signs is the sum, not the product, of the two lengths. A projection is
    about as large as the norm.
    """
    x = np.asarray(x, np.float32).reshape(len(x), -1, x.shape[-1])
    along = np.float64(x @ directions(x.shape[2]))  # [L, n, 2]
    sketch = np.einsum("lrj,rj->lj", along, np.float64(directions(x.shape[1], stream=1)))
    norm = np.sqrt(np.einsum("lrc,lrc->l", x, x, dtype=np.float64))
    return norm, sketch * np.sqrt(x.shape[1] * x.shape[2])
