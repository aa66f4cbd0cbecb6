"""flash_prefill of both packages, interpreted: output, every element of the gradients."""

import numpy as np
import pytest

from kernels_pallas.tuning import PrefillTuning
from kernels_triton import tuning as triton
from tests.kernels import ladder
from tests.kernels.packages import BOTH, EAGER, PALLAS, TRITON


def blocks(package, queries, keys):
    if package is TRITON:
        return triton.PrefillTuning(*[triton.PrefillBlocks(queries, keys, 1, 1)] * 4)
    return PrefillTuning(queries, keys)


def kernel(package, queries=16, keys=32):
    return package.kernel("flash_prefill", tuning=blocks(package, queries, keys))


def kinds(sparse, num_tokens=39, rows=1):
    return ladder.replay(num_tokens, rows) if sparse else (None, None)


@pytest.mark.parametrize(("package", "ratio", "head_dim", "rows", "kv_heads", "size", "sparse"), [
    (PALLAS, 1, 64, 2, 1, (16, 32), True), (EAGER, 2, 128, 2, 1, (16, 32), True),
    (EAGER, 4, 64, 1, 2, (16, 32), True), (PALLAS, 8, 128, 1, 2, (16, 32), True),
    (PALLAS, 2, 64, 2, 1, (16, 32), False), (EAGER, 4, 128, 1, 2, (16, 32), False),
    (TRITON, 1, 32, 2, 1, (16, 32), True), (TRITON, 2, 128, 1, 1, (32, 16), True),
    (TRITON, 5, 16, 1, 1, (32, 32), True), (TRITON, 8, 64, 1, 1, (32, 64), True),
    (TRITON, 2, 64, 1, 1, (16, 16), False),
])  # fmt: skip
def test_output_and_gradients(package, ratio, head_dim, rows, kv_heads, size, sparse):
    args = ladder.prefill_inputs(
        ratio, head_dim=head_dim, num_tokens=39, rows=rows, kv_heads=kv_heads
    )
    check_gradients(package, args, kinds(sparse, rows=rows), size)


def check_gradients(package, args, kinds, size=(16, 32), tolerance=None):
    """Compare the output and every element of dq, dk and dv."""
    do = np.random.default_rng(7).normal(size=args[0].shape).astype(np.float32)
    dtype = str(args[0].dtype).removeprefix("torch.")
    do = package.array(do, dtype)
    out, gradients = package.vjp(
        "flash_prefill", args, do, budget_T=kinds[0], sparse_BT=kinds[1], page=4, chunk=16,
        tuning=blocks(package, *size),
    )  # fmt: skip
    wide = [package.wide(x) for x in (*args, do)]
    _, masks = ladder.prefill_oracle(*wide[:3], *kinds)
    want = ladder.prefill_gradient_oracle(*wide, masks)
    names = ("out", "dq", "dk", "dv")
    for name, a, b in zip(names, (out, *gradients), want[:1] + want[2:], strict=True):
        assert a.dtype == do.dtype
        if tolerance:
            np.testing.assert_allclose(package.wide(a), b, atol=tolerance * np.abs(b).max())
        else:
            ladder.close(a, b, name)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("package", "dtype", "tolerance"), [
    (PALLAS, "bfloat16", 0.02), (TRITON, "float16", 0.004),
])  # fmt: skip
def test_two_bytes(package, dtype, tolerance, sparse):
    args = ladder.prefill_inputs(2, head_dim=64, num_tokens=39, rows=1, kv_heads=1)
    if sparse:  # keys of quarters: the choice does not hang on the rounding of landmarks
        args[1] = np.round(4 * args[1][:, np.arange(39) // 4 * 4]) / 4
    args = [package.array(x, dtype) for x in args]
    check_gradients(package, args, kinds(sparse), tolerance=tolerance)


def test_gradients_of_the_oracle_are_its_differences():
    args = [np.float64(x) for x in ladder.prefill_inputs(2, num_tokens=9, rows=1)]
    do = np.random.default_rng(7).normal(size=args[0].shape)
    masks = ladder.prefill_oracle(*args, *ladder.replay(9))[1]

    def f64(*args):
        return np.sum(ladder.prefill_gradient_oracle(*args, do, masks)[0] * do)

    for i, gradient in enumerate(ladder.prefill_gradient_oracle(*args, do, masks)[2:]):
        d = 1e-5 * np.random.default_rng(i).normal(size=args[i].shape)
        up, down = (f64(*args[:i], args[i] + x, *args[i + 1 :]) for x in (d, -d))
        np.testing.assert_allclose((up - down) / 2, np.sum(gradient * d), rtol=1e-6)


@pytest.mark.parametrize(("package", "num_tokens", "size", "page"), [
    (PALLAS, 1, (16, 16), 16), (PALLAS, 16, (16, 16), 4), (PALLAS, 17, (32, 16), 16),
    (TRITON, 1, (16, 16), 16), (TRITON, 16, (16, 16), 4), (TRITON, 17, (32, 16), 16),
    (TRITON, 65, (64, 16), 3), (TRITON, 65, (16, 64), 4),
])  # fmt: skip
def test_lengths_and_schedules(package, num_tokens, size, page):
    """Triton also: several words of bits (page 3: 96 keys each), blocks of queries larger or
    smaller than those of keys."""
    head_dim = 16 if package is TRITON else 64
    q, k, v = ladder.prefill_inputs(1, head_dim=head_dim, num_tokens=num_tokens, kv_heads=1)
    budgets = np.array([1, 0, 3], np.int32)[np.arange(num_tokens) // 7 % 3]
    sparse = np.arange(num_tokens) >= np.array([[num_tokens], [0]])
    ladder.check_prefill(kernel(package, *size), q, k, v, budgets, sparse, page, 8)


def long_inputs():
    """300 tokens with ties: (q, k, v, budgets, sparse queries)."""
    q, k, v = ladder.prefill_inputs(2, num_tokens=300)
    q, k = np.round(4 * q) / 4, np.round(4 * k[:, np.arange(300) % 24]) / 4
    budgets = np.array([0, 3, 1000, 7], np.int32)[np.arange(300) // 80]
    return q, k, v, budgets, np.arange(300) >= np.array([[33], [0]])


def check_pages(words, bits, page):
    """Compare the pages in the words that the kernels read with decode's choice at each position.

    bits: pages in a word.
    """
    inputs, causal = long_inputs(), np.tri(300, dtype=bool)
    seen = np.asarray(words).reshape(2, 2, -1, 1, words.shape[-1]) >> np.arange(bits)[:, None] & 1
    seen = np.repeat(seen.reshape(2, 2, -1, words.shape[-1]), page, 2)[:, :, :300, :300]
    for b, mask in enumerate(ladder.prefill_oracle(*inputs, page)[1]):
        np.testing.assert_array_equal(seen[b].swapaxes(1, 2).astype(bool) & causal, mask)


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(("change", "match"), [
    ({"q_BTNH": np.ones((2, 39, 3, 64), np.float32)}, "q_BTNH.shape"),
    ({"budget_T": np.ones(39, np.int32)}, "pass both"),
    ({"budget_T": np.ones(39, np.int32), "sparse_BT": np.ones((2, 39), bool), "page": 0}, "pass"),
    ({"budget_T": np.ones(39, np.int32), "sparse_BT": np.ones(2, bool)}, "bool .B, T."),
])  # fmt: skip
def test_refused_arguments(package, change, match):
    refuse(package, change, match)


def refuse(package, change, match, num_tokens=39, head_dim=64, **options):
    q, k, v = ladder.prefill_inputs(2, head_dim=head_dim, num_tokens=num_tokens)
    args = {"q_BTNH": q, "k_BTKH": k, "v_BTKH": v} | change
    with pytest.raises(ValueError, match=match):
        package.kernel("flash_prefill", **options)(**args)


def check_forward(package):
    head_dim = 16 if package is TRITON else 64
    args = ladder.prefill_inputs(1, head_dim=head_dim, num_tokens=39, rows=1, kv_heads=1)
    ladder.check_prefill(kernel(package), *args, *ladder.replay(39))


def check_backward(package):
    head_dim = 16 if package is TRITON else 64
    args = ladder.prefill_inputs(2, head_dim=head_dim, num_tokens=30, rows=1, kv_heads=1)
    check_gradients(package, args, ladder.replay(30), (32, 32))


@pytest.fixture
def reject(monkeypatch):
    """reject(package, {function: fault}, check): check that the fault is found in the output, or
    in the gradients only."""

    def run(package, faults, check):
        for name, fault in faults.items():
            file = "page_words" if name == "_to_bits" else "flash_prefill"
            package.plant(monkeypatch, f"{file}.{name}", fault)
        wrong = "Not equal" if check is check_forward else r"(?s)Not equal to toler.*\nd[qkv]\n"
        with pytest.raises(AssertionError, match=wrong):
            check(package)

    return run
