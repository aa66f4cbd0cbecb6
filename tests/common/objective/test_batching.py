"""Batching: every row once, static shapes, and a gradient that no split or padding can change."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import oracles
from common.objective import batching, grpo
from common.objective.grpo import Advantages
from common.types import Prompt, Rollout, Scored

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def example(num_groups=4, samples=3, seed=0, max_len=40, extra_columns=0):
    """A random rollout; tokens are unique numbers, so that rows and positions can be traced."""
    rng = np.random.default_rng(seed)
    B = num_groups * samples
    prompt_len = np.repeat(rng.integers(1, 6, num_groups), samples).astype(np.int32)
    total_len = (prompt_len + rng.integers(1, max_len, B)).astype(np.int32)
    T = int(total_len.max()) + extra_columns
    t = np.arange(T)
    response = (t >= prompt_len[:, None]) & (t < total_len[:, None])
    tokens = np.where(t < total_len[:, None], np.arange(B)[:, None] * 1000 + t, 0)
    group = np.repeat(np.arange(num_groups), samples).astype(np.int32)
    width = int(total_len.max())

    def per_token(scale):  # the same numbers whatever the padding
        values = np.zeros((B, T))
        values[:, :width] = -rng.exponential(scale, (B, width))
        return np.where(response, values, 0).astype(np.float32)

    prompt = Prompt(prompt_id=0, tokens=np.zeros(1, np.int32), task="t", answer={})
    rollout = Rollout(
        prompts=[prompt] * B,
        group_B=group,
        sample_B=np.tile(np.arange(samples), num_groups).astype(np.int32),
        tokens_BT=tokens.astype(np.int32),
        response_mask_BT=response,
        logp_sparse_BT=per_token(1.0),
        sparse_BT=response,
        prompt_len_B=prompt_len,
        total_len_B=total_len,
        finished_B=np.ones(B, bool),
        version_BT=np.where(response, 0, -1).astype(np.int32),
        stats={},
    )
    scored = Scored(logp_dense_BT=per_token(1.0), entropy_BT=per_token(1.0))
    advantage = rng.normal(size=B).astype(np.float32)
    advantages = Advantages(advantage_B=advantage, use_B=np.ones(B, bool))
    weight = np.where(response, -per_token(1.0), 0).astype(np.float32)
    return rollout, scored, advantages, weight


def by_hand():
    """Three rows of 2 prompt and 1, 2, 4 response tokens; weights 1. Their lengths come along."""
    length = np.array([1, 2, 4])
    t = np.arange(6)
    response = (t >= 2) & (t < 2 + length[:, None])
    whole = example(num_groups=1)[0]
    rollout = dataclasses.replace(
        whole,
        tokens_BT=(10 * np.arange(3)[:, None] + t).astype(np.int32),
        response_mask_BT=response,
        prompt_len_B=np.full(3, 2, np.int32),
        total_len_B=(2 + length).astype(np.int32),
    )
    logp = np.where(response, -1, 0).astype(np.float32)
    scored = Scored(logp_dense_BT=logp, entropy_BT=-logp)
    return rollout, scored, response.astype(np.float32), length


def new_logp(tokens):
    """A policy after some updates: a fixed function of the token (unique by row and position)."""
    return -1.0 - 0.5 * np.sin(np.asarray(tokens, np.float64))


def gradients(batch, kl_coef=0.0):
    """Per minibatch {token: gradient}, summed over micro-batches, over the denominator."""
    result = []
    for minibatch, denominator in zip(batch.minibatches, batch.denominators, strict=True):
        grads = {}
        for m in minibatch:
            grad = oracles.policy_loss_grad(
                new_logp(m.tokens_BT), m.logp_old_BT, m.advantage_BT, m.weight_BT, m.loss_mask_BT,
                kl_coef=kl_coef, logp_ref_BT=m.logp_ref_BT, **CLIP,
            )  # fmt: skip
            for token, g in zip(m.tokens_BT[m.loss_mask_BT], grad[m.loss_mask_BT], strict=True):
                assert int(token) not in grads
                grads[int(token)] = g / denominator
        result.append(grads)
    return result


def unsplit_gradient(rollout, scored, advantages, weight, **kl):
    grad = oracles.policy_loss_grad(
        new_logp(rollout.tokens_BT), scored.logp_dense_BT, advantages.advantage_B[:, None], weight,
        rollout.response_mask_BT, **kl, **CLIP,
    )  # fmt: skip
    mask = rollout.response_mask_BT
    return dict(zip(rollout.tokens_BT[mask].tolist(), grad[mask] / mask.sum(), strict=True))


def test_bucket_lengths_by_hand():
    got = [batching.bucket_length(n, 128) for n in (1, 128, 129, 192, 193, 257, 384, 385, 32_768)]
    assert got == [128, 128, 192, 192, 256, 384, 384, 512, 32_768]
    assert [batching.bucket_length(n, 2) for n in (1, 3, 4, 5, 7)] == [2, 3, 4, 6, 8]
    for bad in ({"n": 0}, {"n": 5, "bucket": 3}, {"n": 5, "bucket": 0}):
        with pytest.raises(ValueError, match="expected"):
            batching.bucket_length(**bad)


@given(st.integers(1, 200_000), st.sampled_from([2, 16, 64, 128]))
def test_bucket_length_holds_and_wastes_less_than_half(n, bucket):
    T = batching.bucket_length(n, bucket)
    assert n <= T and (T == bucket or T < 1.5 * n)


def test_few_shapes_up_to_32k():
    assert len({batching.bucket_length(n) for n in range(1, 32_769)}) == 17


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 700), max_size=30), st.integers(1, 2000))
def test_length_batches_take_each_row_once_in_static_shapes(lengths, tokens):
    batches = batching.length_batches(np.array(lengths, int), tokens, 16)
    rows = [int(r) for part, _, _ in batches for r in part]
    assert sorted(rows) == list(range(len(lengths)))
    assert [lengths[r] for r in rows] == sorted(lengths, reverse=True)
    for part, T, B in batches:
        assert 1 <= len(part) <= B and B == max(1, tokens // T)
        assert T == batching.bucket_length(max(lengths[r] for r in part), 16)
        assert B * T <= tokens or B == 1


def test_length_batches_by_hand():
    # longest 100 -> T 128, B 256 // 128 = 2: rows 1, 3; then 60 -> T 64, B 4: rows 2, 0
    got = batching.length_batches(np.array([5, 100, 60, 90]), 256, 64)
    assert [(rows.tolist(), T, B) for rows, T, B in got] == [([1, 3], 128, 2), ([2, 0], 64, 4)]
    with pytest.raises(ValueError, match="tokens_per_microbatch"):
        batching.length_batches(np.array([5]), 0)


@pytest.mark.parametrize("tokens_per_microbatch", [1, 64, 200, 100_000])
@pytest.mark.parametrize("bucket", [2, 16, 128])
def test_gradient_does_not_depend_on_the_split(tokens_per_microbatch, bucket):
    data = example()
    batch = batching.pack(
        *data, num_minibatches=1, tokens_per_microbatch=tokens_per_microbatch, seed=3, bucket=bucket
    )
    (got,) = gradients(batch)
    want = unsplit_gradient(*data)
    assert got.keys() == want.keys()
    np.testing.assert_allclose([got[k] for k in want], list(want.values()), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("extra", [1, 7])
def test_padding_of_the_rollout_does_not_matter(extra):
    options = {"num_minibatches": 2, "tokens_per_microbatch": 128, "seed": 1, "bucket": 16}
    plain, padded = (batching.pack(*example(extra_columns=n), **options) for n in (0, extra))
    assert plain.denominators == padded.denominators
    for a, b in zip(sum(plain.minibatches, []), sum(padded.minibatches, []), strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_rows_shapes_and_contents():
    rollout, scored, advantages, weight = data = example()
    batch = batching.pack(
        *data,
        num_minibatches=3,
        tokens_per_microbatch=96,
        seed=5,
        bucket=16,
        logp_ref_BT=weight - 1,
    )
    seen = []
    for minibatch, denominator in zip(batch.minibatches, batch.denominators, strict=True):
        assert denominator == sum(m.loss_mask_BT.sum() for m in minibatch)
        for m in minibatch:
            B, T = m.tokens_BT.shape
            assert T == batching.bucket_length(T, 16) and B == max(1, 96 // T)
            for b in np.flatnonzero(m.loss_mask_BT.any(axis=1)):
                row = int(m.tokens_BT[b].max()) // 1000
                n = int(rollout.total_len_B[row])
                seen.append(row)
                np.testing.assert_array_equal(m.tokens_BT[b, :n], rollout.tokens_BT[row, :n])
                np.testing.assert_array_equal(
                    m.loss_mask_BT[b, :n], rollout.response_mask_BT[row, :n]
                )
                np.testing.assert_array_equal(m.logp_old_BT[b, :n], scored.logp_dense_BT[row, :n])
                np.testing.assert_array_equal(m.weight_BT[b, :n], weight[row, :n])
                np.testing.assert_array_equal(m.logp_ref_BT[b, :n], weight[row, :n] - 1)
                mask = m.loss_mask_BT[b]
                assert (m.advantage_BT[b][mask] == advantages.advantage_B[row]).all()
                assert not m.tokens_BT[b, n:].any() and not mask[n:].any()
                assert not m.weight_BT[b][~mask].any() and not m.advantage_BT[b][~mask].any()
    assert sorted(seen) == list(range(12))
    assert m.tokens_BT.dtype == np.int32 and m.weight_BT.dtype == np.float32


def test_minibatches_hold_whole_groups_and_follow_the_seed_not_the_row_order():
    rollout, scored, advantages, weight = data = example(num_groups=4, samples=3)
    options = {"num_minibatches": 2, "tokens_per_microbatch": 10_000}

    def rows(batch):
        return [
            sorted({int(x) // 1000 for m in minibatch for x in m.tokens_BT[m.loss_mask_BT]})
            for minibatch in batch.minibatches
        ]

    splits = [rows(batching.pack(*data, seed=s, **options)) for s in range(8)]
    assert splits[0] == rows(batching.pack(*data, seed=0, **options))
    assert len({str(s) for s in splits}) > 1
    for split in splits:
        assert all(len({r // 3 for r in part}) == 2 for part in split)  # 6 rows = 2 whole groups

    order = np.random.default_rng(0).permutation(12)
    moved_rollout = dataclasses.replace(
        rollout,
        **{
            f.name: getattr(rollout, f.name)[order]
            for f in dataclasses.fields(rollout)
            if f.name not in ("prompts", "stats")
        },
    )
    moved_data = (
        moved_rollout,
        Scored(logp_dense_BT=scored.logp_dense_BT[order], entropy_BT=scored.entropy_BT[order]),
        dataclasses.replace(
            advantages, advantage_B=advantages.advantage_B[order], use_B=advantages.use_B[order]
        ),
        weight[order],
    )
    for num_minibatches in (2, 5):  # 5: groups are cut, at the same sample
        options["num_minibatches"] = num_minibatches
        moved, plain = (batching.pack(*d, seed=0, **options) for d in (moved_data, data))
        assert rows(moved) == rows(plain)


def test_unused_rows_leave_loss_and_denominator_and_idle_rows_stay_in_the_denominator():
    rollout, scored, advantages, weight = example()
    lengths = (rollout.total_len_B - rollout.prompt_len_B).astype(float)
    use, advantage, weight = np.ones(12, bool), advantages.advantage_B.copy(), weight.copy()
    use[4] = False  # missing reward
    advantage[7] = 0  # no signal
    weight[9] = 0  # rejected sequence
    advantages = Advantages(advantage_B=advantage, use_B=use)
    options = {"num_minibatches": 1, "tokens_per_microbatch": 10_000, "seed": 0}

    def computed(batch):
        return {int(x) // 1000 for m in batch.minibatches[0] for x in m.tokens_BT[m.loss_mask_BT]}

    batch = batching.pack(rollout, scored, advantages, weight, **options)
    assert computed(batch) == set(range(12)) - {4, 7, 9}
    assert batch.denominators == [lengths.sum() - lengths[4]]
    assert batch.stats["batch/rows_used"] == 11 and batch.stats["batch/rows_computed"] == 9
    with_kl = batching.pack(
        rollout, scored, advantages, weight, logp_ref_BT=scored.logp_dense_BT, **options
    )
    assert computed(with_kl) == set(range(12)) - {4}  # the KL term moves rows 7 and 9
    assert with_kl.denominators == batch.denominators


@pytest.mark.parametrize("tokens_per_microbatch", [64, 100_000])
def test_gradient_with_dropped_tokens_and_kl_does_not_depend_on_the_split(tokens_per_microbatch):
    rollout, scored, advantages, weight = example()
    weight = np.where(np.arange(12)[:, None] % 3 == 0, 0, weight)
    ref = np.where(rollout.response_mask_BT, -0.5, 0).astype(np.float32)
    batch = batching.pack(
        rollout, scored, advantages, weight, logp_ref_BT=ref,
        num_minibatches=1, tokens_per_microbatch=tokens_per_microbatch, seed=0, bucket=16,
    )  # fmt: skip
    (got,) = gradients(batch, kl_coef=0.2)
    want = unsplit_gradient(rollout, scored, advantages, weight, kl_coef=0.2, logp_ref_BT=ref)
    assert got.keys() == want.keys()
    np.testing.assert_allclose([got[k] for k in want], list(want.values()), rtol=1e-6, atol=1e-12)


def test_minibatch_without_signal_is_empty():
    rollout, scored, advantages, weight = example()
    options = {"num_minibatches": 2, "tokens_per_microbatch": 10_000, "seed": 0}
    idle = dataclasses.replace(advantages, advantage_B=np.zeros(12, np.float32))
    batch = batching.pack(rollout, scored, idle, weight, **options)
    assert batch.minibatches == [[], []] and min(batch.denominators) > 0
    unused = dataclasses.replace(advantages, use_B=np.zeros(12, bool))
    batch = batching.pack(rollout, scored, unused, weight, **options)
    assert batch.minibatches == [[], []] and batch.denominators == [0, 0]
    assert batch.stats["batch/padding_fraction"] == 0
    with pytest.raises(ValueError, match="num_minibatches"):
        batching.pack(rollout, scored, advantages, weight, **options | {"num_minibatches": 0})


def test_stats_by_hand():
    rollout, scored, advantages, weight = data = example(num_groups=1, samples=2)
    batch = batching.pack(*data, num_minibatches=1, tokens_per_microbatch=128, seed=0, bucket=64)
    # both rows fit one micro-batch of [128 // 64, 64]
    assert batch.stats["batch/num_microbatches"] == 1 and batch.stats["batch/num_shapes"] == 1
    assert batch.stats["batch/padding_fraction"] == pytest.approx(
        1 - rollout.total_len_B.sum() / 128
    )
    assert batch.stats["batch/loss_tokens"] == rollout.response_mask_BT.sum()


@pytest.mark.parametrize("tokens", [64, 128, 10_000])
def test_aggregations_by_hand_and_whatever_the_split(tokens):
    """Rows of 1, 2 and 4 response tokens, A = 1, 1, -1, ratio 1: the gradient of a token is -w A.

    token_mean     -A / 7 each
    sequence_mean  -A / (3 rows x its own length): 1/3, 1/6, 1/12
    constant       -A / (3 rows x limit of 5) = -A / 15
    """
    rollout, scored, weight, length = by_hand()
    advantages = grpo.Advantages(
        advantage_B=np.float32([1, 1, -1]), use_B=np.array([True, True, True])
    )
    sign = np.array([-1, -1, 1])
    for aggregation, want in (
        ("token_mean", sign / 7),
        ("sequence_mean", sign / (3 * length)),
        ("constant", sign / 15),
    ):
        batch = batching.pack(
            rollout, scored, advantages, weight, num_minibatches=1, bucket=64, seed=0,
            tokens_per_microbatch=tokens, aggregation=aggregation, max_response_tokens=5,
        )  # fmt: skip
        assert batch.num_tokens == 7
        got = {}
        for m in batch.minibatches[0]:
            grad = oracles.policy_loss_grad(
                m.logp_old_BT, m.logp_old_BT, m.advantage_BT, m.weight_BT, m.loss_mask_BT,
                scale_BT=m.scale_BT, **CLIP,
            )  # fmt: skip
            for token, g in zip(m.tokens_BT[m.loss_mask_BT], grad[m.loss_mask_BT], strict=True):
                got[int(token)] = g / batch.denominators[0]
        for row in range(3):
            mine = rollout.tokens_BT[row][rollout.response_mask_BT[row]]
            np.testing.assert_allclose([got[int(t)] for t in mine], want[row], rtol=1e-6)


def test_rows_that_are_not_used_do_not_count_in_an_aggregation():
    rollout, scored, weight, _ = by_hand()
    advantages = grpo.Advantages(
        advantage_B=np.float32([1, 0, -1]), use_B=np.array([True, False, True])
    )
    options = dict(num_minibatches=1, tokens_per_microbatch=64, bucket=64, seed=0)
    for aggregation, want in (("token_mean", 5), ("sequence_mean", 2), ("constant", 10)):
        batch = batching.pack(
            rollout, scored, advantages, weight, **options, aggregation=aggregation,
            max_response_tokens=5,
        )  # fmt: skip
        assert batch.denominators == [want] and batch.num_tokens == 5
    with pytest.raises(ValueError, match="longest response, 4"):
        batching.pack(
            rollout, scored, advantages, weight, **options, aggregation="constant",
            max_response_tokens=3,
        )  # fmt: skip
