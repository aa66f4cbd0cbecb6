"""Dense log-probs of sampled tokens, and exact replay of sparse decode: teacher-forced passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.config import Config
from common.mismatch.batched_scorer import BatchedScorer
from common.types import Overlap
from kernels_triton.reference import topk_overlap
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


class TorchScorer(BatchedScorer):
    """Passes of the batched scorer; weights come by name, as Decoder.load takes them."""

    def __init__(self, model: Decoder, config: Config):
        super().__init__(config)
        self.model = model

    def load_weights(self, params: Mapping[str, Any], version: int) -> None:
        self.model.load(params)
        super().load_weights(self.model, version)

    @torch.no_grad()
    def score(self, tokens_BT, temperature):
        out = token_logprobs(self.model, self._tensor(tokens_BT), float(temperature))
        return [x.cpu().numpy() for x in out]

    @torch.no_grad()
    def overlaps(self, tokens_BT, prompt_len_B, budgets, temperature, *, policy="mean", top=0):
        config, model, tokens = self.config.rollout, self.model, self._tensor(tokens_BT)
        how = {"page": config.page_size, "num_dense": config.num_dense_layers, "policy": policy}
        prompt_len, temperature = self._tensor(prompt_len_B), float(temperature)
        dense_BTD, head = model.hidden(tokens), model.head()
        dense, targets = next_token_view(dense_BTD, tokens)
        for budget_T in budgets:
            sparse = dense
            if budget_T is not None:
                budget = {"budget_T": self._tensor(budget_T), "prompt_len_B": prompt_len}
                sparse, _ = next_token_view(model.hidden(tokens, **budget, **how), tokens)
            alpha, logp = model.ops.acceptance_overlap(
                dense, sparse, head, targets, temperature=temperature
            )
            out = [align(alpha, tokens, 1.0), align(logp, tokens)]
            if top:
                estimate = topk_overlap(dense, sparse, head, temperature=temperature, top=top)
                out.append(align(estimate, tokens, 1.0))
            yield Overlap(*(x.cpu().numpy() for x in out))

    def _tensor(self, x) -> torch.Tensor:
        return torch.as_tensor(x, device=self.model.embed_VD.device).long()
