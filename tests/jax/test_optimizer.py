"""AdamW with a clipped gradient and a warm-up, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from common.config import LearnerConfig
from sparrow_jax.learner import make_optimizer


def test_optimizer_clips_by_global_norm_and_warms_up():
    # gradient (3, 4) has norm 5 and is cut to norm 1; Adam's first step is rate * sign, and the
    # rate starts at 1/4 of 0.1 (warm-up of 4) and reaches it at step 4: 0.025, 0.04375, ..., 0.1
    optimizer = make_optimizer(LearnerConfig(learning_rate=0.1, warmup_steps=4, max_grad_norm=1.0))
    x = jnp.zeros(2)
    state, steps = optimizer.init(x), []
    for _ in range(6):
        update, state = optimizer.update(jnp.array([3.0, 4.0]), state, x)
        steps.append(-np.asarray(update))
    want = [0.025, 0.04375, 0.0625, 0.08125, 0.1, 0.1]
    np.testing.assert_allclose(steps, np.tile(want, (2, 1)).T, rtol=1e-4)
    moments = jax.tree.leaves(state)
    first = next(m for m in moments if getattr(m, "shape", ()) == (2,))
    # (1 - 0.9^6) * (3, 4) / 5 = 0.468559 * (0.6, 0.8)
    np.testing.assert_allclose(first, 0.468559 * np.array([0.6, 0.8]), rtol=1e-4)
