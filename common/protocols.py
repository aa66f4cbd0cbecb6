"""The small interfaces that a backend implements; common/loop.py knows nothing else about it.

A backend package (`sparrow_jax`, ...) offers `build(config) -> Backend`, imported lazily by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.config import ModelConfig
from common.schedule.schedule import Schedule
from common.types import Prompt, Replay, Rollout, Scored, TrainBatch

Progress = Callable[[int, int], None]
"""Called with (done, total) while long work runs."""


class RolloutEngine(Protocol):
    """Samples responses. Token in, token out: it never sees text."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        schedule: Schedule | None,
        seed: int,
        temperature: float | None = None,
        top_p: float | None = None,
        progress: Progress | None = None,
    ) -> Rollout:
        """num_samples responses per prompt; schedule None = dense decode.

        The noise of a token is a pure function of (seed, prompt_id, sample, position), so the
        result does not depend on batch composition, slots or page allocation.
        temperature and top_p default to those of the configuration.
        """
        ...

    def load_weights(self, params: Any, version: int) -> None:
        """Take new weights; every cached key, landmark and prefix of older weights is dropped."""
        ...


class Scorer(Protocol):
    """Teacher-forced passes under the current dense weights."""

    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored: ...

    def replay(
        self,
        rollout: Rollout,
        rows: np.ndarray,
        schedule: Schedule | None,
        *,
        temperature: float | None = None,
    ) -> Replay:
        """Exact acceptance rate of `rows`; a schedule of None compares dense with dense."""
        ...

    def load_weights(self, params: Any, version: int) -> None: ...


class Learner(Protocol):
    """Owns the master weights and the optimizer."""

    @property
    def params(self) -> Any:
        """Current weights, in the form that `load_weights` of the same backend takes."""
        ...

    def update(self, batch: TrainBatch) -> Mapping[str, Any]:
        """One optimizer step per minibatch; grpo/* values, and clipped_by_position, int [T]."""
        ...


class Checkpointer(Protocol):
    """Complete training states in a run directory; an incomplete one is never restored."""

    def save(self, step: int, extra: Mapping[str, Any]) -> None:
        """Weights, optimizer, and `extra` (JSON: next step, version) after `step` steps."""
        ...

    def restore(self) -> Mapping[str, Any] | None:
        """Load the newest sound checkpoint into the learner; its `extra`, or None if there is none.

        Damaged ones are named in a warning, set aside, and the one before is used.
        """
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What `build` returns. save_model writes an HF directory (config.json, model.safetensors).

    export_weights: the learner's params by name ("layers.q_LDNH"), as arrays with __dlpack__, for
    an engine of another framework; they are valid until the next update.
    """

    engine: RolloutEngine
    scorer: Scorer
    reference: Scorer | None
    learner: Learner
    open_checkpoints: Callable[[Path], Checkpointer]
    save_model: Callable[[Path], None]
    export_weights: Callable[[Any], Mapping[str, Any]]
    geometry: ModelConfig
    description: Mapping[str, str]
