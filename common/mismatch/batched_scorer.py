"""The host's half of a scorer: it cuts a rollout into batches of static shape for a backend."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from common.config import Config
from common.objective import batching
from common.records import stopping
from common.schedule.schedule import Schedule
from common.types import Overlap, Replay, Rollout, Scored


class BatchedScorer(abc.ABC):
    """Scorer of common/protocols.py; rows of like length share a batch of static shape.

    A backend implements `score` and `overlaps`, which see one such batch at a time.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.version = config, -1
        self.params: Any = None

    @abc.abstractmethod
    def score(
        self, tokens_BT: np.ndarray, temperature: np.floating
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, float32 [B, T] each, 0 at t = 0."""

    @abc.abstractmethod
    def overlaps(
        self,
        tokens_BT: np.ndarray,
        sparse_BT: np.ndarray,
        budgets: Sequence[np.ndarray | None],
        temperature: np.floating,
        *,
        policy: str = "mean",
        top: int = 0,
    ) -> Iterator[Overlap]:
        """See Scorer in common/protocols.py."""

    def load_weights(self, params: Any, version: int) -> None:
        """Weights of the next passes."""
        self.params, self.version = params, version

    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored:
        """Dense log-probs at the sampling temperature, 0 outside the response."""
        logp = np.zeros(rollout.tokens_BT.shape, np.float32)
        entropy = np.zeros_like(logp)
        for rows, tokens in self._batches(rollout, np.arange(len(logp))):
            logp_BT, entropy_BT = self.score(tokens, self._temperature(temperature))
            _put(rollout, rows, logp, logp_BT)
            _put(rollout, rows, entropy, entropy_BT)
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
        alpha = np.ones(rollout.tokens_BT.shape, np.float32)
        logp = np.zeros_like(alpha)
        for part, tokens in self._batches(rollout, np.asarray(rows)):
            sparse = batching.take_rows(rollout.sparse_BT, part, tokens.shape[1], len(tokens))
            budget = None
            if schedule is not None:
                budget = schedule.budgets_at(np.arange(tokens.shape[1]))
            (out,) = self.overlaps(tokens, sparse, [budget], self._temperature(temperature))
            _put(rollout, part, alpha, out.alpha_BT)
            _put(rollout, part, logp, out.logp_BT)
        rows = np.asarray(rows, np.int32)
        alpha = np.clip(alpha[rows], 0, 1)  # float32 sums of min() leave [0, 1] by rounding only
        return Replay(rows=rows, alpha_BT=alpha, logp_replay_BT=logp[rows])

    def _temperature(self, temperature: float | None) -> np.float32:
        """The sampling temperature unless another is given; 1 for greedy decoding (0)."""
        value = self.config.rollout.temperature if temperature is None else temperature
        return np.float32(value or 1.0)

    def _batches(
        self, rollout: Rollout, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(row numbers, their tokens padded to a static shape [B, T]), longest rows first."""
        c = self.config.learner
        for part, T, B in batching.length_batches(
            rollout.total_len_B[rows], c.tokens_per_microbatch, buckets=c.length_buckets
        ):
            stopping.check()
            yield rows[part], batching.take_rows(rollout.tokens_BT, rows[part], T, B)


def _put(rollout: Rollout, rows: np.ndarray, whole_BT: np.ndarray, part_BT: np.ndarray) -> None:
    """Write the response entries of a batch into the array of the whole rollout at `rows`."""
    width = min(whole_BT.shape[1], part_BT.shape[1])
    mask = rollout.response_mask_BT[rows, :width]
    whole_BT[rows, :width] = np.where(mask, part_BT[: len(rows), :width], whole_BT[rows, :width])
