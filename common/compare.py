"""Compare two traces: where do two backends, machines or types part? `sparrow compare`.

Each quantity of common/trace.py gives a row: largest and mean deviation against the tolerance
(common/tolerances.py), and where it first goes beyond: the lowest layer, then the first position.
Stages are judged in the order of computation, so the first that fails is where to look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from common import tolerances
from common.errors import UserError
from common.tolerances import Limit
from common.trace_file import Trace

FORWARD = ("q", "k", "v", "attention", "block", "block_norm")
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
    "step": "what the optimizer adds to it",
    "stream": "sampled tokens",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity. ok None = reported only. where: of the first deviation beyond the tolerance."""

    name: str
    largest: float
    mean: float
    limit: Limit | None
    ok: bool | None
    layer: int = 0
    where: str = ""
    by_layer: Sequence[float] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """rows in the order of computation; floor: acceptance of the dense policies, by position."""

    rows: Sequence[Row]
    floor: Sequence[tuple[int, int, int, float, float]]
    notes: Sequence[str]

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line: the same, or the first stage that is not."""
        bad = [row for row in self.rows if row.ok is False]
        if not bad:
            return "SAME within the tolerances"
        # Within a stage the layers come first: what is wrong in one shows in all quantities above.
        stage = bad[0].name.split("/")[0]
        first = min((row for row in bad if row.name.startswith(stage)), key=lambda row: row.layer)
        where = f", {first.where}" if first.where else ""
        return f"DIFFERENT, first in {first.name} ({meaning(first.name)}){where}"


def meaning(name: str) -> str:
    """What a quantity is, in a few words."""
    return MEANING.get(name) or MEANING[name.split("/")[0]]


def compare(a: Trace, b: Trace) -> Comparison:
    """Judge b against a; UserError for traces of other weights, prompts or settings."""
    for key, what in (
        ("model_checksum", "weights"),
        ("prompts_checksum", "prompts"),
        ("settings", "settings"),
    ):
        if a.meta[key] != b.meta[key]:
            raise UserError(f"{b.path}: traces other {what} than {a.path}; {_differ(a, b, key)}")
    dtypes = a.meta["dtype"], b.meta["dtype"]
    limit = tolerances.of(dtypes)
    same_BT = _common_prefix(a, b)
    parted = int((same_BT.sum(1) < a["tokens/total_len"]).sum())
    notes = [] if not parted else [
        f"the given tokens part in {parted} of {len(same_BT)} rows: only what comes before is "
        f"compared; record the second with --force_tokens={a.path.name}"
    ]  # fmt: skip
    rows = [*_forward(a, b, same_BT, limit["forward"]), *_score(a, b, same_BT, limit)]
    rows += _decode(a, b, same_BT, limit)
    if not parted:
        rows += _train(a, b, limit)
    rows += _streams(a, b, tolerances.judges_tokens(dtypes))
    for name in sorted({n.split("/")[0] for n in set(a) ^ set(b)} - {"stream"}):
        notes.append(f"{name}: recorded by one of the two only, in part or whole")
    return Comparison(rows=rows, floor=_floor(a, b, same_BT), notes=notes)


def _differ(a: Trace, b: Trace, key: str) -> str:
    if key != "settings":
        return f"record both on the same {'model' if key.startswith('model') else 'prompts'}"
    names = sorted(k for k in a.meta[key] if a.meta[key][k] != b.meta[key].get(k))
    return f"record both with the same {', '.join(names)}"


def _common_prefix(a: Trace, b: Trace) -> np.ndarray:
    """bool [B, T]: the tokens up to here are the same and there."""
    x, y = a["tokens/tokens"], b["tokens/tokens"]
    if x.shape != y.shape:
        raise UserError(f"{b.path}: {y.shape} tokens, {a.path} has {x.shape}; record both alike")
    there = np.arange(x.shape[1]) < a["tokens/total_len"][:, None]
    return np.logical_and.accumulate((x == y) | ~there, axis=1) & there


def row_of(
    name: str, dev: np.ndarray, limit: Limit | None, axes: Sequence[str], first_layer: int = 0
) -> Row:
    """A row of deviations [axes], NaN = not compared. first_layer: number of the first layer.

    Beyond the limit is a layer (all, if the first axis is no layer) whose largest or mean deviation
    is; where: the first such layer, and in it the first position that is beyond, or the worst one.
    """
    seen = dev[~np.isnan(dev)]
    if not seen.size:
        return Row(name=name, largest=0.0, mean=0.0, limit=limit, ok=None, where="not compared")
    layered = tuple(axes[:1]) == ("layer",)
    layers = dev.reshape(len(dev) if layered else 1, -1)
    filled = np.where(np.isnan(layers), 0.0, layers)
    largest, mean = filled.max(1), filled.sum(1) / np.maximum((~np.isnan(layers)).sum(1), 1)
    bad = np.zeros(0, int)
    if limit is not None:
        bad = np.flatnonzero((largest > limit.largest) | (mean > limit.mean))
    where, layer = "", 0
    if len(bad):
        part = dev[bad[0]] if layered else dev
        where, layer = _where(part, limit.largest, axes[1:] if layered else axes), int(bad[0])
        if layered:
            where = f"layer {layer + first_layer}{', ' * bool(where)}{where}"
    return Row(
        name=name, largest=float(seen.max()), mean=float(seen.mean()), limit=limit,
        ok=None if limit is None else not len(bad), where=where, layer=layer + first_layer,
        by_layer=largest.tolist() if layered else (),
    )  # fmt: skip


def _where(dev: np.ndarray, limit: float, axes: Sequence[str]) -> str:
    """The first position or step beyond the limit; the worst, if only the mean is beyond."""
    if not axes:
        return ""
    beyond = np.argwhere(dev > limit)
    if not len(beyond):
        beyond = np.array([np.unravel_index(np.nanargmax(dev), dev.shape)])
    time = [i for i, axis in enumerate(axes) if axis in ("position", "step")]
    first = beyond[np.argsort(beyond[:, time[0]], kind="stable")[0]] if time else beyond[0]
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=True))


def _gap(x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """|x - y| where valid, else NaN; what is not finite on one side only is infinitely far."""
    x, y = np.float64(x), np.float64(y)
    with np.errstate(invalid="ignore"):
        gap = np.where(x == y, 0.0, np.abs(x - y))
    gap = np.where(np.isnan(x) & np.isnan(y), np.nan, np.where(np.isnan(gap), np.inf, gap))
    return np.where(valid, gap, np.nan)


def _rms(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Root mean square of each layer's valid entries, [L, 1, ...]."""
    square = np.where(valid & np.isfinite(x), np.float64(x), np.nan) ** 2
    rms = np.sqrt(np.nanmean(square, axis=tuple(range(1, x.ndim)), keepdims=True))
    return np.maximum(np.nan_to_num(rms), 1e-30)


def _forward(a: Trace, b: Trace, same_BT: np.ndarray, limit: Limit) -> Iterator[Row]:
    for name in (f"forward/{kind}" for kind in FORWARD):
        if name in a and name in b:
            x, y = a[name], b[name]
            valid = np.broadcast_to(
                same_BT.reshape(1, *same_BT.shape, *[1] * (x.ndim - 3)), x.shape
            )
            dev = _gap(x, y, valid) / _rms(x, valid)
            dev = dev.max(-1) if x.ndim == 4 else dev
            yield row_of(name, dev, limit, ("layer", "row", "position"))


def _score(a: Trace, b: Trace, same_BT: np.ndarray, limit) -> Iterator[Row]:
    position = np.arange(same_BT.shape[1])
    response = same_BT & (position >= a["tokens/prompt_len"][:, None])
    names = {"score/logp": response, "score/entropy": response, "score/top_logp": same_BT}
    names |= {"replay/alpha": response, "replay/logp": response}
    for name, valid in names.items():
        if name in a and name in b:
            x, y = a[name], b[name]
            if x.ndim == 3:
                valid = (valid & (position > 0))[..., None]
            dev = _gap(x, y, np.broadcast_to(valid, x.shape))
            dev = dev.max(-1) if x.ndim == 3 else dev
            yield row_of(name, dev, limit[name.split("/")[0]], ("row", "position"))


def _decode(a: Trace, b: Trace, same_BT: np.ndarray, limit) -> Iterator[Row]:
    """Scores, pages, log-sum-exp; what comes after pages that differ for a tie is not judged."""
    if "decode/pages" not in a or "decode/pages" not in b:
        return
    pages, other = a["decode/pages"], b["decode/pages"]
    L, B, R = pages.shape[:3]
    dense = a["decode/lse"].shape[0] - L  # the first layers are always dense
    at_BR = np.minimum(a["tokens/prompt_len"][:, None] + np.arange(R), same_BT.shape[1] - 1)
    there_BR = np.take_along_axis(same_BT, at_BR, 1) & (pages[0, ..., 0, 0] >= 0)
    scores = a["decode/page_scores"]
    every = -(-R // scores.shape[2])
    scale_L = _rms(scores, np.isfinite(scores)).reshape(L, 1, 1, 1)
    differ = (pages != other).any(-1) & there_BR[..., None]
    # A gap beyond all others means that nothing was chosen; then no tie explains a difference.
    gap = np.minimum(*(np.abs(t["decode/page_gap"]) for t in (a, b))) / scale_L
    clean = ~_after(differ.any(-1)) & there_BR
    judged = clean | _first(differ.any(-1))  # scores come before the choice of pages
    valid = np.broadcast_to(judged[:, :, ::every, None, None], scores.shape)
    dev = _gap(scores, b["decode/page_scores"], valid)
    dev = np.where(np.isnan(dev), -1, dev / scale_L[..., None]).max((-1, -2))
    dev = np.where(dev < 0, np.nan, dev)
    axes = ("layer", "row", "step")
    yield row_of("decode/page_scores", dev, limit["page_scores"], axes, dense)
    dev = np.where(judged[..., None], np.where(differ, gap, 0.0), np.nan)
    row = row_of("decode/pages", dev, limit["pages"], (*axes, "head"), dense)
    if differ.any():
        share = f"{differ.mean():.2%} of the lists differ"
        words = f"{row.where}; {share}" if row.where else f"{share}; the first of each row is a tie"
        row = dataclasses.replace(row, where=words)
    yield row
    clean = np.concatenate([np.broadcast_to(clean[:1], (dense, B, R)), clean]) if dense else clean
    dev = _gap(
        a["decode/lse"], b["decode/lse"], np.broadcast_to(clean[..., None], a["decode/lse"].shape)
    )
    yield row_of("decode/lse", dev, limit["lse"], (*axes, "head"))


def _after(differ_LBR: np.ndarray) -> np.ndarray:
    """True in deeper layers of a step where a list differed, and at all later steps of the row."""
    deeper = np.logical_or.accumulate(differ_LBR, axis=0)
    deeper = np.concatenate([np.zeros_like(deeper[:1]), deeper[:-1]])
    earlier_BR = np.logical_or.accumulate(differ_LBR.any(0), axis=1)
    earlier_BR = np.concatenate([np.zeros_like(earlier_BR[:, :1]), earlier_BR[:, :-1]], axis=1)
    return deeper | earlier_BR | differ_LBR


def _first(differ_LBR: np.ndarray) -> np.ndarray:
    """True where a list differs and nothing before did."""
    shifted = _after(differ_LBR) & ~differ_LBR
    return differ_LBR & ~shifted


def _train(a: Trace, b: Trace, limit) -> Iterator[Row]:
    weight = np.abs(np.float64(a["grpo/weight"]) - b["grpo/weight"])
    yield row_of("grpo/weight", weight, limit["weight"], ("row", "position"))
    dev = np.abs(a["grpo/loss"] - b["grpo/loss"]) / a["grpo/scale"]
    yield row_of("grpo/loss", np.reshape(dev, 1), limit["loss"], ())
    for stage in ("grad", "step"):
        names = [n[: -len("/norm")] for n in a if n.startswith(stage + "/") and n.endswith("/norm")]
        for name in names:
            norm = np.maximum(np.float64(a[f"{name}/norm"]), 1e-30)
            ends = (np.abs(norm - b[f"{name}/norm"])[:, None],
                    np.abs(a[f"{name}/projection"] - b[f"{name}/projection"]))  # fmt: skip
            dev = np.concatenate(ends, 1).max(1) / norm
            yield row_of(name, dev, limit.get(stage), ("layer",))


def _streams(a: Trace, b: Trace, judged: bool) -> Iterator[Row]:
    """Share of sampled tokens that are not the same, counted up to where a row parts."""
    for name in ("greedy", "dense", "sparse"):
        key = f"stream/{name}/tokens"
        if key in a and key in b:
            same = np.logical_and.accumulate(a[key] == b[key], axis=1)
            parted = np.flatnonzero(~same.all(1))
            where = f"{int(same.sum()):,} tokens alike"
            if len(parted):
                first = int(same.sum(1)[parted].min())
                where = (
                    f"{len(parted)} of {len(same)} rows part, the first at token {first}; {where}"
                )
            share = 1 - float(same.mean())
            ok = (not len(parted)) if judged else None
            yield Row(name=f"stream/{name}", largest=share, mean=share,
                      limit=Limit(0.0, 0.0) if judged else None, ok=ok, where=where)  # fmt: skip


def _floor(a: Trace, b: Trace, same_BT: np.ndarray, bins: int = 4) -> list[tuple]:
    """(first, last position, tokens, mean, p5) of the acceptance rate between the dense policies.

    From the 20 likeliest tokens of each, sum min(p, q) over those in both lists, and the smaller
    rest: at most the true rate, but for what the rests may share less.
    """
    if "score/top_ids" not in a or "score/top_ids" not in b:
        return []
    ids, other = a["score/top_ids"], b["score/top_ids"]
    p, q = np.exp(np.float64(a["score/top_logp"])), np.exp(np.float64(b["score/top_logp"]))
    match = ids[..., :, None] == other[..., None, :]
    both = np.where(match, np.minimum(p[..., :, None], q[..., None, :]), 0).sum((-1, -2))
    alpha = both + np.minimum(1 - (p[..., :, None] * match).sum((-1, -2)),
                              1 - (q[..., None, :] * match).sum((-1, -2)))  # fmt: skip
    position = np.arange(same_BT.shape[1])
    valid = same_BT & (position >= a["tokens/prompt_len"][:, None])
    used = np.flatnonzero(valid.any(0))
    out = []
    for part in np.array_split(used, bins):
        found = alpha[:, part][valid[:, part]]
        if found.size:
            out.append((int(part[0]), int(part[-1]), found.size, float(found.mean()),
                        float(np.quantile(found, 0.05))))  # fmt: skip
    return out


def table(result: Comparison) -> str:
    """The rows as text; of gradients and steps only the worst parameter of each."""
    lines = [f"{'quantity':24} {'largest':>9} {'mean':>9} {'tolerance':>9}  verdict"]
    for row in shown(result):
        limit = "-" if row.limit is None else f"{row.limit.largest:.0e}"
        word = {True: "same", False: "DIFFERENT", None: "-"}[row.ok]
        note = f"  {row.where}" if row.where else ""
        lines.append(f"{row.name:24} {row.largest:9.1e} {row.mean:9.1e} {limit:>9}  {word}{note}")
    for first, last, count, mean, p5 in result.floor:
        lines.append(f"dense against dense, positions {first}-{last}, {count} tokens: "
                     f"acceptance mean {mean:.6f}, p5 {p5:.6f}")  # fmt: skip
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes), result.verdict])


def shown(result: Comparison) -> list[Row]:
    """Rows of the table: all, but of grad/* and step/* the worst of each."""
    rows = [row for row in result.rows if row.name.split("/")[0] not in ("grad", "step")]
    worst = []
    for stage in ("grad", "step"):
        group = [row for row in result.rows if row.name.startswith(stage + "/")]
        if group:
            worst.append(max(group, key=lambda row: (row.ok is False, row.largest)))
    end = next((i for i, row in enumerate(rows) if row.name.startswith("stream/")), len(rows))
    return [*rows[:end], *worst, *rows[end:]]
