"""Dense log-probs of sampled tokens, and exact replay of sparse decode: teacher-forced passes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from common.batched_scorer import BatchedScorer
from common.config import Config


def next_token_view(hidden_BTD, tokens_BT):
    """Flatten so that row t - 1 of the hidden states meets token t: ([B(T-1), D], [B(T-1)])."""
    width = hidden_BTD.shape[-1]
    return hidden_BTD[:, :-1].reshape(-1, width), tokens_BT[:, 1:].reshape(-1)


def align(values_X, tokens_BT, fill=0.0):
    """Back to [B, T], where entry t speaks about token t; entry 0 is `fill`."""
    B, T = tokens_BT.shape
    return jnp.pad(values_X.reshape(B, T - 1), ((0, 0), (1, 0)), constant_values=fill)


def token_logprobs(model, tokens_BT, temperature, *, dtype, remat):
    """Log-prob and entropy of every token but the first, [B, T]; differentiated by the learner."""
    hidden = model.hidden(tokens_BT, dtype=dtype, remat=remat)
    flat, targets = next_token_view(hidden, tokens_BT)
    logp, entropy = model.ops.token_logprob(
        flat, model.head(dtype), targets, temperature=temperature
    )
    return align(logp, tokens_BT), align(entropy, tokens_BT)


@functools.partial(jax.jit, static_argnames=("graph", "dtype"))
def _score(params, tokens_BT, temperature, *, graph, dtype):
    model = nnx.merge(graph, params)
    return token_logprobs(model, tokens_BT, temperature, dtype=dtype, remat=False)


@functools.partial(jax.jit, static_argnames=("graph", "dtype", "page", "num_dense"))
def _replay(
    params, tokens_BT, prompt_len_B, budget_T, temperature, *, graph, dtype, page, num_dense
):
    """alpha and sparse log-prob of every token but the first, [B, T]; budget_T None = dense."""
    model = nnx.merge(graph, params)
    dense, targets = next_token_view(model.hidden(tokens_BT, dtype=dtype), tokens_BT)
    sparse = model.hidden(
        tokens_BT, dtype=dtype, budget_T=budget_T, prompt_len_B=prompt_len_B, page=page,
        num_dense=num_dense,
    )  # fmt: skip
    sparse, _ = next_token_view(sparse, tokens_BT)
    alpha, logp = model.ops.acceptance_overlap(
        dense, sparse, model.head(dtype), targets, temperature=temperature
    )
    return align(alpha, tokens_BT, 1.0), align(logp, tokens_BT)


class JaxScorer(BatchedScorer):
    """The passes of common/batched_scorer.py."""

    def __init__(self, graph, config: Config, dtype):
        super().__init__(config)
        self.graph, self.dtype = graph, dtype

    def score(self, tokens_BT, temperature):
        out = _score(self.params, tokens_BT, temperature, graph=self.graph, dtype=self.dtype)
        return jax.device_get(out)

    def overlap(self, tokens_BT, prompt_len_B, budget_T, temperature):
        config = self.config.rollout
        out = _replay(
            self.params, tokens_BT, prompt_len_B, budget_T, temperature, graph=self.graph,
            dtype=self.dtype, page=config.page_size, num_dense=config.num_dense_layers,
        )  # fmt: skip
        return jax.device_get(out)
