"""GRPO update: clipped, importance-corrected policy gradient with AdamW, in micro-batches.

Loss of a minibatch (arXiv 2606.08446, RL recipe), with w the detached correction weight:

    sum_t scale_t (- w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)
                   + kl_coef k3(logp_ref_t - logp_t)) / denominator,      rho = exp(logp - logp_old)

where A < 0, dual_clip = c > 1 bounds the gain from below by c A. The oracle of all this is
common/objective/grpo.py; scale and denominator (token mean: 1 and the token count) come from
common/objective/batching.py. Micro-batches return sums; the division by the minibatch's
denominator comes last, so their split cannot change the gradient. In the first minibatch after a
rollout the weights are those that scored it, so logp_old is the pass's own logp, detached: rho is
exactly 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from common.config import Config, LearnerConfig
from common.errors import UserError
from common.objective.grpo import LOG_RATIO_LIMIT
from common.records import stopping
from common.types import MicroBatch, TrainBatch, UpdateResult
from sparrow_jax import sharding
from sparrow_jax.scorer import token_logprobs

FIELDS = tuple(field.name for field in dataclasses.fields(MicroBatch))


@functools.cache  # one object for equal settings: a second learner compiles no second step
def make_optimizer(c: LearnerConfig) -> optax.GradientTransformation:
    """AdamW with linear warm-up, after clipping by global norm."""
    rate = optax.linear_schedule(
        c.learning_rate / max(c.warmup_steps, 1), c.learning_rate, c.warmup_steps
    )
    adamw = optax.adamw(rate, b1=c.beta1, b2=c.beta2, weight_decay=c.weight_decay)
    return optax.chain(optax.clip_by_global_norm(c.max_grad_norm), adamw)


def tangent_exp(x):
    """exp(x); past LOG_RATIO_LIMIT its tangent there, so no value or gradient overflows."""
    past = jnp.maximum(x - LOG_RATIO_LIMIT, 0.0)
    return jnp.exp(jnp.minimum(x, LOG_RATIO_LIMIT)) * (1.0 + past)


def k3_estimate(delta):
    """e(delta) - delta - 1 with e = tangent_exp, never below 0.

    By a series near 0, where the difference of rounded numbers would lose its sign.
    """
    d = jnp.clip(delta, -0.1, 0.1)
    near = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    past = jnp.maximum(delta - LOG_RATIO_LIMIT, 0.0) * math.exp(LOG_RATIO_LIMIT)
    far = jnp.expm1(jnp.minimum(delta, LOG_RATIO_LIMIT)) + past - delta
    return jnp.where(jnp.abs(delta) < 0.1, near, far)


def policy_loss_sum(
    logp, batch: Mapping[str, jax.Array], clip_low, clip_high, kl_coef, dual_clip, fresh
):
    """Summed loss of a micro-batch and sums for the log; `fresh` = first minibatch of a rollout."""
    mask, A = batch["loss_mask_BT"], batch["advantage_BT"]
    old = jnp.where(fresh, jax.lax.stop_gradient(logp), batch["logp_old_BT"])
    rho = tangent_exp(jnp.where(mask, logp - old, 0.0))
    clipped = jnp.clip(rho, 1 - clip_low, 1 + clip_high)
    is_dual = (dual_clip > 0) & (A < 0) & (rho > dual_clip)
    gain = jnp.where(is_dual, dual_clip * A, jnp.minimum(rho * A, clipped * A))
    k3 = k3_estimate(jnp.where(mask, batch["logp_ref_BT"] - logp, 0.0))
    objective = batch["scale_BT"] * (batch["weight_BT"] * gain - kl_coef * k3)
    loss = -jnp.sum(jnp.where(mask, objective, 0.0))
    is_clipped = mask & (is_dual | (clipped * A < rho * A))
    drift = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logp) - batch["logp_old_BT"]), 0.0)
    sums = {
        "loss": loss,
        "clipped_T": is_clipped.sum(0),
        "k3": jnp.where(mask, k3, 0.0).sum(),
        "drift": jnp.where(fresh, drift.max(), 0.0),
    }
    return loss, sums


@functools.partial(jax.jit, static_argnames=("graph", "dtype", "remat"), donate_argnames=("grads",))
def accumulate_gradient(params, grads, batch, numbers, fresh, temperature, *, graph, dtype, remat):
    """grads + gradient of one micro-batch's summed loss."""

    def loss(params):
        model = nnx.merge(graph, params)
        logp, _ = token_logprobs(model, batch["tokens_BT"], temperature, dtype=dtype, remat=remat)
        return policy_loss_sum(logp, batch, *numbers, fresh)

    (_, sums), new = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), sums


@functools.cache
def _compiled_step(optimizer, shardings, tree):
    """One optimizer step; (weights, state, gradient norm before clipping).

    Weights and state come out placed as they went in: left to itself, the compiler shards them
    anew, and every program that takes them is compiled a second time.
    """

    def step(params, state, grads, denominator):
        grads = jax.tree.map(lambda g: g / denominator, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    placed = jax.tree.unflatten(tree, shardings)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None))


class JaxLearner:
    """Master weights in float32 and optimizer state, sharded over the mesh."""

    def __init__(self, graph, params, config: Config, dtype):
        self.graph, self.config, self.dtype = graph, config, dtype
        self.mesh = sharding.make_mesh(config.learner.mesh)
        self.optimizer = make_optimizer(config.learner)
        # A copy: update donates its buffers, and the start weights may serve as reference.
        self._params = sharding.shard_params(jax.tree.map(jnp.array, params), self.mesh)
        self._opt_state = self._init_state(self.optimizer)

    def _init_state(self, optimizer):
        """Moments placed like their weights, counters on every device."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(self._params)
        )

    @property
    def params(self):
        """Current weights; valid until the next update, which reuses their memory."""
        return self._params

    def state_dict(self):
        """What a checkpoint holds: plain nested dicts and lists of arrays."""
        return {
            "params": nnx.to_pure_dict(self._params),
            "opt_state": jax.tree.leaves(self._opt_state),
        }

    def load_state_dict(self, state) -> None:
        """Take a state made by state_dict of a learner with the same geometry."""
        nnx.replace_by_pure_dict(self._params, state["params"])
        tree = jax.tree.structure(self._opt_state)
        self._opt_state = jax.tree.unflatten(tree, state["opt_state"])

    def update(self, batch: TrainBatch) -> UpdateResult:
        """One optimizer step per minibatch that has a signal; means over the whole batch.

        Raises UserError for a gradient that is not finite: the run ends before such weights are
        saved.
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
        """One optimizer step: sums of each micro-batch, and the gradient norm before clipping."""
        c, numbers = self.config.learner, self.config.grpo.loss_numbers
        grads = jax.tree.map(jnp.zeros_like, self._params)
        sums: list[dict] = []
        for m in micro:
            stopping.check()
            grads, s = accumulate_gradient(
                self._params, grads, self._place(m), numbers, fresh,
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

    def _place(self, m: MicroBatch) -> dict[str, jax.Array]:
        """Rows padded to a multiple of the data x fsdp devices and spread over them."""
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        pad = -len(m.tokens_BT) % shards
        where = sharding.batch_sharding(self.mesh)
        arrays = {f: np.pad(getattr(m, f), ((0, pad), (0, 0))) for f in FIELDS}
        return {f: jax.device_put(a, where) for f, a in arrays.items()}
