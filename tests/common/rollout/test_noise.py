"""Sampling noise: known answers, the same bits in numpy and JAX, uniformity, Gumbel-max."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32
from scipy import stats

from common.rollout import noise

# Random123's kat_vectors, "threefry2x32 20": counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_threefry_known_answers(counter, key, expected):
    assert noise.threefry2x32(key, counter) == expected  # Python ints
    as_arrays = noise.threefry2x32(
        tuple(np.full(3, k, np.uint32) for k in key),
        tuple(np.full(3, c, np.uint32) for c in counter),
    )
    for got, want in zip(as_arrays, expected, strict=True):
        assert got.dtype == np.uint32
        np.testing.assert_array_equal(got, np.full(3, want, np.uint32))


def test_threefry_equals_jax_prng():
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    count = rng.integers(0, 2**32, 64, dtype=np.uint32)  # jax pairs the first with the second half
    want = threefry_2x32(jnp.asarray(key), jnp.asarray(count))
    got = noise.threefry2x32((key[:1], key[1:]), (count[:32], count[32:]))
    np.testing.assert_array_equal(np.concatenate(got), np.asarray(want))


@pytest.mark.parametrize("vocab", [1, 2, 7, 128])
def test_bits_and_uniform_are_bit_equal_in_numpy_and_jitted_jax(vocab):
    rng = np.random.default_rng(1)
    prompt_id = rng.integers(0, 2**31, 5, dtype=np.int32)
    sample = np.arange(5, dtype=np.int32)
    position = rng.integers(0, 40_000, 5, dtype=np.int32)
    key = noise.row_key(2**63 + 12345, prompt_id, sample)
    bits = noise.token_bits(key, position, np.arange(vocab, dtype=np.uint32))

    @jax.jit
    def in_jax(k0, k1, position):
        bits = noise.token_bits((k0, k1), position, jnp.arange(vocab, dtype=jnp.uint32))
        return bits, noise.uniform(bits)

    jax_key = noise.row_key(
        2**63 + 12345, jnp.asarray(prompt_id, jnp.uint32), jnp.asarray(sample, jnp.uint32)
    )
    jax_bits, jax_u = in_jax(*jax_key, jnp.asarray(position, jnp.uint32))
    assert bits.dtype == np.uint32 and jax_bits.dtype == jnp.uint32 and jax_u.dtype == jnp.float32
    np.testing.assert_array_equal(bits, np.asarray(jax_bits))
    np.testing.assert_array_equal(noise.uniform(bits), np.asarray(jax_u))


def test_int64_arithmetic_as_torch_does_it_gives_the_same_words():
    """torch has no uint32 arithmetic: the functions must keep int64 values below 2**32."""

    class Int64:  # the operators of a torch int64 tensor, not recognised as a numpy array
        def __init__(self, x):
            self.x = np.asarray(x, np.int64)
            self.shape = self.x.shape

        def reshape(self, shape):
            return Int64(self.x.reshape(shape))

        def __getitem__(self, i):
            return Int64(self.x[i])

    def operator(name):
        def apply(self, other):
            return Int64(getattr(self.x, name)(other.x if isinstance(other, Int64) else other))

        return apply

    for name in "add radd sub rsub mul and or xor rxor lshift rshift".split():
        setattr(Int64, f"__{name}__", operator(f"__{name}__"))

    prompt_id, sample, position = np.array([3, 2**31 - 1]), np.array([0, 7]), np.array([5, 99])
    want = noise.token_bits(noise.row_key(2**64 - 1, prompt_id, sample), position, np.arange(9))
    key = noise.row_key(2**64 - 1, Int64(prompt_id), Int64(sample))
    got = noise.token_bits(key, Int64(position), Int64(np.arange(9)))
    np.testing.assert_array_equal(got.x, want.astype(np.int64))


def test_words_follow_the_documented_layout():
    key = noise.row_key(11, np.array([4]), np.array([2]))
    bits = noise.token_bits(key, np.array([17]), np.arange(5))
    for v in range(5):
        pair = noise.threefry2x32((int(key[0][0]), int(key[1][0])), (17, v // 2))
        assert int(bits[0, v]) == pair[v % 2]


def test_noise_does_not_depend_on_the_batch_or_on_the_vocabulary_size():
    prompt_id, sample, position = (
        np.array([9, 1, 9, 4]),
        np.array([0, 0, 1, 3]),
        np.array([5, 6, 5, 0]),
    )
    full = noise.token_bits(noise.row_key(1, prompt_id, sample), position, np.arange(11))
    for row in range(4):
        key = noise.row_key(1, prompt_id[row : row + 1], sample[row : row + 1])
        alone = noise.token_bits(key, position[row : row + 1], np.arange(11))
        np.testing.assert_array_equal(full[row], alone[0])
        np.testing.assert_array_equal(
            full[row, 4:9], noise.token_bits(key, position[row : row + 1], np.arange(4, 9))[0]
        )
    assert len({tuple(row) for row in full}) == 4  # another prompt, sample or position: other noise


def test_scalars_give_the_same_words_as_arrays():
    scalar = noise.token_bits(noise.row_key(3, 5, np.int32(6)), 7, np.arange(6))
    array = noise.token_bits(
        noise.row_key(3, np.array([5]), np.array([6])), np.array([7]), np.arange(6)
    )
    np.testing.assert_array_equal(scalar, array[0])


def test_uniform_is_exact_and_never_0_or_1():
    bits = np.array([0, 511, 512, 2**32 - 1], np.uint32)
    # (0 + .5) 2^-23 = 2^-24;  511 >> 9 = 0;  (1 + .5) 2^-23 = 3 * 2^-24;
    # (2^23 - .5) 2^-23 = 1 - 2^-24
    want = np.array([2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24])
    u = noise.uniform(bits)
    assert u.dtype == np.float32
    np.testing.assert_array_equal(u.astype(np.float64), want)


def test_uniform_passes_chi_square_over_positions_and_over_the_vocabulary():
    key = noise.row_key(2024, np.array([0, 1]), np.array([0, 0]))
    over_vocab = noise.uniform(noise.token_bits(key, np.array([3, 3]), np.arange(50_001)))
    over_rows = noise.uniform(
        noise.token_bits(
            noise.row_key(7, np.arange(20_000), np.arange(20_000) % 8), 2, np.arange(3)
        )
    )
    for u in (over_vocab[0], over_vocab[1], over_rows[:, 0], over_rows[:, 2]):
        counts, _ = np.histogram(u, bins=64, range=(0, 1))
        assert stats.chisquare(counts).pvalue > 1e-3
    assert abs(np.corrcoef(over_vocab[0], over_vocab[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(over_rows[:, 0], over_rows[:, 1])[0, 1]) < 0.03  # two words of one pair


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_fold_in_nests_and_separates(seed, a, b):
    assert 0 <= noise.fold_in(seed, a) < 2**64
    assert noise.fold_in(seed, a, b) == noise.fold_in(noise.fold_in(seed, a), b)
    assert noise.fold_in(seed) == seed
    if a != b:
        assert noise.fold_in(seed, a) != noise.fold_in(seed, b)
        assert noise.fold_in(seed, a, b) != noise.fold_in(seed, b, a)


def test_seed_out_of_range_and_float_words_are_refused():
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            noise.row_key(bad, np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="integer"):
        noise.row_key(0, np.array([0.5]), np.array([0]))


def test_position_uniform_is_per_row_and_position():
    u = noise.position_uniform(3, np.array([1, 1, 2]), np.array([0, 1, 0]), 9)
    assert u.shape == (3, 9) and len(np.unique(u)) == 27
    longer = noise.position_uniform(3, np.array([2]), np.array([0]), 20)
    np.testing.assert_array_equal(longer[0, :9], u[2])
