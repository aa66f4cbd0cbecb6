"""Exposes intermediate results of the JAX backend to `sparrow trace` (common/crosscheck)."""

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
from common.protocols import Backend
from common.types import TrainBatch
from kernels_pallas.reference import page_scores
from sparrow_jax import backend, cache, decode, hf, learner
from sparrow_jax.scorer import next_token_view


def build(config: Config) -> Tracer:
    """A tracer of engine, scorer and learner with the weights of model.path."""
    if config.learner.dtype == "float32" or jax.devices()[0].platform == "cpu":
        # By default, a TPU rounds the factors of a float32 product to bfloat16.
        jax.config.update("jax_default_matmul_precision", "highest")
    return Tracer(backend.build(config, vocab_size=1, stop_ids=()), config)


def facts_of_layer(**arrays: jax.Array) -> dict[str, jax.Array]:
    """Projections of the arrays of a layer, and the norm of its output x; [B, T, ...] each."""
    flat = {FACTS[name]: y.reshape(*y.shape[:2], -1) for name, y in arrays.items()}
    flat = {name: y.astype(jnp.float32) for name, y in flat.items()}
    facts = {name: y @ sketch.directions(y.shape[-1]) for name, y in flat.items()}
    return {**facts, "block_norm": jnp.linalg.norm(flat["block"], axis=-1)}


class Tracer:
    """Tracer of common/crosscheck/trace.py."""

    def __init__(self, parts: Backend, config: Config):
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

    def greedy(self, prompts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, T] of greedy decoding by the engine."""
        return greedy(self.generate, prompts)

    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        """Facts [L, B, T, ...] of a dense pass."""

        @jax.jit
        def run(params, tokens_BT) -> dict[str, jax.Array]:
            model = nnx.merge(self._learner.graph, params)
            return model.hidden(tokens_BT, observe=facts_of_layer, **self._how)[1]

        return jax.device_get(run(self._learner.params, tokens_BT))

    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 has no meaning."""

        @jax.jit
        def run(params, row_T) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(self._learner.graph, params)
            hidden, _ = next_token_view(model.hidden(row_T[None], **self._how), row_T[None])
            head = model.head(self._how["dtype"])
            logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
            logp = jax.nn.log_softmax(logits / self.config.rollout.temperature)
            logp, ids = jax.lax.top_k(logp, number)
            return jnp.pad(ids, ((1, 0), (0, 0))), jnp.pad(logp, ((1, 0), (0, 0)))

        rows = [jax.device_get(run(self._learner.params, row)) for row in tokens_BT]
        return np.stack([ids for ids, _ in rows]), np.stack([logp for _, logp in rows])

    def decoder(self, table_BP, max_selected: int) -> PagedCache:
        """An empty cache with this page table, to prefill and decode in."""
        return PagedCache(self, table_BP, max_selected)

    def update(self, batch: TrainBatch) -> Update:
        """Loss, gradients and new weights of one optimizer step."""
        c, own = self.config, self._learner
        numbers = c.grpo.loss_numbers
        grads, losses = jax.tree.map(jnp.zeros_like, own.params), []
        for m in batch.minibatches[0]:
            grads, sums = learner.accumulate_gradient(
                own.params, grads, own.put(m), numbers, batch.fresh,
                np.float32(c.rollout.temperature), graph=own.graph, dtype=own.dtype, remat=False,
            )  # fmt: skip
            losses.append(float(sums["loss"]))
        flat = hf.flat_weights(grads)
        gradients = ((n, np.asarray(g) / batch.denominators[0]) for n, g in flat.items())

        def weights() -> dict[str, np.ndarray]:
            own.update(batch)
            return {n: np.asarray(w) for n, w in hf.flat_weights(own.params).items()}

        return Update(loss_of(losses, batch), gradients, weights)


class PagedCache:
    """Cache of common/crosscheck/trace_decode.py."""

    def __init__(self, tracer: Tracer, table_BP, max_selected: int):
        self._own, self._table = tracer._learner, table_BP
        self._rollout, self._how = tracer.config.rollout, tracer._how
        self._geometry, self._max_selected = tracer.parts.geometry, max_selected
        page, num = self._rollout.page_size, 1 + table_BP.size
        self._cache = cache.allocate(self._geometry, num, page, self._how["dtype"])
        self._run = jax.jit(self._extend, donate_argnums=1)

    def prefill(self, tokens_BT, start_B, num_new_B) -> None:
        """Append prompt tokens densely."""
        hidden = jnp.zeros((len(tokens_BT), self._geometry.hidden_size), self._how["dtype"])
        self._cache, _ = decode.prefill(
            self._own.params, self._cache, tokens_BT, start_B, num_new_B, self._table, hidden,
            graph=self._own.graph, **self._how,
        )  # fmt: skip

    def step(self, token_B, start_B, num_new_B, k_B) -> Step:
        """Append one token per row with budgets k_B; returns what the layers selected."""
        self._cache, facts = self._run(
            self._own.params, self._cache, token_B[:, None], start_B, num_new_B, k_B
        )
        return Step(*jax.device_get(facts))

    def _extend(self, params, held, tokens_BT, start_B, num_new_B, k_B) -> tuple[Any, Any]:
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


def _facts_of_decode(layer, q, marks, pages, lse, sparse, *, table_BP) -> dict[str, jax.Array]:
    """Log-sum-exp of a layer; of a sparse layer also the selected pages and all page scores."""
    if not sparse:
        return {"lse": lse[:, 0]}
    scores = page_scores(q[:, 0], marks, layer, jnp.asarray(table_BP))
    return {"lse": lse[:, 0], "pages": pages, "scores": scores}
