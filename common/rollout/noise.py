"""Portable sampling noise: the same bits in numpy, JAX (inside jit) and torch.

The noise of one vocabulary entry is a pure function of (seed, prompt_id, sample, position, v), so a
sampled token depends neither on batch composition nor on the slot a sequence sits in.

    key(row)          = threefry2x32(key=(seed low, seed high), counter=(prompt_id, sample))
    word(row, t, v)   = threefry2x32(key=key(row), counter=(t, v // 2))[v % 2]
    u                 = ((word >> 9) + 0.5) * 2**-23           in (0, 1), exact in float32
    token at t        = argmax_v logits_v / T - log(-log(u_v))   (Gumbel-max; first of equals)

threefry2x32 is Threefry-2x32 with 20 rounds (Salmon et al., SC 2011, "Random123"). The functions
below use operators, slices and reshape only, and every sum is masked to 32 bits. They take

    numpy uint32 arrays, jnp uint32 arrays (also traced), torch int64 tensors (values < 2**32),

one kind per call; the result is of the same kind. Words, and u, are bit-equal in all three;
the two logarithms of the Gumbel noise are the library's own and may differ in the last bit.
Numpy integers of any width and Python ints are accepted for scalars and are taken as 32-bit words.

Example, in a decode step (jnp alike; `arange_V` is made once):

    key = row_key(seed, prompt_id_B, sample_B)             # two words per row, on the host
    bits_BV = token_bits(key, position_B, arange_V)        # position of the token to be sampled
    ids_B = argmax(logits_BV / T - log(-log(uniform(bits_BV))))
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = Any
"""An array of 32-bit words: numpy uint32, jnp uint32, or torch int64 below 2**32."""

_MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _word(x: Words) -> Words:
    """One input as a word: numpy integers of any width become uint32, scalars Python ints."""
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        return int(x) & _MASK
    if isinstance(x, np.ndarray) and x.dtype != np.uint32:
        if x.dtype.kind not in "iu":
            raise ValueError(f"{x.dtype=}: expected an integer array of 32-bit words")
        return x.astype(np.uint32)
    return x


def _words(*values: Words) -> list[Words]:
    """Bring all values to one kind: Python ints beside uint32 arrays become np.uint32."""
    words = [_word(x) for x in values]
    if any(str(getattr(x, "dtype", "")) == "uint32" for x in words):
        return [np.uint32(x) if isinstance(x, int) else x for x in words]
    return words


def _rounds(k0: Words, k1: Words, x0: Words, x1: Words, mask: Words) -> tuple[Words, Words]:
    """The 20 rounds of Threefry on words of one kind."""
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0 = (x0 + k0) & mask
    x1 = (x1 + k1) & mask
    for block in range(5):
        for r in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & mask
            x1 = (((x1 << r) & mask) | (x1 >> (32 - r))) ^ x0
        x0 = (x0 + schedule[(block + 1) % 3]) & mask
        x1 = (((x1 + schedule[(block + 2) % 3]) & mask) + (block + 1)) & mask
    return x0, x1


def threefry2x32(key: tuple[Words, Words], counter: tuple[Words, Words]) -> tuple[Words, Words]:
    """Threefry-2x32-20: two words out for two key words and two counter words, elementwise.

    The four inputs broadcast against each other.
    """
    words = _words(*key, *counter, _MASK)
    if not any(isinstance(x, np.generic) for x in words):
        return _rounds(*words)
    with np.errstate(over="ignore"):  # scalars of numpy warn where arrays wrap around
        return _rounds(*words)


def seed_words(seed: int) -> tuple[int, int]:
    """(low, high) 32-bit words of a seed. Raises ValueError unless 0 <= seed < 2**64."""
    if not 0 <= int(seed) < 1 << 64:
        raise ValueError(f"{seed=}: expected 0 <= seed < 2**64; use another seed")
    return int(seed) & _MASK, int(seed) >> 32


def row_key(seed: int, prompt_id: Words, sample: Words) -> tuple[Words, Words]:
    """Key of one response, or of many at once: threefry2x32(seed, (prompt_id, sample)).

    seed: Python int, 64 bit. prompt_id, sample: words of one shape [...]. Returns two words of that
    shape.
    """
    return threefry2x32(seed_words(seed), (prompt_id, sample))


def token_bits(key: tuple[Words, Words], position: Words, arange_V: Words) -> Words:
    """Noise words of every vocabulary entry for the token at `position`: [...] -> [..., V].

    key: two words [...] from row_key. position: words [...] (or one scalar), the index of the token
    that is being sampled. arange_V: 0 .. V-1 as words of the same kind; V may be odd. A slice of
    the vocabulary works too if it starts at an even entry: the words do not depend on V.
    """
    key_and_position = (_word(key[0]), _word(key[1]), _word(position))
    k0, k1, t = (x if isinstance(x, int) else x[..., None] for x in key_and_position)
    arange_V = _word(arange_V)
    x0, x1 = threefry2x32((k0, k1), (t, arange_V[::2] >> 1))
    lane = arange_V[:2] & 1
    both = x0[..., None] * (1 - lane) + x1[..., None] * lane
    flat = both.reshape((*both.shape[:-2], both.shape[-2] * both.shape[-1]))
    return flat[..., : arange_V.shape[0]]


def uniform(bits: Words) -> Any:
    """float32 in (0, 1): u = ((bits >> 9) + 0.5) * 2**-23, every step exact in 24 bits."""
    numpy_kinds = (np.ndarray, np.generic, float)  # torch.compile takes no union of types
    u = (_word(bits) >> 9) * 2.0**-23 + 2.0**-24
    return np.asarray(u, np.float32) if isinstance(u, numpy_kinds) else u


def fold_in(seed: int, *numbers: int) -> int:
    """A new 64-bit seed from a seed and integers, e.g. `fold_in(seed, step)`.

    Folding is not commutative, and fold_in(s, a, b) == fold_in(fold_in(s, a), b).
    Raises ValueError for numbers outside 0 .. 2**64 - 1.
    """
    for number in numbers:
        low, high = threefry2x32(seed_words(seed), seed_words(number))
        seed = int(low) | int(high) << 32
    return int(seed)


def position_uniform(
    seed: int, prompt_id_B: np.ndarray, sample_B: np.ndarray, num_positions: int
) -> np.ndarray:
    """float32 [B, T], one number in (0, 1) for each position of each row.

    For decisions other than sampling (budgeted rejection): use a seed of its own,
    e.g. fold_in(seed, step, 1).
    """
    key = row_key(seed, np.asarray(prompt_id_B), np.asarray(sample_B))
    bits_BT = token_bits(key, 0, np.arange(num_positions, dtype=np.uint32))
    return uniform(bits_BT)
