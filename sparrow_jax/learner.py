"""The GRPO update: clipped, importance-corrected policy gradient with AdamW, in micro-batches.

Loss of a minibatch (arXiv 2606.08446, RL recipe), where w is the detached correction weight:

    sum_t scale_t (- w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)
                   + kl_coef k3(logp_ref_t - logp_t)) / denominator,      rho = exp(logp - logp_old)

Where A < 0, dual_clip = c > 1 bounds the gain from below by c A. common/objective/batching.py gives
scale and denominator (token mean: 1 and the number of tokens); common/oracles/grpo_loss.py has the
formula in float64. Micro-batches return sums, and the division by the denominator comes last, so
the split into micro-batches cannot change the gradient. In the first minibatch of a fresh batch the
weights are those that scored the rollout: logp_old is the pass's own detached logp, and rho is
exactly 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from common.config import Config, LearnerConfig
from common.errors import UserError
from common.objective.grpo import LOG_RATIO_LIMIT
from common.records import stopping
from common.types import MicroBatch, TrainBatch, UpdateResult
from sparrow_jax.placement import Placement
from sparrow_jax.scorer import token_logprobs

FIELDS = tuple(field.name for field in dataclasses.fields(MicroBatch))


@functools.cache  # equal settings share one object, so that the step is compiled once
def make_optimizer(c: LearnerConfig) -> optax.GradientTransformation:
    """AdamW with linear warm-up, after clipping by global norm."""
    rate = optax.linear_schedule(
        c.learning_rate / max(c.warmup_steps, 1), c.learning_rate, c.warmup_steps
    )
    adamw = optax.adamw(rate, b1=c.beta1, b2=c.beta2, weight_decay=c.weight_decay)
    return optax.chain(optax.clip_by_global_norm(c.max_grad_norm), adamw)


def tangent_exp(x: jax.Array) -> jax.Array:
    """exp(x), continued above LOG_RATIO_LIMIT by its tangent, so that nothing overflows."""
    past = jnp.maximum(x - LOG_RATIO_LIMIT, 0.0)
    return jnp.exp(jnp.minimum(x, LOG_RATIO_LIMIT)) * (1.0 + past)


def k3_estimate(delta: jax.Array) -> jax.Array:
    """e(delta) - delta - 1 with e = tangent_exp; never negative.

    Near 0 it is computed by a series, because the difference could round to a negative number.
    """
    d = jnp.clip(delta, -0.1, 0.1)
    near = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    past = jnp.maximum(delta - LOG_RATIO_LIMIT, 0.0) * math.exp(LOG_RATIO_LIMIT)
    far = jnp.expm1(jnp.minimum(delta, LOG_RATIO_LIMIT)) + past - delta
    return jnp.where(jnp.abs(delta) < 0.1, near, far)


def policy_loss_sum(
    logp_BT, batch: Mapping[str, jax.Array], clip_low, clip_high, kl_coef, dual_clip, fresh
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Summed loss of a micro-batch, and sums for the log.

    fresh: the weights are those that scored the rollout, so the ratio to them is exactly 1.
    """
    mask, A = batch["loss_mask_BT"], batch["advantage_BT"]
    old = jnp.where(fresh, jax.lax.stop_gradient(logp_BT), batch["logp_old_BT"])
    rho = tangent_exp(jnp.where(mask, logp_BT - old, 0.0))
    clipped = jnp.clip(rho, 1 - clip_low, 1 + clip_high)
    is_dual = (dual_clip > 0) & (A < 0) & (rho > dual_clip)
    gain = jnp.where(is_dual, dual_clip * A, jnp.minimum(rho * A, clipped * A))
    k3 = k3_estimate(jnp.where(mask, batch["logp_ref_BT"] - logp_BT, 0.0))
    objective = batch["scale_BT"] * (batch["weight_BT"] * gain - kl_coef * k3)
    loss = -jnp.sum(jnp.where(mask, objective, 0.0))
    is_clipped = mask & (is_dual | (clipped * A < rho * A))
    drift = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logp_BT) - batch["logp_old_BT"]), 0.0)
    sums = {
        "loss": loss,
        "clipped_T": is_clipped.sum(0),
        "k3": jnp.where(mask, k3, 0.0).sum(),
        "drift": jnp.where(fresh, drift.max(), 0.0),
    }
    return loss, sums


@functools.partial(jax.jit, static_argnames=("graph", "dtype", "remat"), donate_argnames=("grads",))
def accumulate_gradient(
    params, grads, batch, numbers, fresh, temperature, *, graph, dtype, remat
) -> tuple[Any, dict[str, jax.Array]]:
    """(grads + the gradient of a micro-batch's summed loss, the sums of policy_loss_sum)."""

    def loss(params) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = nnx.merge(graph, params)
        logp, _ = token_logprobs(model, batch["tokens_BT"], temperature, dtype=dtype, remat=remat)
        return policy_loss_sum(logp, batch, *numbers, fresh)

    (_, sums), new = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), sums


@functools.cache
def _compiled_step(
    optimizer: optax.GradientTransformation, shardings: tuple[Any, ...], tree: Any
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """A function for one optimizer step: (weights, state, gradient norm before clipping).

    Weights and state keep the placement that they came with. Otherwise the compiler would choose
    another, and every program that takes them would be compiled a second time.
    """

    def step(params, state, grads, denominator) -> tuple[Any, Any, jax.Array]:
        grads = jax.tree.map(lambda g: g / denominator, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    placed = jax.tree.unflatten(tree, shardings)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None))


class Learner:
    """Learner of common/protocols.py: float32 weights and optimizer state, split over the mesh."""

    def __init__(self, graph: nnx.GraphDef, params: nnx.State, config: Config, dtype: Any):
        self.graph, self.config, self.dtype = graph, config, dtype
        self.placement = Placement.on_devices(config.learner.mesh)
        self.optimizer = make_optimizer(config.learner)
        # A copy, because update donates its buffers and the caller may still need these.
        self._params = self.placement.put_weights(jax.tree.map(jnp.array, params))
        self._opt_state = self._init_state(self.optimizer)

    def _init_state(self, optimizer: optax.GradientTransformation) -> optax.OptState:
        """Moments placed like their weights, counters on every device."""
        return self.placement.put_scalars(optimizer.init(self._params))

    @property
    def params(self) -> nnx.State:
        """Current weights, valid until the next update, which reuses their memory."""
        return self._params

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: plain nested dicts and lists of arrays."""
        return {
            "params": nnx.to_pure_dict(self._params),
            "opt_state": jax.tree.leaves(self._opt_state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that state_dict of a learner with the same geometry made."""
        nnx.replace_by_pure_dict(self._params, state["params"])
        tree = jax.tree.structure(self._opt_state)
        self._opt_state = jax.tree.unflatten(tree, state["opt_state"])

    def update(self, batch: TrainBatch) -> UpdateResult:
        """One optimizer step per minibatch that has a signal; means over the whole batch.

        Raises: UserError for a gradient that is not finite, so that the run ends before such
        weights are saved.
        """
        totals, norms, drift = {"loss": 0.0, "k3": 0.0}, [], 0.0
        longest = max((m.tokens_BT.shape[1] for b in batch.minibatches for m in b), default=1)
        clipped_T = np.zeros(longest, np.int64)
        for micro, denominator in zip(batch.minibatches, batch.denominators, strict=True):
            if not micro or denominator == 0:
                continue
            # If the batch is fresh, its own weights hold until the first step changes them.
            sums, norm = self._step(micro, denominator, fresh=batch.fresh and not norms)
            norms.append(norm)
            drift = max(drift, *(float(s["drift"]) for s in sums))
            totals = {k: v + sum(float(s[k]) for s in sums) for k, v in totals.items()}
            for s in sums:
                clipped_T[: len(s["clipped_T"])] += s["clipped_T"]
        tokens, whole = max(batch.num_tokens, 1.0), max(sum(batch.denominators), 1.0)
        values = {
            "grpo/loss": totals["loss"] / whole,
            "grpo/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "grpo/clip_fraction": float(clipped_T.sum() / tokens),
            "grpo/kl_reference": totals["k3"] / tokens,
            "grpo/ratio_first_minibatch": float(np.exp(drift)),
            "grpo/num_updates": float(len(norms)),
        }
        return UpdateResult(values=values, clipped_T=clipped_T)

    def _step(
        self, micro: list[MicroBatch], denominator: float, fresh: bool
    ) -> tuple[list[dict[str, Any]], float]:
        """One optimizer step; returns each micro-batch's sums and the norm before clipping."""
        c, numbers = self.config.learner, self.config.grpo.loss_numbers
        grads = jax.tree.map(jnp.zeros_like, self._params)
        sums: list[dict] = []
        for m in micro:
            stopping.check()
            grads, s = accumulate_gradient(
                self._params, grads, self.put(m), numbers, fresh,
                np.float32(self.config.rollout.temperature),
                graph=self.graph, dtype=self.dtype, remat=c.remat,
            )  # fmt: skip
            sums.append(s)
        leaves, tree = jax.tree.flatten((self._params, self._opt_state))
        step = _compiled_step(self.optimizer, tuple(x.sharding for x in leaves), tree)
        self._params, self._opt_state, norm = step(
            self._params, self._opt_state, grads, np.float32(denominator)
        )
        norm = float(norm)
        if not np.isfinite(norm):
            raise UserError(
                f"gradient norm {norm}: the last checkpoint is sound; lower "
                "learner.learning_rate, or look at the rewards and log-probs of this step"
            )
        return jax.device_get(sums), norm

    def put(self, m: MicroBatch) -> dict[str, jax.Array]:
        """The arrays of a micro-batch by field name, split over the devices by rows."""
        return self.placement.put_rows({field: getattr(m, field) for field in FIELDS})
