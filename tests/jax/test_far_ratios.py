"""The loss of both learners against the float64 oracle: far log-ratios, dual clip, token scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import oracles
from sparrow_jax import learner

FAR = [-90.0, -30.0, -0.5, 0.0, 0.1, 0.5, 19.0, 30.0, 90.0]
CASES = [(d, A) for d in FAR for A in (-1.5, 0.0, 2.0)]
NAMES = ("clip_low", "clip_high", "kl_coef", "dual_clip")


def batch(sign):
    """One token per case, plus one outside the mask; the reference lies on the side of `sign`."""
    delta, A = (np.array([[*column, 7.0]], np.float32) for column in zip(*CASES, strict=True))
    rng = np.random.default_rng(0)
    return {
        "loss_mask_BT": np.arange(delta.size)[None] < len(CASES),
        "advantage_BT": A,
        "weight_BT": rng.uniform(0.5, 2, delta.shape).astype(np.float32),
        "scale_BT": rng.uniform(0.5, 2, delta.shape).astype(np.float32),
        "logp_old_BT": -delta - 1,
        "logp_ref_BT": sign * delta - 1,
    }, np.full(delta.shape, -1, np.float32)


def of_jax(arrays, logp, numbers):
    arrays = {k: jnp.asarray(v) for k, v in arrays.items()}
    loss = lambda x: learner.policy_loss_sum(x, arrays, *numbers, False)  # noqa: E731
    (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp))
    return value, sums, grad


def of_torch(arrays, logp, numbers):
    torch = pytest.importorskip("torch")
    from sparrow_torch import learner as in_torch

    arrays = {k: torch.as_tensor(v) for k, v in arrays.items()}
    logp = torch.tensor(logp, requires_grad=True)
    loss, sums = in_torch.policy_loss_sum(logp, arrays, *numbers, False)
    loss.backward()
    return loss.item(), sums, logp.grad.numpy()


@pytest.mark.parametrize("backend", [of_jax, of_torch])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_gradients_are_finite_and_those_of_the_oracle(backend, dual_clip, kl_coef, sign):
    arrays, logp = batch(sign)
    numbers = (0.2, 0.28, kl_coef, dual_clip)
    value, sums, got = backend(arrays, logp, numbers)
    names = ("logp_old_BT", "advantage_BT", "weight_BT", "loss_mask_BT")
    options = dict(zip(NAMES, numbers, strict=True)) | {
        name: arrays[name] for name in ("logp_ref_BT", "scale_BT")
    }
    inputs = (logp, *(arrays[name] for name in names))
    want, oracle = (
        oracles.policy_loss_grad(*inputs, **options),
        oracles.policy_loss(*inputs, **options),
    )
    assert np.isfinite(got).all() and np.isfinite(float(value))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(float(value), oracle.loss_sum, rtol=1e-4)
    clipped = oracle.num_clipped_low + oracle.num_clipped_high + oracle.num_clipped_dual
    assert int(sums["clipped_T"].sum()) == clipped > 0
    assert bool(oracle.num_clipped_dual) == bool(dual_clip)
    # what is clipped and feels no KL has no gradient at all
    if not kl_coef:
        assert got[0, CASES.index((90.0, 2.0))] == 0 == got[0, CASES.index((-90.0, -1.5))]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_k3_is_never_negative(backend):
    """exp(d) - d - 1 in float32 has the wrong sign or is 0 for many of such small differences."""
    rng = np.random.default_rng(0)
    d = np.float32([*rng.uniform(-0.2, 0.2, 999), *rng.uniform(-3e-4, 3e-4, 999), 1e-12, -1e-12])
    if backend == "jax":
        got = np.asarray(learner.k3_estimate(jnp.asarray(d)))
    else:
        torch = pytest.importorskip("torch")
        from sparrow_torch import learner as in_torch

        got = in_torch.k3_estimate(torch.as_tensor(d)).numpy()
    x = np.float64(d)
    want = x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120 + x**6 / 720 + x**7 / 5040
    assert (got > 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-4)
