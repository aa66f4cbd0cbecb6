"""The interfaces between common/ and a backend; common/ knows nothing else about a backend.

The learner's package (sparrow_jax) offers `build(config, ...) -> Backend`, the package of an engine
offers `build_engine`, and both offer `build_scorer` in backend.py (ScorerModule).
common/setup.py imports them by name when they are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.config import Config
from common.model.geometry import Geometry
from common.schedule.schedule import Schedule
from common.types import Overlap, Prompt, Replay, Rollout, Scored, TrainBatch, UpdateResult

Progress = Callable[[int, int], None]
"""Called with (done, total) while long work runs."""


class RolloutEngine(Protocol):
    """Samples responses. Tokens in, tokens out: an engine never sees text."""

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
        """Sample num_samples responses to each prompt; a schedule of None decodes densely.

        The noise of a token is a pure function of (seed, prompt_id, sample, position), so the
        result does not depend on batch composition, slots or page allocation.
        temperature and top_p default to those of the configuration.
        """
        ...

    def load_weights(self, params: Any, version: int) -> None:
        """Use new weights from now on; drop every key, landmark and prefix of the older ones."""
        ...


class Scorer(Protocol):
    """Teacher-forced passes under the current dense weights.

    temperature defaults to the sampling temperature of the configuration.
    """

    def logprobs(self, rollout: Rollout, *, temperature: float | None = None) -> Scored:
        """Dense log-probs and entropies of the response tokens."""
        ...

    def replay(
        self,
        rollout: Rollout,
        rows: np.ndarray,
        schedule: Schedule | None,
        *,
        temperature: float | None = None,
    ) -> Replay:
        """Exact acceptance rate of `rows`; a schedule of None compares dense with dense.

        The queries of rollout.sparse_BT read pages as decode did; all others are dense.
        """
        ...

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
        """Dense against sparse distributions of given tokens, one Overlap per entry of `budgets`.

        The dense pass runs once, a sparse pass runs when its result is taken. An entry of budgets
        has the number of pages at each query position, int32 [T], or is None: dense against dense.
        sparse_BT: bool [B, T], True for tokens from a sparse decode step; the queries of all other
        tokens are dense. policy: the rule that chooses pages, a name of `VECTORS` in
        common/profile/text_profile.py. top > 0: also bound alpha from below by the `top` likeliest
        tokens of each side.
        """
        ...

    def load_weights(self, params: Any, version: int) -> None:
        """Use `params` in all later passes."""
        ...


class ScorerModule(Protocol):
    """The module backend.py of a backend package, as far as it serves passes without training."""

    def build_scorer(self, config: Config) -> tuple[Scorer, Geometry, str]:
        """A scorer with the weights of model.path, its geometry, and one line on where it runs."""
        ...


class Learner(Protocol):
    """Owns the master weights and the optimizer."""

    @property
    def params(self) -> Any:
        """Current weights, in the form that `load_weights` of the same backend takes."""
        ...

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Take one optimizer step for each minibatch that has a signal.

        Raises UserError if a gradient is not finite.
        """
        ...


class Checkpointer(Protocol):
    """Complete training states in a run directory; an incomplete one is never restored."""

    def save(self, step: int, extra: Mapping[str, Any]) -> None:
        """Save weights, optimizer state and `extra` (JSON: next step, version) at `step`."""
        ...

    def restore(self) -> Mapping[str, Any] | None:
        """Load the newest sound checkpoint into the learner and return its `extra`.

        Returns None if there is no checkpoint. A damaged one is named in a warning and set aside,
        and the one before it is used. Raises UserError if all of them are damaged, or if the newest
        sound one belongs to another model.
        """
        ...

    def close(self) -> None:
        """Release the resources that saving and loading need."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """All parts of a backend, with the same weights under version 0.

    reference: scorer of the start weights for a KL term; None without one. save_model: writes a
    Hugging Face directory (config.json, model.safetensors). export_weights: turns the learner's
    params into arrays with __dlpack__ by name ("layers.q_LDNH"), for an engine of another
    framework; they are valid until the next update. description: facts for the console and the
    trace, by name.
    """

    engine: RolloutEngine
    scorer: Scorer
    reference: Scorer | None
    learner: Learner
    open_checkpoints: Callable[[Path], Checkpointer]
    save_model: Callable[[Path], None]
    export_weights: Callable[[Any], Mapping[str, Any]]
    geometry: Geometry
    description: Mapping[str, str]
