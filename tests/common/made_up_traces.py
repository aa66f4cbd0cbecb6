"""Traces made up for the judge's tests: small, whole, and easy to change in one place."""

import numpy as np

from common.crosscheck import compare, deviations
from common.crosscheck.trace_file import Trace, TraceWriter

L, B, T, PROMPT, R, K, J, P, N = 3, 2, 12, 8, 4, 2, 5, 9, 4
META = {
    "backend": "jax", "model_checksum": "m", "prompts_checksum": "p", "dtype": "float32",
    "settings": {"seed": 0, "temperature": 1.0}, "device": "cpu", "versions": {"numpy": "2"},
    "config": {"mismatch": {"bin_tokens": 5}},
}  # fmt: skip


def facts():
    """A trace's arrays: three layers of which the first is dense, two rows of 8 + 4 tokens."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pages = np.sort(rng.permuted(np.tile(np.arange(P), (L - 1, B, R, K, 1)), axis=-1)[..., :J])
    arrays = {
        "tokens/tokens": rng.integers(0, 50, (B, T)),
        "tokens/prompt_len": np.full(B, PROMPT),
        "tokens/total_len": np.array([T, T - 1]),
        "tokens/logp": -abs(draw(B, T)),
        "score/logp": -abs(draw(B, T)),
        "score/entropy": abs(draw(B, T)),
        "score/top_ids": rng.permuted(np.tile(np.arange(50), (B, T, 1)), axis=-1)[..., :20],
        "score/top_logp": np.log(np.full((B, T, 20), 0.04, np.float32)),
        "replay/alpha": np.full((B, T), 0.9, np.float32),
        "replay/logp": -abs(draw(B, T)),
        "decode/page_scores": draw(L - 1, B, 1, K, P),
        "decode/pages": pages.astype(np.int16),
        "decode/page_gap": abs(draw(L - 1, B, R, K)) + 0.5,
        "decode/lse": draw(L, B, R, N),
        "grpo/loss": np.float64(0.25),
        "grpo/scale": np.float64(1.0),
        "grpo/weight": np.ones((B, T), np.float32),
        "stream/greedy/tokens": rng.integers(0, 50, (B, R)),
        "stream/greedy/logp": -abs(draw(B, R)),
    }
    for name in deviations.FORWARD:
        shape = (L, B, T) if name == "block_norm" else (L, B, T, 2)
        arrays[f"forward/{name}"] = 3 * draw(*shape)
    for stage in ("grad", "step"):
        arrays[f"{stage}/layers.q_LDNH/norm"] = np.full(L, 2.0)
        arrays[f"{stage}/layers.q_LDNH/projection"] = np.ones((L, 2))
    return arrays


def write(path, change=None, **meta):
    """A trace at `path`; change(arrays): what differs from facts(), meta: from META."""
    arrays = {key: np.array(x) for key, x in facts().items()}
    if change:
        change(arrays)
    with TraceWriter(path) as file:
        for key, x in arrays.items():
            file.put(key, x)
        file.finish(META | meta)
    return Trace(path)


def judged(write, change, **meta):
    result = compare.compare(write("a", **meta), write("b", change, **meta))
    return result, {row.name: row for row in result.rows}
