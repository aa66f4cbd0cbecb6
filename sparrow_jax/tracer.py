"""What the JAX backend computes, laid open for `sparrow trace` (common/crosscheck/trace.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import Config
from common.crosscheck import sketch
from common.crosscheck.trace import FACTS, Update, greedy, loss_of
from common.crosscheck.trace_decode import Step
from common.types import TrainBatch
from kernels_pallas.reference import page_scores
from sparrow_jax import backend, cache, decode, hf, learner
from sparrow_jax.scorer import next_token_view


def build(config: Config) -> JaxTracer:
    """Engine, scorer and learner with the weights of model.path."""
    if config.learner.dtype == "float32" or jax.devices()[0].platform == "cpu":
        # On a TPU a float32 product is otherwise one of bfloat16 numbers.
        jax.config.update("jax_default_matmul_precision", "highest")
    return JaxTracer(backend.build(config, vocab_size=1, stop_ids=()), config)


def facts_of_layer(**seen):
    """Projections of what a block computes, and the norm of its hidden state x, [B, T, ...]."""
    flat = {FACTS[name]: y.reshape(*y.shape[:2], -1) for name, y in seen.items()}
    flat = {name: y.astype(jnp.float32) for name, y in flat.items()}
    facts = {name: y @ sketch.directions(y.shape[-1]) for name, y in flat.items()}
    return {**facts, "block_norm": jnp.linalg.norm(flat["block"], axis=-1)}


class JaxTracer:
    """Tracer of common/crosscheck/trace.py."""

    def __init__(self, parts, config: Config):
        self.parts, self.config = parts, config
        self.generate, self.scorer = parts.engine.generate, parts.scorer
        self.description = {
            **parts.description,
            "device": jax.devices()[0].device_kind,
            "dtype": parts.description["compute dtype"],
            "versions": {"jax": jax.__version__, "numpy": np.__version__},
        }
        self._learner: Any = parts.learner
        self._how = {"dtype": jnp.dtype(str(self.description["dtype"]))}

    def greedy(self, prompts, num_tokens):
        return greedy(self.generate, prompts)

    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        @jax.jit
        def run(params, tokens_BT):
            model = nnx.merge(self._learner.graph, params)
            return model.hidden(tokens_BT, observe=facts_of_layer, **self._how)[1]

        return jax.device_get(run(self._learner.params, tokens_BT))

    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 is void."""

        @jax.jit
        def run(params, row_T):
            model = nnx.merge(self._learner.graph, params)
            hidden, _ = next_token_view(model.hidden(row_T[None], **self._how), row_T[None])
            head = model.head(self._how["dtype"])
            logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
            logp = jax.nn.log_softmax(logits / self.config.rollout.temperature)
            logp, ids = jax.lax.top_k(logp, number)
            return jnp.pad(ids, ((1, 0), (0, 0))), jnp.pad(logp, ((1, 0), (0, 0)))

        rows = [jax.device_get(run(self._learner.params, row)) for row in tokens_BT]
        return np.stack([ids for ids, _ in rows]), np.stack([logp for _, logp in rows])

    def decoder(self, table_BP, max_selected: int) -> JaxCache:
        return JaxCache(self, table_BP, max_selected)

    def update(self, batch: TrainBatch) -> Update:
        c, own = self.config, self._learner
        numbers = c.grpo.loss_numbers
        grads, losses = jax.tree.map(jnp.zeros_like, own.params), []
        for m in batch.minibatches[0]:
            grads, sums = learner.accumulate_gradient(
                own.params, grads, own._place(m), numbers, batch.fresh,
                np.float32(c.rollout.temperature), graph=own.graph, dtype=own.dtype, remat=False,
            )  # fmt: skip
            losses.append(float(sums["loss"]))
        flat = hf.flat_weights(grads)
        gradients = ((n, np.asarray(g) / batch.denominators[0]) for n, g in flat.items())

        def weights():
            own.update(batch)
            return {n: np.asarray(w) for n, w in hf.flat_weights(own.params).items()}

        return Update(loss_of(losses, batch), gradients, weights)


class JaxCache:
    """Cache of common/crosscheck/trace_decode.py."""

    def __init__(self, tracer: JaxTracer, table_BP, max_selected: int):
        self._own, self._table = tracer._learner, table_BP
        self._rollout, self._how = tracer.config.rollout, tracer._how
        self._geometry, self._max_selected = tracer.parts.geometry, max_selected
        page, num = self._rollout.page_size, 1 + table_BP.size
        self._cache = cache.allocate(self._geometry, num, page, self._how["dtype"])
        self._run = jax.jit(self._extend, donate_argnums=1)

    def prefill(self, tokens_BT, start_B, num_new_B) -> None:
        hidden = jnp.zeros((len(tokens_BT), self._geometry.hidden_size), self._how["dtype"])
        self._cache, _ = decode.prefill(
            self._own.params, self._cache, tokens_BT, start_B, num_new_B, self._table, hidden,
            graph=self._own.graph, **self._how,
        )  # fmt: skip

    def step(self, token_B, start_B, num_new_B, k_B) -> Step:
        self._cache, facts = self._run(
            self._own.params, self._cache, token_B[:, None], start_B, num_new_B, k_B
        )
        return Step(*jax.device_get(facts))

    def _extend(self, params, held, tokens_BT, start_B, num_new_B, k_B):
        model = nnx.merge(self._own.graph, params)
        observe = functools.partial(_facts_of_decode, table_BP=self._table)
        held, _, facts = model.extend(
            held, tokens_BT, start_B, num_new_B, jnp.asarray(self._table), k_B=k_B,
            max_selected=self._max_selected, num_dense=self._rollout.num_dense_layers,
            observe=observe, **self._how,
        )  # fmt: skip
        sparse = [f for f in facts if "pages" in f]
        stack = lambda name, some: jnp.stack([f[name] for f in some])  # noqa: E731
        return held, (stack("lse", facts), stack("pages", sparse), stack("scores", sparse))


def _facts_of_decode(layer, q, marks, pages, lse, sparse, *, table_BP):
    if not sparse:
        return {"lse": lse[:, 0]}
    scores = page_scores(q[:, 0], marks, layer, jnp.asarray(table_BP))
    return {"lse": lse[:, 0], "pages": pages, "scores": scores}
