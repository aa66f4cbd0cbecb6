"""Teacher-forced passes: dense log-probs of sampled tokens, and exact replay of sparse decode."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import Config
from common.mismatch.batched_scorer import BatchedScorer
from common.types import Overlap
from kernels_pallas.reference import topk_overlap
from sparrow_jax.model import Decoder
from sparrow_jax.placement import Placement


def next_token_view(hidden_BTD, tokens_BT) -> tuple[jax.Array, jax.Array]:
    """Align hidden states with tokens: row t - 1 predicts token t.

    Returns the hidden states [B (T - 1), D] and the tokens [B (T - 1)] that they predict.
    """
    width = hidden_BTD.shape[-1]
    return hidden_BTD[:, :-1].reshape(-1, width), tokens_BT[:, 1:].reshape(-1)


def by_query(sparse_BT) -> jax.Array:
    """The mask of tokens as one of queries: the query at t - 1 predicts token t, the last none."""
    return jnp.pad(sparse_BT[:, 1:], ((0, 0), (0, 1)))


def align(values_X, tokens_BT, fill=0.0) -> jax.Array:
    """Values of next_token_view as [B, T], where entry t belongs to token t; entry 0 is `fill`."""
    B, T = tokens_BT.shape
    return jnp.pad(values_X.reshape(B, T - 1), ((0, 0), (1, 0)), constant_values=fill)


def token_logprobs(
    model: Decoder, tokens_BT, temperature, *, dtype, remat
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every token, [B, T], 0 at t = 0; the learner differentiates them."""
    hidden = model.hidden(tokens_BT, dtype=dtype, remat=remat)
    flat, targets = next_token_view(hidden, tokens_BT)
    logp, entropy = model.ops.token_logprob(
        flat, model.head(dtype), targets, temperature=temperature
    )
    return align(logp, tokens_BT), align(entropy, tokens_BT)


@functools.partial(jax.jit, static_argnames=("graph", "dtype"))
def _score(params, tokens_BT, temperature, *, graph, dtype) -> tuple[jax.Array, jax.Array]:
    """token_logprobs, compiled."""
    model = nnx.merge(graph, params)
    return token_logprobs(model, tokens_BT, temperature, dtype=dtype, remat=False)


@functools.partial(jax.jit, static_argnames=("graph", "dtype", "page", "num_dense", "policy"))
def _hidden(params, tokens_BT, sparse_BT, budget_T, *, graph, **options) -> jax.Array:
    """Final hidden states [B, T, D]; budget_T None: dense."""
    model = nnx.merge(graph, params)
    queries_BT = by_query(sparse_BT)
    return model.hidden(tokens_BT, budget_T=budget_T, sparse_BT=queries_BT, **options)


@functools.partial(jax.jit, static_argnames=("graph", "dtype", "top"))
def _overlap(
    params, dense_BTD, sparse_BTD, tokens_BT, temperature, *, graph, dtype, top
) -> tuple[jax.Array, ...]:
    """The fields of an Overlap, [B, T] each; the last one, the estimate, only if top > 0."""
    model = nnx.merge(graph, params)
    dense, targets = next_token_view(dense_BTD, tokens_BT)
    sparse, _ = next_token_view(sparse_BTD, tokens_BT)
    head = model.head(dtype)
    alpha, logp = model.ops.acceptance_overlap(
        dense, sparse, head, targets, temperature=temperature
    )
    out = align(alpha, tokens_BT, 1.0), align(logp, tokens_BT)
    if not top:
        return out
    estimate = topk_overlap(dense, sparse, head, temperature=temperature, top=top)
    return *out, align(estimate, tokens_BT, 1.0)


class Scorer(BatchedScorer):
    """The device's half of common/mismatch/batched_scorer.py."""

    def __init__(self, graph: nnx.GraphDef, config: Config, dtype: Any):
        super().__init__(config)
        self.graph, self.dtype = graph, dtype
        self.placement = Placement.on_devices(config.learner.mesh)

    def score(self, tokens_BT, temperature) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, [B, T]; entry 0 is 0."""
        out = _score(self.params, tokens_BT, temperature, graph=self.graph, dtype=self.dtype)
        return jax.device_get(out)

    def overlaps(
        self, tokens_BT, sparse_BT, budgets, temperature, *, policy="mean", top=0
    ) -> Iterator[Overlap]:
        """One Overlap per entry of budgets; see Scorer in common/protocols.py."""
        config = self.config.rollout
        tokens_BT = self.placement.put_even_rows(tokens_BT)
        same = {"graph": self.graph, "dtype": self.dtype}
        hidden = functools.partial(
            _hidden, self.params, tokens_BT, sparse_BT, page=config.page_size,
            num_dense=config.num_dense_layers, **same,
        )  # fmt: skip
        dense = hidden(None, policy="mean")  # the same program for every policy
        for budget_T in budgets:
            sparse = dense if budget_T is None else hidden(budget_T, policy=policy)
            out = _overlap(self.params, dense, sparse, tokens_BT, temperature, top=top, **same)
            yield Overlap(*jax.device_get(out))
