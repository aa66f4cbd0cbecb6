"""Measure the acceptance rate on given text: every position is replayed, and nothing is sampled."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.mismatch.acceptance import BinStats
from common.model import hf_config
from common.profile import profile_page
from common.profile.kept_parts import KeptParts, weights_stamp
from common.profile.profile_rows import Measured, Profile
from common.protocols import Scorer
from common.records import stopping
from common.records.progress import Progress
from common.records.run_dir import atomic_write_text
from common.schedule.schedule import DENSE, Schedule, fixed
from common.setup import build_scorer, engine_package
from common.tasks import chat

VECTORS = {"mean": 1, "quest": 2, "window": 0, "random": 0, "oracle": 0}
"""Key vectors per page that a query reads to choose its pages. The choice of "oracle" costs
nothing, which no real rule can have: it is an upper bound of what any rule could reach."""
BLOCK_TOKENS = 64
"""Tokens of a block of text. Intervals treat blocks as independent, since a text has no prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text as consecutive, equally long sequences of token ids, int32 [W, T]."""

    name: str
    tokens_WT: np.ndarray


def profile_text(
    config: Config, text: Path, out: Path, *, max_tokens: int, sequences: int,
    names: Sequence[str], top: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Profiles by policy, written to `out` (of several policies: to OUT-POLICY.json), with a page.

    Every budget of mismatch.budgets at every position of the text, against one dense pass; other
    policies than "mean" at budgets of equal bytes (equal_bytes). top: also estimate alpha
    from that number of top log-probs (20 in the paper); 0 = no. A stopped profile is resumed.
    """
    for name in names:
        if name not in VECTORS or names.count(name) > 1:
            known = ", ".join(VECTORS)
            raise UserError(f"--policy={','.join(names)}: {name!r}; expected each once, of {known}")
    form = {"page_size": config.rollout.page_size, "bin_tokens": config.mismatch.bin_tokens}
    uniform: dict[int | str, Schedule]
    uniform = {k: fixed(min(k, DENSE), **form) for k in config.mismatch.budgets}
    how = {"max_tokens": max_tokens, "sequences": sequences, "names": names, "top": top}
    with measured(config, text, out, uniform, **how) as (read, found):
        records = {}
        for name in names:
            path = out if len(names) == 1 else out.with_stem(f"{out.stem}-{name}")
            records[name] = _write(config, read, name, found[name], path)
    if len(names) > 1:
        print(compare(records, config.mismatch.budgets))
    return records


@contextlib.contextmanager
def measured(
    config: Config, text: Path, out: Path, schedules: Mapping[int | str, Schedule], *,
    max_tokens: int, sequences: int, names: Sequence[str] = ("mean",), top: int = 0,
) -> Iterator[tuple[Text, dict[str, list[Measured]]]]:  # fmt: skip
    """The text, and alpha at every position of it by policy, in the order of `schedules`.

    Parts are kept beside `out` until the block ends without an error, i.e. `out` is written.
    """
    engine_package(config)  # refuses an engine that is not installed before anything is read
    read = read_text(config, text, max_tokens, sequences)
    scorer, geometry, where = build_scorer(config)
    if read.tokens_WT.max() >= geometry.vocab_size:
        raise UserError(f"--replay={text}: has token {read.tokens_WT.max()}, the model has "
                        f"{geometry.vocab_size}; expected ids of this model")  # fmt: skip
    if top > geometry.vocab_size:
        raise UserError(f"--estimate={top}: the model has {geometry.vocab_size} tokens")
    print(f"{read.name}; {where}")
    key = [hashlib.sha256(read.tokens_WT.tobytes()).hexdigest(), where, top,
           [[name, s.bin_tokens, s.budgets] for name, s in schedules.items()],
           dataclasses.asdict(config), weights_stamp(config.model.path)]  # fmt: skip
    with KeptParts(out, key) as parts:
        yield read, _measure(config, scorer, read.tokens_WT, schedules, names, top, parts)


def read_text(config: Config, path: Path, max_tokens: int, sequences: int) -> Text:
    """A text file by the model's tokenizer, or a .json list of token ids, cut into sequences.

    UserError for a file that is neither, that is shorter than a sequence needs, and for sequences
    that are longer than the model's context.
    """
    if not config.model.path:
        raise UserError("--replay needs --model=DIR, a Hugging Face model directory")
    hf_config.read_geometry(config.model.path)  # raises UserError for a directory without a model
    hf_config.check_context(config.model.path, max_tokens, f"--max_tokens={max_tokens}")
    ids = _ids(config, path)
    least = 4 * config.rollout.page_size
    T = min(max_tokens, len(ids))
    if T < least:
        raise UserError(f"--replay={path}: {T} tokens; expected {least}, four pages, or more")
    W = min(sequences, len(ids) // T)
    return Text(
        name=f"{path.name}, {W} sequence{'s' * (W > 1)} of {T} tokens",
        tokens_WT=np.array(ids[: W * T], np.int32).reshape(W, T),
    )


def _ids(config: Config, path: Path) -> list[int]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--replay={path}: is no UTF-8 text ({error.reason})") from None
    if path.suffix != ".json":
        codec = chat.load_codec(config.task.tokenizer, config.model.path)
        return codec.tokenizer.encode(content, add_special_tokens=False).ids
    try:
        ids = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--replay={path}: is no JSON ({error})") from None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise UserError(f"--replay={path}: expected one JSON list of token ids")
    return ids


def _measure(
    config: Config, scorer: Scorer, tokens_WT: np.ndarray, schedules: Mapping[int | str, Schedule],
    names: Sequence[str], top: int, parts: KeptParts,
) -> dict[str, list[Measured]]:  # fmt: skip
    """alpha of every policy and budget; sequences in groups of as many as the devices share."""
    mesh = config.learner.mesh
    W, T = tokens_WT.shape
    group = mesh[0] * mesh[1] if W % (mesh[0] * mesh[1]) == 0 else 1
    temperature = np.float32(config.rollout.temperature)
    budgets = {k: schedule.budgets_at(np.arange(T)) for k, schedule in schedules.items()}
    found: dict[tuple[str, int | str], list[Any]] = {}
    with Progress("profile") as progress:
        total = len(names) * len(budgets) * (W // group)
        for first in range(0, W, group):
            rows = tokens_WT[first : first + group]
            for name in names:
                part = {k: parts.get(f"{name}-{k}-{first}") for k in budgets}
                missing = [k for k in budgets if part[k] is None]
                arrays = [equal_bytes(name, budgets[k], config.rollout.page_size)
                          for k in missing]  # fmt: skip
                passes = scorer.overlaps(
                    rows, np.ones(rows.shape, bool), arrays, temperature, policy=name, top=top
                )
                for k in budgets:
                    stopping.check()
                    if part[k] is None:
                        out = {f: x for f, x in next(passes)._asdict().items() if x is not None}
                        parts.put(f"{name}-{k}-{first}", **out)
                        part[k] = out
                    found.setdefault((name, k), []).append(part[k])
                    progress(sum(map(len, found.values())), total)
    return {name: [_join(k, found[name, k]) for k in budgets] for name in names}


def _join(k: int | str, pieces: list[Any]) -> Measured:
    """All sequences of one budget; token 0 of each is given, not predicted."""
    alpha_WT = np.concatenate([piece["alpha_BT"] for piece in pieces])
    mask = np.ones(alpha_WT.shape, bool)
    mask[:, 0] = False
    estimate = None
    if "estimate_BT" in pieces[0]:
        estimate = np.concatenate([piece["estimate_BT"] for piece in pieces])
    return Measured(
        k=k,
        alpha_BT=np.clip(alpha_WT, 0, 1),
        mask_BT=mask,
        group_B=np.arange(len(mask)),
        estimate_BT=estimate,
    )


def _write(
    config: Config, text: Text, policy: str, budgets: list[Measured], out: Path
) -> dict[str, Any]:
    profile = Profile(
        config, model=config.model.path, source=text.name, policy=policy, block=BLOCK_TOKENS
    )
    print(f"policy {policy}\n{HEADER}")
    for measured in budgets:
        for row in profile.add(measured):
            print(_line(measured.k, row))
    record = profile.record()
    atomic_write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    page = out.with_suffix(".html")
    profile_page.write(record, page)
    print(f"wrote {out} and {page}")
    return record


HEADER = (
    f"{'k':>5} {'positions':>13} {'p1':>6} {'p5':>6} {'95 % of p5':>15} {'p50':>6} {'mean':>6} "
    f"{'> 0.999':>7} {'tokens':>7}"
)


def _line(k: int | str, s: BinStats) -> str:
    few = "" if s.enough else "  too few to be judged"
    return (
        f"{k:>5} {s.start:>6}-{s.end:<6} {s.p1:6.3f} {s.p5:6.3f} {s.p5_low:7.3f}-{s.p5_high:<7.3f} "
        f"{s.p50:6.3f} {s.mean:6.4f} {s.share_above_0_999:7.1%} {s.count:>7}{few}"
    )


def compare(records: dict[str, dict[str, Any]], budgets: Sequence[int]) -> str:
    """p5 of each policy at equal bytes, the lowest and the highest of the judged bins."""
    lines = ["p5 of alpha at the bytes that `mean` reads with k, lowest to highest judged bin",
             f"{'policy':>8} " + " ".join(f"{f'k = {k}':>15}" for k in budgets)]  # fmt: skip
    for name, record in records.items():
        cells = []
        for k in budgets:
            p5 = [row["p5"] for row in record["rows"] if row["k"] == k and row["enough"]]
            cells.append(f"{min(p5):.3f} to {max(p5):.3f}" if p5 else "-")
        lines.append(f"{name:>8} " + " ".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def equal_bytes(policy: str, budget_T: np.ndarray, page_size: int) -> np.ndarray:
    """Budgets int32 [T] with which a query at position t reads the bytes that "mean" reads with
    budget_T[t]; whole pages, rounded down, at least 0.

    A page is 2 C vectors (C keys and C values), and there are n = t // C + 1 pages to choose from:
    k' = floor(k + n (1 - v) / 2C) with v vectors per page.
    """
    n_T = np.arange(len(budget_T)) // page_size + 1
    pages_T = n_T * (1 - VECTORS[policy]) // (2 * page_size)
    return np.maximum(np.int64(budget_T) + pages_T, 0).astype(np.int32)
