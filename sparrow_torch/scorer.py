"""Teacher-forced passes: dense log-probs of sampled tokens, and exact replay of sparse decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from common.config import Config
from common.mismatch.batched_scorer import BatchedScorer
from common.types import Overlap
from kernels_triton.reference import topk_overlap
from sparrow_torch.model import Decoder


def next_token_view(hidden_BTD, tokens_BT) -> tuple[torch.Tensor, torch.Tensor]:
    """Align hidden states with tokens: row t - 1 predicts token t.

    Returns the hidden states [B (T - 1), D] and the tokens [B (T - 1)] that they predict.
    """
    width = hidden_BTD.shape[-1]
    return hidden_BTD[:, :-1].reshape(-1, width), tokens_BT[:, 1:].reshape(-1)


def by_query(sparse_BT) -> torch.Tensor:
    """The mask of tokens as one of queries: the query at t - 1 predicts token t, the last none."""
    return torch.nn.functional.pad(sparse_BT[:, 1:], (0, 1))


def align(values_X, tokens_BT, fill=0.0) -> torch.Tensor:
    """Values of next_token_view as [B, T], where entry t belongs to token t; entry 0 is `fill`."""
    B, T = tokens_BT.shape
    return torch.nn.functional.pad(values_X.reshape(B, T - 1), (1, 0), value=fill)


def token_logprobs(
    model: Decoder, tokens_BT, temperature, *, remat=False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every token, [B, T], 0 at t = 0; the learner differentiates them."""
    hidden, targets = next_token_view(model.hidden(tokens_BT, remat=remat), tokens_BT)
    logp, entropy = model.ops.token_logprob(hidden, model.head(), targets, temperature=temperature)
    return align(logp, tokens_BT), align(entropy, tokens_BT)


class Scorer(BatchedScorer):
    """The device's half of common/mismatch/batched_scorer.py."""

    def __init__(self, model: Decoder, config: Config):
        super().__init__(config)
        self.model = model

    def load_weights(self, params: Mapping[str, Any], version: int) -> None:
        """Copy weights by name, as Decoder.load takes them."""
        self.model.load(params)
        super().load_weights(self.model, version)

    @torch.no_grad()
    def score(self, tokens_BT, temperature) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, [B, T]; entry 0 is 0."""
        logp, entropy = token_logprobs(self.model, self._tensor(tokens_BT), float(temperature))
        return logp.cpu().numpy(), entropy.cpu().numpy()

    @torch.no_grad()
    def overlaps(
        self, tokens_BT, sparse_BT, budgets, temperature, *, policy="mean", top=0
    ) -> Iterator[Overlap]:
        """One Overlap per entry of budgets; see Scorer in common/protocols.py."""
        config, model, tokens = self.config.rollout, self.model, self._tensor(tokens_BT)
        how = {"page": config.page_size, "num_dense": config.num_dense_layers, "policy": policy}
        sparse_BT, temperature = by_query(self._tensor(sparse_BT)).bool(), float(temperature)
        dense_BTD, head = model.hidden(tokens), model.head()
        dense, targets = next_token_view(dense_BTD, tokens)
        for budget_T in budgets:
            sparse = dense
            if budget_T is not None:
                budget = {"budget_T": self._tensor(budget_T), "sparse_BT": sparse_BT}
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
