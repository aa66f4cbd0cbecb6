"""alpha on given tokens: both scorers against each other and the float64 oracle, every policy."""

import functools

import numpy as np
import pytest

from common import oracles
from common.cli import command_line
from common.profile import text_profile
from common.schedule.profile_file import load_profile
from kernels_pallas import reference
from sparrow_jax import backend as in_jax
from sparrow_torch import backend as in_torch
from tests.jax import tiny_model
from tests.jax.tiny_model import CONTEXT, PAGE, G

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, K = 2, 40, 2
TOKENS = tiny_model.tokens(B, T)
ALL_PAGES = np.full(T, 10**6, np.int32)
FEW = np.full(T, K, np.int32)
BACKENDS = {"jax": in_jax, "torch": in_torch}


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    config = tiny_model.config(tiny_model.write(tmp_path_factory.mktemp("model")))
    built = {name: backend.build_scorer(config) for name, backend in BACKENDS.items()}
    for name, (_, geometry, where) in built.items():
        assert geometry.vocab_size == G.vocab_size and where.startswith(f"{name} ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SEGMENTS", 1)  # a quarter of the compilation, the same result
        yield {name: scorer for name, (scorer, _, _) in built.items()}


def overlaps(scorer, budgets, temperature=0.8, prompt_len=0, **more):
    sparse = np.arange(T) > np.full((B, 1), prompt_len)
    return list(scorer.overlaps(TOKENS, sparse, budgets, np.float32(temperature), **more))


@functools.cache
def logits(policy=None):
    """[B, T, V] of the oracle; policy None = dense."""
    sparse = {}
    if policy:
        budget_T = text_profile.equal_bytes(policy, FEW, PAGE)
        sparse = {"budgets": lambda t: int(budget_T[t]), "policy": policy}
        sparse["sparse_T"] = np.ones(T, bool)
    how = {"page_size": PAGE, "num_dense_layers": 1, **sparse}
    weights = tiny_model.oracle_weights()
    return np.stack([oracles.decoder_forward(weights, G, row, **how) for row in TOKENS])


def of_oracle(policy, temperature=0.8):
    """alpha and sparse log-prob of the token at t, [B, T]; 1 and 0 at t = 0."""
    before = [x[:, :-1].reshape(-1, G.vocab_size) for x in (logits(), logits(policy))]
    alpha = oracles.acceptance_overlap(*before, temperature)
    logp, _ = oracles.token_logprob(before[1], TOKENS[:, 1:].reshape(-1), temperature)
    first = ((0, 0), (1, 0))
    alpha = np.pad(alpha.reshape(B, -1), first, constant_values=1)
    return alpha, np.pad(logp.reshape(B, -1), first)


@pytest.mark.parametrize("policy", text_profile.VECTORS)
def test_alpha_is_that_of_the_oracle_in_both_backends(scorers, policy):
    alpha, logp = of_oracle(policy)
    assert alpha.min() < 0.9, "the budget must make a difference"
    budget = text_profile.equal_bytes(policy, FEW, PAGE)
    found = {}
    for name, scorer in scorers.items():
        (got,) = overlaps(scorer, [budget], policy=policy)
        found[name] = got.alpha_BT
        np.testing.assert_allclose(got.alpha_BT, alpha, atol=1e-5)
        np.testing.assert_allclose(got.logp_BT, logp, rtol=1e-5, atol=2e-5)
        assert got.alpha_BT.min() >= 0 and got.alpha_BT.max() <= 1 + 1e-6
        assert got.estimate_BT is None
    np.testing.assert_allclose(found["jax"], found["torch"], atol=1e-5)


def test_policies_differ(scorers):
    alphas = [of_oracle(policy)[0] for policy in text_profile.VECTORS]
    for i, alpha in enumerate(alphas):
        assert all(np.abs(alpha - other).max() > 1e-2 for other in alphas[:i])


@pytest.mark.parametrize("policy", text_profile.VECTORS)
def test_all_pages_give_alpha_1_at_every_position(scorers, policy):
    exactly = np.full(T, -(-T // PAGE) - 3, np.int32)  # with the 3 reserved pages: all
    for scorer in scorers.values():
        dense, huge, enough = overlaps(scorer, [None, ALL_PAGES, exactly], policy=policy)
        for got in (dense, huge, enough):
            np.testing.assert_allclose(got.alpha_BT, 1, atol=1e-6)
            np.testing.assert_allclose(got.logp_BT, dense.logp_BT, atol=1e-5)
        (less,) = overlaps(scorer, [exactly - 1], policy=policy)
        assert less.alpha_BT.min() < 1 - 1e-4, "one page less is seen"
        seen = PAGE * (exactly[0] + 2)  # tokens that queries with all their pages predict
        np.testing.assert_allclose(less.alpha_BT[:, : seen + 1], 1, atol=1e-6)


def test_many_budgets_share_a_pass_and_each_is_as_alone(scorers):
    rising = np.where(np.arange(T) < 24, 0, 3).astype(np.int32)
    for scorer in scorers.values():
        together = overlaps(scorer, [FEW, None, rising])
        for got, budget in zip(together, [FEW, None, rising], strict=True):
            (alone,) = overlaps(scorer, [budget])
            np.testing.assert_array_equal(got.alpha_BT, alone.alpha_BT)
        assert np.abs(together[0].alpha_BT - together[2].alpha_BT).max() > 1e-3


def test_sequences_do_not_see_each_other(scorers):
    for scorer in scorers.values():
        (both,) = overlaps(scorer, [FEW])
        for b in range(B):
            one = next(
                scorer.overlaps(TOKENS[b : b + 1], np.ones((1, T), bool), [FEW], np.float32(0.8))
            )
            np.testing.assert_allclose(one.alpha_BT[0], both.alpha_BT[b], atol=1e-6)


def test_temperature_and_prompt_are_followed(scorers):
    for scorer in scorers.values():
        (warm,) = overlaps(scorer, [FEW], temperature=1.3)
        np.testing.assert_allclose(warm.alpha_BT, of_oracle("mean", 1.3)[0], atol=1e-5)
        assert np.abs(warm.alpha_BT - of_oracle("mean")[0]).max() > 1e-2
        (prompt,) = overlaps(scorer, [FEW], prompt_len=30)
        np.testing.assert_allclose(prompt.alpha_BT[:, :31], 1, atol=1e-6)
        assert prompt.alpha_BT[:, 31:].min() < 0.95


@pytest.mark.parametrize("top", [1, 20])
def test_estimate_is_that_of_the_lists_and_a_lower_bound(scorers, top):
    dense, sparse = (
        oracles.log_softmax(x[:, :-1], 0.8).reshape(-1, G.vocab_size)
        for x in (logits(), logits("mean"))
    )
    ids = [np.argsort(-x, axis=1)[:, :top] for x in (dense, sparse)]
    lists = [np.take_along_axis(x, i, 1) for x, i in zip((dense, sparse), ids, strict=True)]
    want = oracles.topk_estimate(lists[0], ids[0], lists[1], ids[1]).reshape(B, -1)
    for scorer in scorers.values():
        (got,) = overlaps(scorer, [FEW], top=top)
        np.testing.assert_allclose(got.estimate_BT[:, 1:], want, atol=1e-5)
        assert (got.estimate_BT <= got.alpha_BT + 1e-6).all()
        assert (got.estimate_BT < got.alpha_BT - 1e-3).any()
        assert (got.estimate_BT[:, 0] == 1).all()


def test_estimate_from_the_whole_vocabulary_is_exact(scorers):
    for scorer in scorers.values():
        (got,) = overlaps(scorer, [FEW], top=G.vocab_size)
        np.testing.assert_allclose(got.estimate_BT, got.alpha_BT, atol=1e-5)


def test_kernels_that_cannot_run_here_are_refused_in_one_line(scorers, tmp_path):
    path = tiny_model.write(tmp_path)
    for backend in BACKENDS.values():
        config = tiny_model.config(path)
        object.__setattr__(config, "attention", "kernel")
        with pytest.raises(ValueError, match="config.attention='kernel' with .*set reference"):
            backend.build_scorer(config)


def test_both_engines_write_the_same_profile(scorers, tmp_path):
    model = tiny_model.write(tmp_path / "model")
    ids = tiny_model.write_ids(tmp_path / "ids.json", T)
    found = []
    for engine in BACKENDS:
        out = tmp_path / f"{engine}.json"
        line = f"profile --model={model} --replay={ids} --topk={K},99 --bin_tokens=20 --out={out} "
        line += f"--config.rollout.page_size={PAGE} --config.rollout.num_dense_layers=1 "
        line += f"--config.rollout.engine={engine} --max_tokens={CONTEXT} --estimate=20"
        assert command_line.main(line.split()) == 0
        found.append(load_profile(out))
    (a, b), rows = found, [profile["rows"] + profile["topk"] for profile in found]
    for mine, other in zip(*rows, strict=True):
        assert mine == pytest.approx(other, abs=2e-5)
    assert a["rows"][1]["p5"] < 0.95 and a["source"] == b["source"]
    assert (set(a["versions"]), set(b["versions"])) == ({"numpy", "jax"}, {"numpy", "torch"})
