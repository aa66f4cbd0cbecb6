"""Adapt the budget of each length bin during training, so that the tail of alpha stays above tau.

Budgets move on a ladder: config.mismatch.budgets, the budgets of the starting schedule, and dense
at the top. After each exact replay the controller judges every bin that had tokens (quantile q, tau
and margin are settings of config.mismatch):

* If the q-quantile of alpha is below tau by more than the uncertainty, in this step alone or in the
  estimate over steps, the budget goes up one rung at once; above the largest budget is dense. The
  rung that failed is not tried again for a number of steps that doubles with each of its failures.
  This wait, together with the margin, is the hysteresis.
* If the estimate is above tau + margin by more than its uncertainty in `patience` steps in a row,
  the budget goes down one rung. A dense bin comes back in the same way: dense agrees with dense, so
  the largest budget is tried as soon as its wait is over.
* When the budget of a bin changes, its estimate starts anew: values at another k say nothing.
* A dense bin can fail too, since sparse bins wrote the keys that it reads. Then the last bin before
  it that is not dense goes up. If nothing helps, every bin becomes dense, and alpha is 1.
* If the budgets of the starting schedule never fall with length, those of an adapted schedule never
  do either. Later bins go up with an earlier one, since a bin without tokens has no other way to
  learn of it, and come down after it. A bin that never had tokens (below the shortest prompt) does
  not hold later bins up: it comes down with them.

Estimates and their uncertainty: common/mismatch/tail_share.py. Source of tau and the bins: arXiv
2606.08446, section 4. The controller itself is not from the paper.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.mismatch.tail_share import MIN_UNITS, Share
from common.records import json_checks
from common.schedule.profile_file import quantile_name
from common.schedule.schedule import DENSE, Schedule, token_bins
from common.types import Replay, Rollout

ADAPTED = "schedule-adapted.json"
"""Name of the adapted schedule in the run directory; it is rewritten with each checkpoint."""
STEP_Z, POOL_Z = 3.0, 2.0
"""Standard errors from which one step alone, and an estimate over several steps, are certain."""
FIRST_WAIT, MAX_WAIT = 4, 64
"""First and longest wait before a failed rung is tried again, as multiples of `patience` steps."""


@dataclasses.dataclass(kw_only=True)
class Bin:
    """State of one length bin.

    rung: index of its budget in the ladder. age: replayed steps in which the bin had tokens.
    calm: steps in a row with the tail above tau + margin. low, high: shares of tokens with alpha
    below tau and below tau + margin, at this rung. fails, retry: for each rung, how often it failed
    and the age from which it may be tried again.
    """

    rung: int
    fails: list[int]
    retry: list[int]
    age: int = 0
    calm: int = 0
    low: Share = Share()
    high: Share = Share()

    def restart(self) -> None:
        """Forget the estimates, which were measured at another budget."""
        self.calm, self.low, self.high = 0, Share(), Share()


class Controller:
    """The adapted schedule of a run: a pure function of the replays so far, without randomness."""

    def __init__(
        self, config: Config, start: Schedule, state: Mapping[str, Any] | None = None
    ) -> None:
        """start: schedule of the run's first step. state: a `state_dict` to resume from."""
        self._config, self._start = config.mismatch, start
        width, r = config.mismatch.bin_tokens, config.rollout
        known = len(start.budgets) * start.bin_tokens
        context = max(r.max_prompt_tokens + r.max_response_tokens, known)
        budgets = start.budgets_at(np.arange(0, context, width)).tolist()
        self.ladder = sorted({*config.mismatch.budgets, *budgets, DENSE})
        self._monotone = budgets == sorted(budgets)
        zeros = [0] * len(self.ladder)
        self.bins = [
            Bin(rung=self.ladder.index(k), fails=[*zeros], retry=[*zeros]) for k in budgets
        ]
        self._reasons: dict[int, str] = {}
        if state is not None:
            kept = state.get("bins") if isinstance(state, dict) else None
            same = isinstance(kept, list) and len(kept) == len(self.bins)
            if not same or state.get("ladder") != self.ladder:
                raise UserError(
                    "the run's checkpoint has a controller of other budgets or another schedule; "
                    "set rollout.schedule and mismatch.budgets back, or name a new run"
                )
            self.bins = [_kept_bin(b, len(self.ladder)) for b in kept]

    def state_dict(self) -> dict[str, Any]:
        """Everything that later changes depend on, as plain JSON types."""
        return {"ladder": self.ladder, "bins": [dataclasses.asdict(b) for b in self.bins]}

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next rollout; engines make room for the ladder's largest budget."""
        return Schedule(
            page_size=self._start.page_size,
            bin_tokens=self._config.bin_tokens,
            budgets=tuple(self.ladder[b.rung] for b in self.bins),
            name=f"{self._start.name or 'schedule'}-adapted",
            sized_for=self.ladder[-2],
        )

    def update(
        self, alpha_BT: np.ndarray, mask_BT: np.ndarray, group_B: np.ndarray
    ) -> dict[str, Any]:
        """Change budgets by alpha of the replayed rows; returns controller/* values for the record.

        alpha_BT: exact acceptance rate of the tokens in mask_BT, under the current schedule.
        group_B: prompt of each row. Samples of one prompt count as one independent observation.
        """
        before = self.schedule.budgets
        self._reasons = {}
        falling, calm = self._observe(
            np.asarray(alpha_BT), np.asarray(mask_BT, bool), np.asarray(group_B)
        )
        for b in falling:
            self._fail(b)
        for b, share in falling.items():
            self._raise(b, share)
        for b in calm:
            self._lower(b)
        for b in self._reasons:
            self.bins[b].restart()
        after = self.schedule.budgets
        values: dict[str, Any] = {
            "controller/changes": sum(old != new for old, new in zip(before, after, strict=True)),
            "controller/dense_bins": after.count(DENSE),
        }
        if moves := self._moves(before, after):
            values["controller/moves"] = moves
        return values

    def follow(self, rollout: Rollout, replay: Replay) -> dict[str, Any]:
        """`update` by the replayed rows of a rollout."""
        return self.update(
            replay.alpha_BT, rollout.response_mask_BT[replay.rows], rollout.group_B[replay.rows]
        )

    def save(self, path: str | os.PathLike[str], steps: int) -> None:
        """Write the schedule after `steps` training steps to a file, with its provenance."""
        c, schedule = self._config, self.schedule
        provenance = {
            "tau": c.tau,
            "quantile": c.quantile,
            "statistic": f"{quantile_name(c.quantile)} of the exact acceptance rate",
            "method": "adapted in training by the controller (common/mismatch/controller.py)",
            "steps": steps,
            "margin": c.controller_margin,
            "ladder": ["dense" if k == DENSE else k for k in self.ladder],
            "start": self._start.to_json(),
        }
        dataclasses.replace(schedule, provenance=provenance).save(path)

    def _observe(
        self, alpha: np.ndarray, mask: np.ndarray, group_B: np.ndarray
    ) -> tuple[dict[int, float], list[int]]:
        """Add a step to the estimates and judge the bins.

        Returns the bins that are certainly below tau, with their share of tokens below it, and the
        bins that were calm for `patience` steps.
        """
        c = self._config
        falling: dict[int, float] = {}
        calm: list[int] = []
        low, high = mask & (alpha < c.tau), mask & (alpha < c.tau + c.controller_margin)
        bin_T = token_bins(np.arange(mask.shape[1]), c.bin_tokens)
        _, group_B = np.unique(group_B, return_inverse=True)
        for b, state in enumerate(self.bins):
            rows = (m[:, bin_T == b].sum(1) for m in (mask, low, high))
            n_G, low_G, high_G = (np.bincount(group_B, weights=row) for row in rows)
            if not n_G.any():
                continue
            state.age += 1
            # Where few responses reach a bin, older steps keep their weight until the estimate has
            # min_tokens tokens.
            enough = (c.min_tokens + 1 - n_G.sum()) / state.low.wn if state.low.wn else 1.0
            decay = float(np.clip(enough, 1 - 1 / c.controller_window, 1.0))
            state.low = state.low.add(n_G, low_G, decay)
            state.high = state.high.add(n_G, high_G, decay)
            tests = (state.low, POOL_Z), (Share().add(n_G, low_G, 0.0), STEP_Z)
            under = [share.share for share, z in tests if self._under(share, z)]
            if under:
                falling[b] = max(under)
            above = state.high.wn >= c.min_tokens
            above = above and state.high.interval(c.quantile, POOL_Z)[1] < c.quantile
            state.calm = state.calm + 1 if above else 0
            if state.calm >= c.controller_patience and not under:
                calm.append(b)
        return falling, calm

    def _under(self, share: Share, z: float) -> bool:
        """True if certainly more than a share q of the tokens is below tau."""
        q = self._config.quantile
        return share.wn >= self._config.min_tokens and share.interval(q, z)[0] > q

    def _fail(self, b: int) -> None:
        """Forbid the rung of a bin for a number of steps that doubles with each failure."""
        state = self.bins[b]
        wait = min(FIRST_WAIT * 2 ** state.fails[state.rung], MAX_WAIT)
        state.fails[state.rung] += 1
        state.retry[state.rung] = state.age + wait * self._config.controller_patience

    def _raise(self, b: int, share: float) -> None:
        """Move bin `b` up one rung, or, if it is dense, the last bin before it that is not."""
        c, top = self._config, len(self.ladder) - 1
        reason = f"{share:.1%} of its tokens under tau={c.tau:g}"
        if b in self._reasons:
            return
        at = b
        while at >= 0 and self.bins[at].rung == top and at not in self._reasons:
            at -= 1
        if at < b:
            self.bins[b].restart()
        if at < 0 or at in self._reasons:
            return
        if at < b:
            reason = f"{share:.1%} of the dense bin from {b * c.bin_tokens} under tau={c.tau:g}"
            self._fail(at)
        self.bins[at].rung += 1
        self._reasons[at] = reason
        for later in range(at + 1, len(self.bins)) if self._monotone else ():
            if self.bins[later].rung < self.bins[at].rung:
                self.bins[later].rung = self.bins[at].rung
                self._reasons[later] = "no less than the bin before it"

    def _lower(self, b: int) -> None:
        """Move a calm bin down one rung, unless that rung must wait or an earlier bin is higher."""
        c, state = self._config, self.bins[b]
        before = range(b) if self._monotone else ()
        floor = max((self.bins[a].rung for a in before if self.bins[a].age), default=0)
        if b in self._reasons or state.rung <= floor or state.age < state.retry[state.rung - 1]:
            return
        state.rung -= 1
        high = c.tau + c.controller_margin
        self._reasons[b] = (
            f"{state.high.share:.1%} of its tokens under {high:g}, calm for {state.calm} steps"
        )
        for a in before:
            if self.bins[a].rung > state.rung:
                self.bins[a].rung = state.rung
                self._reasons[a] = "never had tokens: no more than the bins after it"

    def _moves(self, before: Sequence[int], after: Sequence[int]) -> list[str]:
        """Changes in words: positions, old and new k, reason. Equal neighbours share one line."""
        key = lambda b: (self._reasons.get(b), before[b], after[b])  # noqa: E731
        width = self._config.bin_tokens
        moves: list[str] = []
        for (reason, *change), group in itertools.groupby(range(len(after)), key):
            if reason:
                bins = [*group]
                k = " -> ".join("dense" if k == DENSE else str(k) for k in change)
                moves.append(f"{bins[0] * width}-{(bins[-1] + 1) * width}: k {k} ({reason})")
        return moves


def _kept_bin(data: Any, rungs: int) -> Bin:
    """A bin's state from a checkpoint; UserError if no controller wrote it."""
    try:
        names = [f.name for f in dataclasses.fields(Bin)]
        json_checks.keys(data, names, "bin")
        counts: dict[str, Any] = {
            key: json_checks.integer(data[key], key, 0) for key in ("age", "calm")
        }
        counts["rung"] = json_checks.integer(data["rung"], "rung", 0, rungs - 1)
        lists: dict[str, Any] = {}
        for key in ("fails", "retry"):
            if not isinstance(data[key], list) or len(data[key]) != rungs:
                raise ValueError(f"{key}: expected {rungs} numbers")
            lists[key] = [json_checks.integer(n, key, 0) for n in data[key]]
        shares: dict[str, Any] = {key: _kept_share(data[key], key) for key in ("low", "high")}
    except ValueError as error:
        raise UserError(
            f"the run's checkpoint has a controller that is not what was written ({error}); "
            "name a new run"
        ) from None
    return Bin(**counts, **lists, **shares)


def _kept_share(data: Any, what: str) -> Share:
    names = [f.name for f in dataclasses.fields(Share)]
    json_checks.keys(data, names, what)
    return Share(**{n: json_checks.number(data[n], f"{what}.{n}", 0, 1e30) for n in names})


def open_controller(
    config: Config, start: Schedule | None, extra: Mapping[str, Any] | None
) -> Controller | None:
    """The controller that config.mismatch.controller asks for, else None.

    extra: what the newest checkpoint of the run holds, None without a checkpoint. Raises UserError
    if that checkpoint was written without a controller, or with one of other budgets.
    """
    if not config.mismatch.controller:
        return None
    if extra and "controller" not in extra:
        raise UserError(
            "mismatch.controller=True: the run's checkpoint was written without a controller; "
            "set it to False to go on, or name a new run"
        )
    assert start is not None, "check_controller comes first"
    return Controller(config, start, extra and extra["controller"])


def check_controller(config: Config, start: Schedule | None) -> None:
    """Raise UserError if the controller is on and cannot work with these settings."""
    c, name = config.mismatch, config.rollout.schedule
    if not c.controller:
        return
    if start is None or start.is_dense:
        raise UserError(
            f"mismatch.controller=True with rollout.schedule={name}: a dense rollout has no budget "
            "to adapt; name a sparse schedule, or set mismatch.controller=False"
        )
    if not c.every:
        raise UserError(
            "mismatch.controller=True with mismatch.every=0: the controller lives on the exact "
            "replay; set mismatch.every=1, or mismatch.controller=False"
        )
    prompts = min(c.num_rows, config.rollout.prompts_per_step)
    if prompts * (2 * c.controller_window - 1) < MIN_UNITS:
        raise UserError(
            f"mismatch.controller=True with mismatch.num_rows={c.num_rows}, "
            f"mismatch.controller_window={c.controller_window} and rollout.prompts_per_step="
            f"{config.rollout.prompts_per_step}: rows of {prompts} prompts tell nothing about the "
            "spread between prompts; set mismatch.controller_window=8"
        )
    if len(start.budgets) > 1 and start.bin_tokens % c.bin_tokens:
        raise UserError(
            f"rollout.schedule={name}: its bins of {start.bin_tokens} tokens are no multiple of "
            f"mismatch.bin_tokens={c.bin_tokens}; set mismatch.bin_tokens={start.bin_tokens} for "
            "the controller"
        )
