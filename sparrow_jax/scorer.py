"""Dense log-probs of sampled tokens, and exact replay of sparse decode: teacher-forced passes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common import batching
from common.config import Config
from common.schedule import Schedule
from common.types import Replay, Rollout, Scored


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


class JaxScorer:
    """Scorer of common/protocols.py; sequences run in length buckets of static shape."""

    def __init__(self, graph, config: Config, dtype):
        self.graph, self.config, self.dtype = graph, config, dtype
        self.params, self.version = None, -1

    def load_weights(self, params, version: int) -> None:
        """Weights of the next passes."""
        self.params, self.version = params, version

    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored:
        """Dense log-probs at the sampling temperature, 0 outside the response."""
        logp = np.zeros(rollout.tokens_BT.shape, np.float32)
        entropy = np.zeros_like(logp)
        for rows, tokens in self._batches(rollout, np.arange(len(logp))):
            out = _score(
                self.params, tokens, self._temperature(temperature),
                graph=self.graph, dtype=self.dtype,
            )  # fmt: skip
            _put(rollout, rows, (logp, entropy), out)
        return Scored(logp_dense_BT=logp, entropy_BT=entropy)

    def replay(
        self,
        rollout: Rollout,
        rows: np.ndarray,
        schedule: Schedule | None,
        *,
        temperature: float | None = None,
    ) -> Replay:
        """Exact acceptance rate of `rows` under a schedule; None compares dense with dense."""
        config = self.config.rollout
        alpha = np.ones(rollout.tokens_BT.shape, np.float32)
        logp = np.zeros_like(alpha)
        for part, tokens in self._batches(rollout, np.asarray(rows)):
            prompt_len = np.zeros(len(tokens), np.int32)
            prompt_len[: len(part)] = rollout.prompt_len_B[part]
            budget = None
            if schedule is not None:
                budget = schedule.budgets_at(np.arange(tokens.shape[1]))
            out = _replay(
                self.params, tokens, prompt_len, budget, self._temperature(temperature),
                graph=self.graph, dtype=self.dtype, page=config.page_size,
                num_dense=config.num_dense_layers,
            )  # fmt: skip
            _put(rollout, part, (alpha, logp), out)
        rows = np.asarray(rows, np.int32)
        alpha = np.clip(alpha[rows], 0, 1)  # float32 sums of min() leave [0, 1] by rounding only
        return Replay(rows=rows, alpha_BT=alpha, logp_replay_BT=logp[rows])

    def _temperature(self, temperature):
        value = self.config.rollout.temperature if temperature is None else temperature
        return np.float32(value or 1.0)

    def _batches(self, rollout: Rollout, rows: np.ndarray):
        c = self.config.learner
        for part, T, B in batching.length_batches(
            rollout.total_len_B[rows], c.tokens_per_microbatch, buckets=c.length_buckets
        ):
            yield rows[part], batching.take_rows(rollout.tokens_BT, rows[part], T, B)


def _put(rollout: Rollout, rows, arrays, outputs) -> None:
    """Write the response entries of `outputs` [B, T] into `arrays` at `rows`."""
    for array, out in zip(arrays, jax.device_get(outputs), strict=True):
        width = min(array.shape[1], out.shape[1])
        mask = rollout.response_mask_BT[rows, :width]
        array[rows, :width] = np.where(mask, out[: len(rows), :width], array[rows, :width])
