"""Compare two traces and find where two backends, machines or types differ: `sparrow compare`.

Each quantity of common/crosscheck/trace.py gives a row: largest and mean deviation against the
tolerance (common/crosscheck/deviations.py), and where it first goes beyond: the lowest layer, then
the first position. Stages are judged in the order of computation, so the first that fails is where
to look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from common.crosscheck import deviations
from common.crosscheck.deviations import Row
from common.crosscheck.trace_file import IDENTITY, Trace, differ
from common.errors import UserError
from common.mismatch.acceptance import quantile
from common.schedule.schedule import token_bins

STAGES = ("forward", "score", "replay", "decode", "grpo", "grad", "step", "stream")
MEANING = {
    "forward/q": "queries after norm and RoPE",
    "forward/k": "keys after norm and RoPE",
    "forward/v": "values",
    "forward/attention": "output of attention",
    "forward/block": "hidden state after the block",
    "forward/block_norm": "its norm",
    "score/logp": "dense log-probs",
    "score/entropy": "entropy",
    "score/top_logp": "20 largest log-probs",
    "replay/alpha": "acceptance rate",
    "replay/logp": "sparse log-probs, replayed",
    "decode/page_scores": "scores of pages",
    "decode/pages": "pages read",
    "decode/lse": "log-sum-exp of attention",
    "grpo/weight": "importance weights",
    "grpo/loss": "GRPO loss",
    "grad": "gradient of a parameter",
    "grad_norm": "its norm",
    "step": "what the optimizer adds to it",
    "step_norm": "its norm",
    "stream": "sampled tokens",
    "stream/logp": "the engine's log-probs of them",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """rows in the order of computation; missing: stages that could not be compared.

    floor: (first position, last, tokens, mean, p5) of the acceptance rate of the dense policies.
    """

    rows: Sequence[Row]
    floor: Sequence[tuple[int, int, int, float, float]]
    notes: Sequence[str]
    missing: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line: that the traces agree, or the first stage in which they do not."""
        bad = [row for row in self.rows if row.ok is False]
        if not bad:
            without = f"; not compared: {', '.join(self.missing)}" if self.missing else ""
            return f"SAME within the tolerances{without}"
        # Within a stage the layers come first: what is wrong in one shows in all quantities above.
        stage = _stage(bad[0])
        first = min((row for row in bad if _stage(row) == stage), key=_depth)
        where = f", {first.where}" if first.where else ""
        return f"DIFFERENT, first in {first.name} ({meaning(first.name)}){where}"


def _stage(row: Row) -> str:
    return row.name.split("/")[0].removesuffix("_norm")


def _depth(row: Row) -> float:
    """Sort key: layers in the order in which a stage computes them, for gradients from the top."""
    if _stage(row) != "grad":
        return row.layer
    if "layers." in row.name:
        return -row.layer
    return 1 if "embed" in row.name else -np.inf


def meaning(name: str) -> str:
    """What a quantity is, in a few words."""
    stage, _, rest = name.partition("/")
    if stage == "stream" and rest.endswith("/logp"):
        return MEANING["stream/logp"]
    return MEANING.get(name) or MEANING[stage]


def compare(a: Trace, b: Trace) -> Comparison:
    """Judge b against a; UserError for traces of other weights, prompts or settings."""
    for key, what in IDENTITY.items():
        if a.meta[key] != b.meta[key]:
            raise UserError(
                f"{b.path}: traces other {what} than {a.path}; {differ(a.meta, b.meta, key)}"
            )
    dtypes = a.meta["dtype"], b.meta["dtype"]
    limit = deviations.limits_of(dtypes)
    for name in sorted(set(a) & set(b) - {"meta"}):  # before anything is unpacked
        if a.shape(name) != b.shape(name):
            raise UserError(f"{b.path}: {name} has shape {b.shape(name)}, in {a.path} it has "
                            f"{a.shape(name)}; record both alike")  # fmt: skip
    same_BT = _common_prefix(a, b)
    parted = int((same_BT.sum(1) < a["tokens/total_len"]).sum())
    notes = [] if not parted else [
        f"the given tokens part in {parted} of {len(same_BT)} rows: only what comes before is "
        f"compared; record the second with --force_tokens={a.path.name}"
    ]  # fmt: skip
    rows = [*deviations.forward(a, b, same_BT, limit["forward"])]
    rows += deviations.score(a, b, same_BT, limit)
    rows += deviations.decode(a, b, same_BT, limit)
    if not parted:
        rows += deviations.train(a, b, limit)
    rows += deviations.streams(a, b, limit["score"], deviations.judges_tokens(dtypes))
    bits = [t["step/checksum"].item() for t in (a, b) if "step/checksum" in t]
    if len(bits) == 2 and not parted:
        same = "are" if bits[0] == bits[1] else "are not"
        notes.append(f"the weights after the step {same} the same bit by bit")
    return Comparison(
        rows=rows, floor=_floor(a, b, same_BT), notes=notes, missing=_missing(a, b, rows)
    )


def _missing(a: Trace, b: Trace, rows: Sequence[Row]) -> list[str]:
    """Stages that were not compared, and of the others the quantities that one trace lacks."""
    judged = {_stage(row) for row in rows if row.where != "not compared"}
    parts = [name.split("/") for name in sorted(set(a) ^ set(b))]
    # Of parameters and streams the last part says which of several numbers it is.
    lone = {"/".join(p[:-1] if len(p) > 2 else p) for p in parts if p[0] in judged}
    return [stage for stage in STAGES if stage not in judged] + sorted(lone)


def _common_prefix(a: Trace, b: Trace) -> np.ndarray:
    """Returns bool [B, T]: True where both rows have a token and all tokens up to it are equal."""
    x, y = a["tokens/tokens"], b["tokens/tokens"]
    for t in (a, b):
        prompt, total = t["tokens/prompt_len"], t["tokens/total_len"]
        fits = x.ndim == 2 and prompt.shape == total.shape == x.shape[:1]
        if not fits or (prompt < 0).any() or (prompt > total).any() or (total > x.shape[1]).any():
            raise UserError(f"{t.path}: is no trace, or damaged (tokens); record or copy it anew")
    there = np.arange(x.shape[1]) < a["tokens/total_len"][:, None]
    return np.logical_and.accumulate((x == y) | ~there, axis=1) & there


def _floor(a: Trace, b: Trace, same_BT: np.ndarray) -> list[tuple]:
    """(first, last position, tokens, mean, p5) of the acceptance rate between the dense policies.

    Per length bin (mismatch.bin_tokens of the first trace).

    From the 20 likeliest tokens of each: sum min(p, q) over those in both lists; a token in one
    list has at most the other's 20th probability there; all other tokens share at most the smaller
    of the two remainders.
    So it is at least the true rate, and nearly so where the lists hold most of the mass.
    """
    if "score/top_ids" not in a or "score/top_ids" not in b:
        return []
    ids, other = a["score/top_ids"], b["score/top_ids"]
    p, q = np.exp(np.float64(a["score/top_logp"])), np.exp(np.float64(b["score/top_logp"]))
    match = ids[..., :, None] == other[..., None, :]
    both = np.where(match, np.minimum(p[..., :, None], q[..., None, :]), 0).sum((-1, -2))
    alone = np.where(match.any(-1), 0, np.minimum(p, q[..., -1:])).sum(-1)
    alone += np.where(match.any(-2), 0, np.minimum(q, p[..., -1:])).sum(-1)
    alpha = np.minimum(both + alone + np.minimum(1 - p.sum(-1), 1 - q.sum(-1)), 1.0)
    position = np.arange(same_BT.shape[1])
    valid = same_BT & (position >= a["tokens/prompt_len"][:, None])
    used = np.flatnonzero(valid.any(0))
    bins = token_bins(used, a.bin_tokens)
    out = []
    for part in (used[bins == i] for i in np.unique(bins)):
        found = alpha[:, part][valid[:, part]]
        p5 = quantile(np.sort(found), np.arange(1, found.size + 1), 0.05)
        out.append((int(part[0]), int(part[-1]), found.size, float(found.mean()), p5))
    return out


def table(result: Comparison) -> str:
    """The rows as text; of gradients and steps only the worst parameter of each."""
    lines = [f"{'quantity':28} {'largest':>8} {'limit':>7} {'mean':>8} {'limit':>7}  verdict"]
    for row in shown(result):
        limits = ("-", "-") if row.limit is None else [f"{x:.0e}" for x in row.limit]
        word = {True: "same", False: "DIFFERENT", None: "-"}[row.ok]
        lines.append(
            f"{row.name:28} {row.largest:8.1e} {limits[0]:>7} {row.mean:8.1e} {limits[1]:>7}  "
            + word
            + (f"  {row.where}" if row.where else "")
        )
    for first, last, count, mean, p5 in result.floor:
        lines.append(f"dense against dense, positions {first}-{last}, {count} tokens: "
                     f"acceptance rate (upper bound) mean {mean:.6f}, p5 {p5:.6f}")  # fmt: skip
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes), result.verdict])


def shown(result: Comparison) -> list[Row]:
    """Rows of the table: all, but of gradients and steps the worst parameter of each."""
    out: list[Row] = []
    for name in dict.fromkeys(_group(row) for row in result.rows):
        group = [row for row in result.rows if _group(row) == name]
        out.append(max(group, key=lambda row: (row.ok is False, row.largest)))
    return out


def _group(row: Row) -> str:
    return row.name.split("/")[0] if _stage(row) in ("grad", "step") else row.name
