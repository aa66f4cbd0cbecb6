"""Deviations of two traces, stage by stage: one row for each quantity, judged against its limit.

Limits depend on the types that the traces were computed in:

    float32 with float32    the two differ by rounding only, in another order
    with bfloat16           8 bits of precision through all layers: single values may be far off,
                            so the mean tells a fault from rounding

Deviations are relative to the rms of the values at the position, or to that of the layer's median
position if it is larger (activations); to the rms of the layer (scores); to the norm (gradients,
steps of the weights); to the sizes of the terms, which cancel (loss). All others are absolute, in
nats or shares. Sampled tokens of float32 traces have to be equal. With bfloat16 they part sooner or
later, and the first step of Adam is nearly the sign of each gradient: both are reported without a
verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.crosscheck.trace_decode import SCORES_EVERY
from common.crosscheck.trace_file import Trace

FORWARD = ("q", "k", "v", "attention", "block", "block_norm")
STREAMS = ("greedy", "dense", "sparse")


class Limit(NamedTuple):
    """Limits of the largest and of the mean deviation of a quantity."""

    largest: float
    mean: float


_FLOAT32 = {
    "forward": Limit(1e-4, 3e-5),
    "score": Limit(1e-4, 3e-5),
    "replay": Limit(1e-4, 3e-5),
    "page_scores": Limit(1e-4, 3e-5),
    "pages": Limit(1e-4, 3e-5),
    "lse": Limit(1e-4, 3e-5),
    "weight": Limit(1e-4, 3e-5),
    "loss": Limit(1e-5, 1e-5),
    "grad": Limit(1e-4, 1e-4),
    "grad_norm": Limit(1e-4, 1e-4),
    "step": Limit(1e-2, 1e-2),
    "step_norm": Limit(1e-2, 1e-2),
}
_BFLOAT16 = {
    "forward": Limit(0.5, 0.06),
    "score": Limit(1.5, 0.25),
    "replay": Limit(1.5, 0.25),
    "page_scores": Limit(0.5, 0.15),
    "pages": Limit(0.3, 0.05),
    "lse": Limit(1.0, 0.15),
    "weight": Limit(1.0, 0.06),
    "loss": Limit(0.05, 0.05),
    "grad": Limit(0.7, 0.7),
    "grad_norm": Limit(0.2, 0.2),
}


def limits_of(dtypes: tuple[str, str]) -> Mapping[str, Limit]:
    """Returns the limits for traces in these types, by stage or quantity.

    A quantity without a limit is not judged.
    """
    return _FLOAT32 if set(dtypes) == {"float32"} else _BFLOAT16


def judges_tokens(dtypes: tuple[str, str]) -> bool:
    """Returns True if the sampled tokens of traces in these types have to be the same."""
    return set(dtypes) == {"float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of a comparison.

    ok: None means that it is reported without a verdict. where: the first deviation beyond the
    limit.

    largest: over all entries; mean: of the layer where it is largest. layer: the first beyond.
    """

    name: str
    largest: float
    mean: float
    limit: Limit | None
    ok: bool | None
    layer: int = 0
    where: str = ""
    by_layer: Sequence[float] = ()


def row_of(
    name: str, dev: np.ndarray, limit: Limit | None, axes: Sequence[str], first_layer: int = 0,
    *, backward: bool = False,
) -> Row:  # fmt: skip
    """A row of deviations [axes], NaN = not compared. first_layer: number of the first layer.

    A layer fails when its largest or mean deviation exceeds the limit; without a layer axis the
    whole array counts as one layer. where names the first layer that fails (the last, if
    `backward`), and in it the first position beyond the limit, or else the worst position.
    """
    if np.isnan(dev).all():
        return Row(name=name, largest=0.0, mean=0.0, limit=limit, ok=None, where="not compared")
    layered = tuple(axes[:1]) == ("layer",)
    layers = dev.reshape(len(dev) if layered else 1, -1)
    filled = np.where(np.isnan(layers), 0.0, layers)
    largest, mean = filled.max(1), filled.sum(1) / np.maximum((~np.isnan(layers)).sum(1), 1)
    bad = np.zeros(0, int)
    if limit is not None:
        bad = np.flatnonzero((largest > limit.largest) | (mean > limit.mean))
    where, layer = "", 0
    if limit is not None and len(bad):
        layer = int(bad[-1] if backward else bad[0])
        where = _where(dev[layer] if layered else dev, limit.largest, axes[layered:])
        if layered:
            where = f"layer {layer + first_layer}{', ' * bool(where)}{where}"
    return Row(
        name=name, largest=float(largest.max()), mean=float(mean.max()), limit=limit,
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


def _gap(x: np.ndarray, y: np.ndarray, valid=True, *, void: bool = False) -> np.ndarray:
    """|x - y| where valid, else NaN; infinite where either is not finite, unless they are equal.

    void: NaN on both sides means that there was nothing to record.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(x == y, 0.0, np.abs(x - y))
    both = np.isnan(x) & np.isnan(y) & void
    gap = np.where(both, np.nan, np.where(np.isnan(gap), np.inf, gap))
    return np.where(valid, gap, np.nan)


def _sizes(x: np.ndarray, same_BT: np.ndarray) -> np.ndarray:
    """Size [L, B, T] of what stands at a position: its rms, or the layer's median if that is more.

    Not the layer's rms: in real models a few positions are a hundred times as large as the others.
    """
    square = np.asarray(x, np.float64) ** 2
    own = np.sqrt(square if x.ndim == 3 else square.mean(-1))
    valid = same_BT & np.isfinite(own)
    with np.errstate(invalid="ignore"):
        middle = [
            np.median(layer[ok]) if ok.any() else 0 for layer, ok in zip(own, valid, strict=True)
        ]
    return np.maximum(np.maximum(own, np.reshape(middle, (-1, 1, 1))), 1e-30)


def forward(a: Trace, b: Trace, same_BT: np.ndarray, limit: Limit) -> Iterator[Row]:
    """Activations of the dense pass."""
    for name in (f"forward/{kind}" for kind in FORWARD):
        if name in a and name in b:
            x, dev = a[name], _gap(a[name], b[name])
            dev = (dev.max(-1) if dev.ndim == 4 else dev) / _sizes(x, same_BT)
            dev = np.where(same_BT, dev, np.nan)
            yield row_of(name, dev, limit, ("layer", "row", "position"))


def score(a: Trace, b: Trace, same_BT: np.ndarray, limits: Mapping[str, Limit]) -> Iterator[Row]:
    """Log-probs, entropy, likeliest tokens; alpha and log-probs of the replay."""
    position = np.arange(same_BT.shape[1])
    response = same_BT & (position >= a["tokens/prompt_len"][:, None])
    names = {"score/logp": response, "score/entropy": response}
    names |= {"score/top_logp": same_BT & (position > 0)}
    names |= {"replay/alpha": response, "replay/logp": response}
    for name, valid in names.items():
        if name in a and name in b:
            dev = _gap(a[name], b[name])
            dev = np.where(valid, dev.max(-1) if dev.ndim == 3 else dev, np.nan)
            yield row_of(name, dev, limits[name.split("/")[0]], ("row", "position"))


def decode(a: Trace, b: Trace, same_BT: np.ndarray, limits: Mapping[str, Limit]) -> Iterator[Row]:
    """Scores, pages, log-sum-exp; what comes after pages that differ is not judged."""
    if "decode/pages" not in a or "decode/pages" not in b:
        return
    pages, scores, axes = a["decode/pages"], a["decode/page_scores"], ("layer", "row", "step")
    L, B, T = pages.shape[:3]
    dense = len(a["decode/lse"]) - L  # the first layers are always dense
    at_BT = np.minimum(a["tokens/prompt_len"][:, None] + np.arange(T), same_BT.shape[1] - 1)
    there_BT = np.take_along_axis(same_BT, at_BT, 1) & (pages[0, ..., 0, 0] != -1)
    square = np.where(np.isfinite(scores), np.float64(scores), np.nan) ** 2
    scale_L = np.maximum(np.sqrt(np.nanmean(square.reshape(L, -1), 1)), 1e-30).reshape(L, 1, 1, 1)
    differ = (pages != b["decode/pages"]).any(-1) & there_BT[..., None]
    before = _before(differ.any(-1))
    judged = there_BT & ~before  # scores come before the choice of pages, log-sum-exp after it
    dev = _gap(scores, b["decode/page_scores"], void=True) / scale_L[..., None]
    dev = np.where(np.isnan(dev), -1, dev).max((-1, -2))
    dev = np.where(judged[:, :, ::SCORES_EVERY] & (dev >= 0), dev, np.nan)
    row = row_of("decode/page_scores", dev, limits["page_scores"], axes, dense)
    yield _with_steps(row)
    # A gap beyond all others means that nothing was chosen; then no tie explains a difference.
    gap = np.minimum(*(np.abs(t["decode/page_gap"]) for t in (a, b))) / scale_L
    dev = np.where(judged[..., None], np.where(differ, gap, 0.0), np.nan)
    row = row_of("decode/pages", dev, limits["pages"], (*axes, "head"), dense)
    if differ.any():
        unseen = 1 - judged.sum() / np.maximum(L * there_BT.sum(), 1)
        share = f"{differ.mean():.2%} of the lists differ"
        share += "" if row.where else ", the first of each row by a tie"
        share += f"; {unseen:.0%} of decode comes after one and is not judged"
        row = dataclasses.replace(row, where=f"{row.where}; {share}" if row.where else share)
    yield row
    clean = judged & ~differ.any(-1)
    clean = np.concatenate([np.broadcast_to(clean[:1], (dense, B, T)), clean]) if dense else clean
    dev = _gap(a["decode/lse"], b["decode/lse"], clean[..., None], void=True)
    yield row_of("decode/lse", dev, limits["lse"], (*axes, "head"))


def _with_steps(row: Row) -> Row:
    """Scores are recorded now and then: the number of the record as that of the decode step."""
    head, word, step = row.where.partition("step ")
    return (
        dataclasses.replace(row, where=f"{head}{word}{int(step) * SCORES_EVERY}") if word else row
    )


def _before(differ_LBR: np.ndarray) -> np.ndarray:
    """True in deeper layers of a step where a list differed, and at all later steps of the row."""
    deeper = np.logical_or.accumulate(differ_LBR, axis=0)
    deeper = np.concatenate([np.zeros_like(deeper[:1]), deeper[:-1]])
    earlier_BR = np.logical_or.accumulate(differ_LBR.any(0), axis=1)
    return deeper | np.concatenate([np.zeros_like(earlier_BR[:, :1]), earlier_BR[:, :-1]], axis=1)


def train(a: Trace, b: Trace, limits: Mapping[str, Limit]) -> Iterator[Row]:
    """Importance weights, loss, and of each parameter the gradient and what a step adds to it."""
    if "grpo/loss" not in a or "grpo/loss" not in b:  # a backend that does not train
        return
    dev = _gap(a["grpo/weight"], b["grpo/weight"])
    yield row_of("grpo/weight", dev, limits["weight"], ("row", "position"))
    dev = _gap(a["grpo/loss"], b["grpo/loss"]) / np.maximum(a["grpo/scale"], 1e-30)
    yield row_of("grpo/loss", np.reshape(dev, 1), limits["loss"], ())
    for stage in ("grad", "step"):
        kinds = {"norm": f"{stage}_norm", "projection": stage}
        for name in a:
            head, _, kind = name.rpartition("/")
            if not name.startswith(stage + "/") or kind not in kinds or name not in b:
                continue
            norm = np.maximum(np.float64(a[f"{head}/norm"]), 1e-30)
            dev = _gap(a[name], b[name])
            dev = (dev.max(1) if dev.ndim == 2 else dev) / norm
            row = kinds[kind] + head.removeprefix(stage)
            axes = ("layer",) if "layers." in head else ("parameter",)
            yield row_of(row, dev, limits.get(kinds[kind]), axes, backward=stage == "grad")


def streams(a: Trace, b: Trace, limit: Limit, judges_tokens: bool) -> Iterator[Row]:
    """Of each stream the engine's log-probs, up to where a row parts, and the share that parted."""
    for name in (f"stream/{kind}" for kind in STREAMS):
        if f"{name}/tokens" not in a or f"{name}/tokens" not in b:
            continue
        same = np.logical_and.accumulate(a[f"{name}/tokens"] == b[f"{name}/tokens"], axis=1)
        dev = _gap(a[f"{name}/logp"], b[f"{name}/logp"], same)
        yield row_of(f"{name}/logp", dev, limit, ("row", "token"))
        parted = np.flatnonzero(~same.all(1))
        where = f"{int(same.sum()):,} tokens alike"
        if len(parted):
            first = int(same.sum(1)[parted].min())
            where = f"{len(parted)} of {len(same)} rows part, the first at token {first}; {where}"
        share = 1 - float(same.mean())
        yield Row(
            name=name, largest=share, mean=share, where=where,
            limit=Limit(0.0, 0.0) if judges_tokens else None,
            ok=not len(parted) if judges_tokens else None,
        )  # fmt: skip
