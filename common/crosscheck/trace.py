"""Record what a backend computes (`sparrow trace`), for a comparison by `sparrow compare`.

The stages are in the order of computation, and an error in one shows in all later ones:

    stream    greedy tokens, and sampled ones by dense and by sparse decode, with their log-probs
    forward   a dense pass over given tokens: of each layer and position the projections
              (common/crosscheck/sketch.py) of q and k after RoPE, v, the attention's output, the
              hidden state after the block, and that state's norm
    score     dense log-probs at the sampling temperature, entropy, the 20 likeliest tokens
    replay    alpha and sparse log-probs of the same tokens
    decode    common/crosscheck/trace_decode.py: page scores, pages, log-sum-exp
    grpo      loss of one GRPO step with made-up rewards (1 for the first sample of a prompt, 0 for
              the second), and the sum of the sizes of its terms as its scale
    grad      norm and projections of the gradient of each parameter and layer
    step      the same of the change that one optimizer step makes; checksum of the new weights

The given tokens are those that this backend's sparse decode samples, or those of another trace.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.config import Config
from common.crosscheck import sketch, trace_decode, trace_file, trace_setup
from common.crosscheck.trace_file import TraceWriter
from common.errors import UserError
from common.model import hf, hf_config
from common.objective.prepare import prepare_batch
from common.protocols import Scorer
from common.records.progress import Progress
from common.schedule.schedule import NUM_RESERVED, Schedule
from common.types import Prompt, Rollout, Scored, TrainBatch

FACTS = {"q": "q", "k": "k", "v": "v", "a": "attention", "x": "block"}
"""Name in a trace of each intermediate result that `hidden(observe=...)` of a model gives."""
TOP = 20
"""Number of likeliest tokens in the stage score."""


class Update(NamedTuple):
    """One optimizer step: loss per token, pairs (name, gradient), a call for the new weights."""

    loss: float
    gradients: Iterator[tuple[str, np.ndarray]]
    weights: Callable[[], Mapping[str, np.ndarray]]


class Tracer(Protocol):
    """Interface of a backend's tracer; its module offers `build(config) -> Tracer`.

    It has the weights of model.path. generate: that of RolloutEngine; None where a backend only
    decodes greedily. decoder: makes a cache with page table table_BP and a page list of
    max_selected entries; None where a backend has no paged cache. update: one optimizer step; None
    where a backend does not train.
    """

    description: Mapping[str, str]
    scorer: Scorer
    generate: Callable[..., Rollout] | None
    decoder: Callable[[np.ndarray, int], trace_decode.Cache] | None
    update: Callable[[TrainBatch], Update] | None

    def greedy(self, prompts: list[Prompt], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, T] of greedy decoding."""
        ...

    def forward(self, tokens_BT: np.ndarray) -> Mapping[str, np.ndarray]:
        """Facts [L, B, T, ...] of a dense pass, by name."""
        ...

    def top(self, tokens_BT: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 is void."""
        ...


def trace(
    config: Config, backend: str, prompts: Path, out: Path, *, force: Path | None, num_prompts: int,
    prompt_tokens: int, num_tokens: int,
) -> None:  # fmt: skip
    """Write the trace of one backend to `out`.

    prompts: text, .json token ids, or task rows (.jsonl, .parquet); num_prompts of them are taken,
    each cut to prompt_tokens. num_tokens: number of tokens sampled after each. force: a trace; the
    stages after stream take its tokens. Raises UserError if the configuration cannot run, and if
    `force` has other prompts or weights.
    """
    package = trace_setup.find(backend)
    trace_setup.refuse_without_effect(config)
    schedule = trace_setup.schedule_of(config)
    least = (min(schedule.budgets) + NUM_RESERVED + 1) * schedule.page_size
    read = trace_setup.read_prompts(config, prompts, num_prompts, prompt_tokens, least=least)
    config = trace_setup.sized(config, backend, read, num_tokens)
    longest = config.rollout.max_prompt_tokens + num_tokens
    hf_config.check_context(config.model.path, longest, f"--num_tokens={num_tokens}")
    geometry, weights = hf.load(config.model.path)
    if config.rollout.num_dense_layers >= geometry.num_layers:
        raise UserError(
            f"rollout.num_dense_layers={config.rollout.num_dense_layers}: the model has "
            f"{geometry.num_layers} layers, none would be sparse; lower it"
        )
    highest = max(int(p.tokens.max()) for p in read)
    if highest >= geometry.vocab_size:
        raise UserError(f"--prompts={prompts}: has token {highest}, the model has "
                        f"{geometry.vocab_size}; expected ids of this model")  # fmt: skip
    meta = {
        "backend": backend,
        "model_checksum": trace_file.checksum(weights),
        "prompts_checksum": trace_file.checksum((str(p.prompt_id), p.tokens) for p in read),
        "settings": trace_setup.settings(config, schedule, num_tokens),
    }
    forced = trace_setup.forced_tokens(force, meta, read, num_tokens, geometry.vocab_size)
    with TraceWriter(out) as file, Progress(f"trace {backend}") as progress:
        tracer = importlib.import_module(package).build(config)
        print(f"{backend}: " + ", ".join(f"{k} {v}" for k, v in tracer.description.items()))
        stages = _stages(tracer, config, read, schedule, num_tokens, forced)
        total = 4 + 4 * bool(tracer.decoder) + 3 * bool(tracer.update)
        for i, (stage, arrays) in enumerate(stages):
            file.put_all(stage, arrays)
            progress(i + 1, total)
        given = str(force) if force else "its own"
        file.finish(
            {**tracer.description, **meta, "tokens": given, "config": dataclasses.asdict(config)}
        )
    print(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MiB)")


def _stages(
    tracer: Tracer, config: Config, prompts: list[Prompt], schedule: Schedule, num_tokens: int,
    forced: Mapping[str, np.ndarray] | None,
) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:  # fmt: skip
    """(name, arrays) of each stage, when it is done."""
    tokens, logp = tracer.greedy(prompts, num_tokens)
    yield "stream/greedy", {"tokens": tokens, "logp": logp}
    rollout = None
    if tracer.generate is not None:
        for name, kind in (("dense", None), ("sparse", schedule)):
            rollout = tracer.generate(
                prompts, num_samples=trace_setup.SAMPLES, schedule=kind, seed=config.rollout.seed
            )
            yield f"stream/{name}", responses(rollout)
    if forced is not None:
        rollout = _as_rollout(prompts, forced)
    elif rollout is not None:
        rollout = _uneven(rollout)
    else:
        raise UserError("this backend does not sample; give --force_tokens=TRACE of one that does")
    tokens_BT = rollout.tokens_BT
    lengths = {"prompt_len": rollout.prompt_len_B, "total_len": rollout.total_len_B}
    yield "tokens", {"tokens": tokens_BT, "logp": rollout.logp_sparse_BT, **lengths}
    yield "forward", tracer.forward(tokens_BT)
    scored = tracer.scorer.logprobs(rollout)
    ids, top = tracer.top(tokens_BT, TOP)
    found = {"logp": scored.logp_dense_BT, "entropy": scored.entropy_BT}
    yield "score", {**found, "top_ids": ids, "top_logp": top}
    if tracer.decoder is not None:
        replay = tracer.scorer.replay(rollout, np.arange(len(tokens_BT)), schedule)
        yield "replay", {"alpha": replay.alpha_BT, "logp": replay.logp_replay_BT}
        table_BP = trace_decode.tables(*tokens_BT.shape, schedule.page_size)
        cache = tracer.decoder(table_BP, trace_decode.plan(schedule, table_BP.shape[1]))
        chunk = config.rollout.prefill_chunk
        yield (
            "decode",
            trace_decode.run(cache, tokens_BT, *lengths.values(), schedule=schedule, chunk=chunk),
        )
    if tracer.update is not None:
        yield from _train(tracer, config, rollout, scored)


def _train(
    tracer: Tracer, config: Config, rollout: Rollout, scored: Scored
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The stages grpo, grad and step: steps 5 and 7 of common/loop.py, with made-up rewards."""
    rewards = 1.0 - rollout.sample_B % 2
    prepared = prepare_batch(
        rollout,
        scored,
        rewards,
        config,
        reject_seed=config.rollout.seed,
        shuffle_seed=0,
        greedy_reward_B=np.full(len(rewards), 0.5),
    )
    batch, correction = prepared.batch, prepared.correction
    if not batch.minibatches[0]:
        raise UserError(
            f"grpo.correction={config.grpo.correction} drops every token here; widen "
            "grpo.correction_low and correction_cap, or take another"
        )
    assert tracer.update is not None, "stages asks first"
    update = tracer.update(batch)
    size = sum(
        np.abs(np.float64(m.scale_BT) * m.weight_BT * m.advantage_BT).sum()
        for m in batch.minibatches[0]
    )
    yield (
        "grpo",
        {
            "loss": np.float64(update.loss),
            "scale": size / batch.denominators[0],
            "weight": correction.weight_BT,
        },
    )
    yield "grad", _sketches(update.gradients)
    try:
        weights = update.weights()
    except UserError as error:  # a gradient that is not finite: the rest of the trace shows where
        print(f"no optimizer step: {error}")
        return
    before = hf.load(config.model.path)[1]
    yield (
        "step",
        {
            **_sketches((name, weights[name] - x) for name, x in before),
            "checksum": np.array(trace_file.checksum((n, weights[n]) for n in sorted(weights))),
        },
    )


def _sketches(pairs: Iterator[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Norm and projections of parameters by layer; one without layers counts as a single layer."""
    out = {}
    for name, x in pairs:
        norm, projection = sketch.of_parameter(x if name.startswith("layers.") else x[None])
        out |= {f"{name}/norm": norm, f"{name}/projection": projection}
    return out


def responses(rollout: Rollout) -> dict[str, np.ndarray]:
    """Sampled tokens and their log-probs, [B, T]; every row must have T tokens."""
    columns = rollout.prompt_len_B[:, None] + np.arange(
        int((rollout.total_len_B - rollout.prompt_len_B).max())
    )
    pick = lambda x: np.take_along_axis(x, columns, 1)  # noqa: E731
    return {"tokens": pick(rollout.tokens_BT), "logp": pick(rollout.logp_sparse_BT)}


def _uneven(rollout: Rollout) -> Rollout:
    """The rows cut to four lengths; equal lengths would hide faults of padding and averaging."""
    start, N = rollout.prompt_len_B, rollout.total_len_B - rollout.prompt_len_B
    kept = np.maximum(N - np.arange(len(N)) % 4 * N // 6, 1)
    end = np.minimum(rollout.total_len_B, start + kept).astype(np.int32)
    there = np.arange(rollout.tokens_BT.shape[1]) < end[:, None]
    return dataclasses.replace(
        rollout,
        tokens_BT=np.where(there, rollout.tokens_BT, 0),
        response_mask_BT=rollout.response_mask_BT & there,
        logp_sparse_BT=np.where(there, rollout.logp_sparse_BT, 0).astype(np.float32),
        total_len_B=end,
        version_BT=np.where(there, rollout.version_BT, -1),
        finished_B=np.ones(len(N), bool),  # so that grpo.overlong applies to none
    )


def _as_rollout(prompts: list[Prompt], forced: Mapping[str, np.ndarray]) -> Rollout:
    """The tokens of another trace as a rollout."""
    tokens, start, end = forced["tokens"], forced["prompt_len"], forced["total_len"]
    B, position = len(tokens), np.arange(tokens.shape[1])
    mask = (position >= start[:, None]) & (position < end[:, None])
    return Rollout(
        prompts=[p for p in prompts for _ in range(trace_setup.SAMPLES)],
        group_B=np.arange(B, dtype=np.int32) // trace_setup.SAMPLES,
        sample_B=np.arange(B, dtype=np.int32) % trace_setup.SAMPLES,
        tokens_BT=tokens,
        response_mask_BT=mask,
        logp_sparse_BT=forced["logp"],
        sparse_BT=mask & (position > start[:, None]),
        prompt_len_B=start,
        total_len_B=end,
        finished_B=np.ones(B, bool),
        version_BT=np.where(mask, 0, -1).astype(np.int32),
        stats={},
    )


def greedy(
    generate: Callable[..., Rollout], prompts: list[Prompt]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs [B, T] of an engine's greedy decode, for Tracer.greedy."""
    rollout = generate(prompts, num_samples=1, schedule=None, seed=0, temperature=0.0)
    tokens_BN, logp_BN = responses(rollout).values()
    return tokens_BN, logp_BN


def loss_of(totals: list[float], batch: TrainBatch) -> float:
    """Loss per token from the summed losses of the micro-batches."""
    return math.fsum(totals) / batch.denominators[0]
