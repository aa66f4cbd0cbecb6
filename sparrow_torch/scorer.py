"""Dense log-probs of sampled tokens, and exact replay of sparse decode: teacher-forced passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from common import batching
from common.config import Config
from common.schedule import Schedule
from common.types import Replay, Rollout, Scored
from sparrow_torch.model import Decoder


def next_token_view(hidden_BTD, tokens_BT):
    """Flatten so that row t - 1 of the hidden states meets token t: ([B(T-1), D], [B(T-1)])."""
    width = hidden_BTD.shape[-1]
    return hidden_BTD[:, :-1].reshape(-1, width), tokens_BT[:, 1:].reshape(-1)


def align(values_X, tokens_BT, fill=0.0):
    """Back to [B, T], where entry t speaks about token t; entry 0 is `fill`."""
    B, T = tokens_BT.shape
    return torch.nn.functional.pad(values_X.reshape(B, T - 1), (1, 0), value=fill)


def token_logprobs(model: Decoder, tokens_BT, temperature, *, remat=False):
    """Log-prob and entropy of every token but the first, [B, T]; differentiated by the learner."""
    hidden, targets = next_token_view(model.hidden(tokens_BT, remat=remat), tokens_BT)
    logp, entropy = model.ops.token_logprob(hidden, model.head(), targets, temperature=temperature)
    return align(logp, tokens_BT), align(entropy, tokens_BT)


class TorchScorer:
    """Scorer of common/protocols.py; sequences run in length buckets of static shape."""

    def __init__(self, model: Decoder, config: Config):
        self.model, self.config, self.version = model, config, -1

    def load_weights(self, params: Mapping[str, Any], version: int) -> None:
        """Weights of the next passes, by name."""
        self.model.load(params)
        self.version = version

    @torch.no_grad()
    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored:
        """Dense log-probs at the sampling temperature, 0 outside the response."""
        logp = np.zeros(rollout.tokens_BT.shape, np.float32)
        entropy = np.zeros_like(logp)
        for rows, tokens in self._batches(rollout, np.arange(len(logp))):
            out = token_logprobs(self.model, tokens, self._temperature(temperature))
            _put(rollout, rows, (logp, entropy), out)
        return Scored(logp_dense_BT=logp, entropy_BT=entropy)

    @torch.no_grad()
    def replay(
        self,
        rollout: Rollout,
        rows: np.ndarray,
        schedule: Schedule | None,
        *,
        temperature: float | None = None,
    ) -> Replay:
        """Exact acceptance rate of `rows` under a schedule; None compares dense with dense."""
        config, model = self.config.rollout, self.model
        alpha = np.ones(rollout.tokens_BT.shape, np.float32)
        logp = np.zeros_like(alpha)
        for part, tokens in self._batches(rollout, np.asarray(rows)):
            prompt_len = np.zeros(len(tokens), np.int32)
            prompt_len[: len(part)] = rollout.prompt_len_B[part]
            budget = None
            if schedule is not None:
                budget = self._tensor(schedule.budgets_at(np.arange(tokens.shape[1])))
            dense, targets = next_token_view(model.hidden(tokens), tokens)
            sparse = model.hidden(
                tokens, budget_T=budget, prompt_len_B=self._tensor(prompt_len),
                page=config.page_size, num_dense=config.num_dense_layers,
            )  # fmt: skip
            out = model.ops.acceptance_overlap(
                dense, next_token_view(sparse, tokens)[0], model.head(), targets,
                temperature=self._temperature(temperature),
            )  # fmt: skip
            aligned = align(out[0], tokens, 1.0), align(out[1], tokens)
            _put(rollout, part, (alpha, logp), aligned)
        rows = np.asarray(rows, np.int32)
        alpha = np.clip(alpha[rows], 0, 1)  # float32 sums of min() leave [0, 1] by rounding only
        return Replay(rows=rows, alpha_BT=alpha, logp_replay_BT=logp[rows])

    def _tensor(self, x) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x), device=self.model.embed_VD.device)

    def _temperature(self, temperature) -> float:
        value = self.config.rollout.temperature if temperature is None else temperature
        return float(value or 1.0)

    def _batches(self, rollout: Rollout, rows: np.ndarray):
        c = self.config.learner
        for part, T, B in batching.length_batches(
            rollout.total_len_B[rows], c.tokens_per_microbatch, buckets=c.length_buckets
        ):
            tokens = batching.take_rows(rollout.tokens_BT, rows[part], T, B)
            yield rows[part], self._tensor(tokens).long()


def _put(rollout: Rollout, rows, arrays, outputs) -> None:
    """Write the response entries of `outputs` [B, T] into `arrays` at `rows`."""
    for array, out in zip(arrays, outputs, strict=True):
        width = min(array.shape[1], out.shape[1])
        mask = rollout.response_mask_BT[rows, :width]
        values = out[: len(rows), :width].float().cpu().numpy()
        array[rows, :width] = np.where(mask, values, array[rows, :width])
