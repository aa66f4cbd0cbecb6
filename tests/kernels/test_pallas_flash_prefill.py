"""kernels_pallas.flash_prefill, interpreted: output, log-sum-exp and gradients, in both modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import oracles
from kernels_pallas import flash_prefill as module
from kernels_pallas.tuning import PrefillTuning
from tests.kernels import ladder
from tests.kernels.ladder import EAGER, ON_WAIT

SMALL = PrefillTuning(queries=16, keys=32)
jit = functools.partial(jax.jit, compiler_options=ladder.QUICK)


def kernel(mode=ON_WAIT, tuning=SMALL):
    static = ("page", "chunk")
    return ladder.interpreted(module.flash_prefill, mode, static=static, tuning=tuning)


def check_gradients(prefill, args, kinds, page=4, tolerance=None):
    """Output and every element of dq, dk and dv."""
    do = np.random.default_rng(7).normal(size=args[0].shape).astype(np.float32)
    do = np.asarray(jnp.asarray(do, args[0].dtype))

    @jit
    def run(do, *args):
        f = functools.partial(prefill, budget_T=kinds[0], prompt_len_B=kinds[1], page=page)
        out, pull = jax.vjp(lambda *x: f(*x, chunk=16), *args)
        return out, *pull(do)

    got = jax.block_until_ready(run(do, *args))
    ladder.assert_no_race()
    wide = [np.float32(x) for x in (*args, do)]
    _, masks = ladder.prefill_oracle(*wide[:3], *kinds, page)
    want = ladder.prefill_gradient_oracle(*wide, masks)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want[:1] + want[2:], strict=True):
        if tolerance:
            np.testing.assert_allclose(np.float32(a), b, atol=tolerance * np.abs(b).max())
        else:
            ladder.close(a, b, name)


def prefill(mode=ON_WAIT, tuning=SMALL):
    return functools.partial(module.flash_prefill, interpret=mode, tuning=tuning)


@pytest.mark.parametrize(("ratio", "head_dim", "mode", "sparse"), [
    (1, 64, ON_WAIT, True), (2, 128, EAGER, True), (4, 64, EAGER, True), (8, 128, ON_WAIT, True),
    (2, 64, ON_WAIT, False), (4, 128, EAGER, False),
])  # fmt: skip
def test_output_and_gradients(ratio, head_dim, mode, sparse):
    rows = 2 if ratio < 4 else 1
    args = ladder.prefill_inputs(
        ratio, head_dim=head_dim, num_tokens=39, rows=rows, kv_heads=2 // rows
    )
    check_gradients(prefill(mode), args, ladder.replay(39, rows) if sparse else (None, None))


def test_oracle_gradients_are_those_of_the_oracle():
    args = [np.float64(x) for x in ladder.prefill_inputs(2, num_tokens=9, rows=1)]
    do = np.random.default_rng(7).normal(size=args[0].shape)
    masks = ladder.prefill_oracle(*args, *ladder.replay(9))[1]
    for i, gradient in enumerate(ladder.prefill_gradient_oracle(*args, do, masks)[2:]):
        d = 1e-5 * np.random.default_rng(i).normal(size=args[i].shape)
        up, down = (
            np.sum(
                ladder.prefill_gradient_oracle(*args[:i], args[i] + x, *args[i + 1 :], do, masks)[0]
                * do
            )
            for x in (d, -d)
        )
        np.testing.assert_allclose((up - down) / 2, np.sum(gradient * d), rtol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_log_sum_exp(sparse):
    q, k, v = ladder.prefill_inputs(2, head_dim=64, num_tokens=39, rows=1)
    kinds = ladder.replay(39) if sparse else (None, None)
    *packed, spec = module._prepare(q, k, v, *kinds, 4, 16, ON_WAIT, SMALL)
    lse_G1X = jit(lambda *packed: module._forward(*packed, spec)[1])(*packed)
    lse_KrT = np.asarray(lse_G1X).reshape(2, -1, 2, 16).swapaxes(1, 2).reshape(4, -1)
    want = oracles.attention(q[0], k[0], v[0], ladder.prefill_oracle(q, k, v, *kinds)[1][0])[1]
    ladder.close(lse_KrT.T[:39], want)


@pytest.mark.parametrize(("num_tokens", "tuning", "page"), [
    (1, PrefillTuning(16, 16), 16), (16, PrefillTuning(16, 16), 4), (17, PrefillTuning(32, 16), 16),
])  # fmt: skip
def test_lengths_and_schedules(num_tokens, tuning, page):
    q, k, v = ladder.prefill_inputs(1, head_dim=64, num_tokens=num_tokens, kv_heads=1)
    budgets = np.array([1, 0, 3], np.int32)[np.arange(num_tokens) // 7 % 3]
    ladder.check_prefill(
        kernel(ON_WAIT, tuning), q, k, v, budgets, np.array([num_tokens, 0]), page, 8
    )


@pytest.mark.parametrize(("page", "tuning"), [
    (4, PrefillTuning(32, 256)), (16, PrefillTuning(64, 64)), (1, PrefillTuning(32, 64)),
])  # fmt: skip
def test_pages_of_long_sequences_exactly(page, tuning):
    """The bits that the kernels read, against decode's choice at each position; with ties."""
    q, k, v = ladder.prefill_inputs(2, num_tokens=300)
    q, k = np.round(4 * q) / 4, np.round(4 * k[:, np.arange(300) % 24]) / 4
    budgets, prompt = np.array([0, 3, 1000, 7], np.int32)[np.arange(300) // 80], np.array([33, 0])
    words = module._prepare(q, k, v, budgets, prompt, page, 48, ON_WAIT, tuning)[3]
    bits = min(32, tuning.keys // page)
    seen = np.asarray(words).reshape(2, 2, -1, 1, words.shape[-1]) >> np.arange(bits)[:, None] & 1
    seen = np.repeat(seen.reshape(2, 2, -1, words.shape[-1]), page, 2)[:, :, :300, :300]
    causal = np.tri(300, dtype=bool)
    for b, mask in enumerate(ladder.prefill_oracle(q, k, v, budgets, prompt, page)[1]):
        np.testing.assert_array_equal(seen[b].swapaxes(1, 2).astype(bool) & causal, mask)


@pytest.mark.parametrize("sparse", [False, True])
def test_bfloat16(sparse):
    args = ladder.prefill_inputs(2, head_dim=64, num_tokens=39, rows=1, kv_heads=1)
    args = [jnp.asarray(x, jnp.bfloat16) for x in args]
    if sparse:  # keys of quarters: the choice does not hang on the rounding of landmarks
        args[1] = jnp.round(4 * args[1][:, np.arange(39) // 4 * 4]) / 4
    check_gradients(prefill(), args, ladder.replay(39) if sparse else (None, None), tolerance=0.02)


def test_refused_arguments():
    q, k, v = ladder.prefill_inputs(2, head_dim=64, num_tokens=39)
    with pytest.raises(ValueError, match="q_BTNH.shape"):
        module.flash_prefill(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="spec.page=7"):
        module.flash_prefill(q, k, v, budget_T=np.ones(39), prompt_len_B=np.ones(2), page=7)
    with pytest.raises(ValueError, match="spec.queries=16"):
        module.flash_prefill(q, k, v, tuning=SMALL)


# Planted faults


def limit_one_late(patch):
    """Query t sees key t + 1."""
    positions = module._positions

    def fault(i, j, spec):
        key, query = positions(i, j, spec)
        return key, query + 1

    patch.setattr(module, "_positions", fault)


def pages_shifted_by_one(patch):
    to_bits = module._to_bits
    patch.setattr(module, "_to_bits", lambda pages, *a: to_bits(jnp.roll(pages, 1, -1), *a))


def skipped_last_block(patch):
    """The grid ends a block before the diagonal where it could."""
    pairs = module._pairs

    def fault(num_queries, num_keys, spec, major):
        table = pairs(num_queries, num_keys, spec, major)
        return np.where((table[1] > 0) & (table[0] > 1), [[2], [0]], table).astype(np.int32)

    patch.setattr(module, "_pairs", fault)


@pytest.mark.parametrize("plant", [limit_one_late, pages_shifted_by_one, skipped_last_block])
def test_faults_of_the_forward_pass(plant, monkeypatch):
    q, k, v = ladder.prefill_inputs(1, head_dim=64, num_tokens=39, rows=1, kv_heads=1)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal"):
        ladder.check_prefill(kernel(), q, k, v, *ladder.replay(39))


def without_lse(patch):
    patch.setattr(module, "_weights", lambda s, lse: jnp.exp(s))


def first_head_of_group(patch):
    """dk and dv are not summed over the query heads of the group."""
    gradients = module._key_gradients

    def fault(arrays, words, spec):
        q, k, v, do, lse, delta = arrays
        only = jnp.arange(spec.ratio) == 0
        delta = delta.reshape(len(q), -1, spec.ratio, spec.queries) * only[:, None]
        do = do * only[:, None, None]
        return gradients([q, k, v, do, lse, delta.reshape(lse.shape)], words, spec)

    patch.setattr(module, "_key_gradients", fault)


def pages_not_masked_backward(patch):
    """The backward pass is causal only."""
    for name in ("_query_gradient", "_key_gradients"):
        call = getattr(module, name)
        fault = lambda a, words, spec, call=call: call(a, jnp.full_like(words, -1), spec)  # noqa: E731
        patch.setattr(module, name, fault)


@pytest.mark.parametrize("plant", [without_lse, first_head_of_group, pages_not_masked_backward])
def test_faults_of_the_backward_pass(plant, monkeypatch):
    args = ladder.prefill_inputs(2, head_dim=64, num_tokens=30, rows=1, kv_heads=1)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"(?s)Not equal to tolerance.*\nd[qkv]\n"):
        check_gradients(prefill(tuning=PrefillTuning(32, 32)), args, ladder.replay(30))
