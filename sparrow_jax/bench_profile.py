"""`sparrow bench profile`: a profile of four budgets against five dense passes, timed in one run.

Both are compiled before they are timed. A dense pass gives the log-prob of every token. The profile
runs one dense pass, and for each budget a sparse pass and the exact overlap of the two.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config, overrides
from common.mismatch.batched_scorer import Overlap
from common.records.progress import Progress
from sparrow_jax.backend import build_scorer

BUDGETS = (4, 12, 29, 61)


def run(model: Path, *, num_tokens: int = 4096, budgets: Sequence[int] = BUDGETS) -> dict[str, Any]:
    """Seconds of both on random tokens, their ratio, and the peak memory of the process in GiB."""
    scorer, geometry, where = build_scorer(overrides.apply(Config(), {"model.path": str(model)}))
    rng, one = np.random.default_rng(0), np.float32(1)
    tokens = rng.integers(0, geometry.vocab_size, (1, num_tokens)).astype(np.int32)
    arrays = [np.full(num_tokens, k, np.int32) for k in budgets]
    seconds: dict[str, list[float]] = {"dense": [], "profile": []}

    def dense() -> None:
        scorer.score(tokens, one)

    def profile(of: list[np.ndarray]) -> list[Overlap]:
        return list(scorer.overlaps(tokens, np.ones(tokens.shape, bool), of, one))

    with Progress("bench") as progress:
        dense()
        profile(arrays[:1])
        for i in range(5):
            seconds["dense"].append(_timed(dense))
            progress(i + 1, 6)
        seconds["profile"].append(_timed(lambda: profile(arrays)))
        progress(6, 6)
    dense_s, profile_s = (sum(seconds[name]) for name in ("dense", "profile"))
    return {
        "where": where,
        "tokens": num_tokens,
        "budgets": list(budgets),
        "five_dense_passes_s": dense_s,
        "profile_s": profile_s,
        "ratio": profile_s / dense_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def show(r: Mapping[str, Any]) -> str:
    """One line of text for the console."""
    return (
        f"{r['where']}: {r['tokens']} tokens, budgets {r['budgets']}: {r['profile_s']:.1f} s; five "
        f"dense passes {r['five_dense_passes_s']:.1f} s; ratio {r['ratio']:.2f} (goal: at most 3); "
        f"peak {r['peak_gib']:.2f} GiB (goal: at most 4)"
    )


def _timed(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
