"""A scorer's bookkeeping: rows of a rollout as batches of static shape, which a backend runs."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from common.config import Config
from common.objective import batching
from common.records import stopping
from common.schedule.schedule import Schedule
from common.types import Replay, Rollout, Scored


class Overlap(NamedTuple):
    """Entry t of each [B, T] speaks about token t: alpha (1 at t = 0), sparse log-prob (0 at 0),
    and the lower bound of alpha by top-k log-probs, where asked for."""

    alpha_BT: np.ndarray
    logp_BT: np.ndarray
    estimate_BT: np.ndarray | None = None


class BatchedScorer(abc.ABC):
    """Scorer of common/protocols.py; sequences run in length buckets of static shape."""

    def __init__(self, config: Config):
        self.config, self.version = config, -1
        self.params: Any = None

    @abc.abstractmethod
    def score(self, tokens_BT, temperature) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, [B, T]; entry 0 is 0."""

    @abc.abstractmethod
    def overlaps(
        self, tokens_BT, prompt_len_B, budgets, temperature, *, policy="mean", top=0
    ) -> Iterator[Overlap]:
        """Dense against sparse at each of `budgets` ([T] each; None = dense), one dense pass.

        policy: a name of `VECTORS` in common/profile/text_profile.py. top: also estimate alpha from
        that number of likeliest tokens of each side; 0 = no estimate.
        """

    def load_weights(self, params: Any, version: int) -> None:
        """Weights of the next passes."""
        self.params, self.version = params, version

    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored:
        """Dense log-probs at the sampling temperature, 0 outside the response."""
        logp = np.zeros(rollout.tokens_BT.shape, np.float32)
        entropy = np.zeros_like(logp)
        for rows, tokens in self._batches(rollout, np.arange(len(logp))):
            out = self.score(tokens, self._temperature(temperature))
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
        alpha = np.ones(rollout.tokens_BT.shape, np.float32)
        logp = np.zeros_like(alpha)
        for part, tokens in self._batches(rollout, np.asarray(rows)):
            prompt_len = np.zeros(len(tokens), np.int32)
            prompt_len[: len(part)] = rollout.prompt_len_B[part]
            budget = None
            if schedule is not None:
                budget = schedule.budgets_at(np.arange(tokens.shape[1]))
            (out,) = self.overlaps(tokens, prompt_len, [budget], self._temperature(temperature))
            _put(rollout, part, (alpha, logp), (out.alpha_BT, out.logp_BT))
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
            stopping.check()
            yield rows[part], batching.take_rows(rollout.tokens_BT, rows[part], T, B)


def _put(rollout: Rollout, rows, arrays, outputs) -> None:
    """Write the response entries of `outputs` [B, T] into `arrays` at `rows`."""
    for array, out in zip(arrays, outputs, strict=True):
        width = min(array.shape[1], out.shape[1])
        mask = rollout.response_mask_BT[rows, :width]
        array[rows, :width] = np.where(mask, out[: len(rows), :width], array[rows, :width])
