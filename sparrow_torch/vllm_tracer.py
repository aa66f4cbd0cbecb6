"""What vLLM computes, for `sparrow trace --backend=vllm`.

vLLM as it is: its own models and attention over its own paged cache, in this process, eagerly.
Greedy tokens and their log-probs are what it returns to a user; what its layers and its head
compute is seen by hooks while it prefills the given tokens, one row at a time. It decodes densely
and samples with noise of its own, so it takes the tokens of another trace, and it does not train.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from common.config import Config
from common.errors import UserError, one_line
from common.mismatch.batched_scorer import BatchedScorer
from common.model import hf_config
from sparrow_torch import tracer
from sparrow_torch.backend import compute_dtype
from sparrow_torch.scorer import align

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model has to be within reach of hooks
    "TORCHDYNAMO_DISABLE": "1",  # eagerly means all of it, as hooks see nothing that is compiled
    "TRITON_F32_DEFAULT": "ieee",  # float32 products on a GPU in float32, not in TF32
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Of the environment, before vLLM is imported."""


def build(config: Config) -> VllmTracer:
    """The model of model.path in an engine that holds all rows of the trace.

    UserError for what this build of vLLM cannot run: on a CPU, heads other than 32, 64 or 128 wide.
    """
    os.environ.update(SETTINGS)
    import vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = compute_dtype(config.learner.dtype, device)
    geometry, (T,) = hf_config.read_geometry(config.model.path), config.learner.length_buckets
    rows, length = config.rollout.num_slots, T + 1  # a row is prefilled for the sake of one token
    token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize
    with _refusing():
        llm = vllm.LLM(
            config.model.path, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, seed=0,
            enable_prefix_caching=False, max_model_len=length, max_num_seqs=rows,
            max_num_batched_tokens=max(rows, length),
            kv_cache_memory_bytes=2 * token * rows * (length + 256),  # 256: more than any page
            gpu_memory_utilization=0.1,  # asks for so much free memory, and for no more
            hf_overrides={"max_position_embeddings": length},
        )  # fmt: skip
    return VllmTracer(llm, config)


class VllmTracer:
    """Tracer of common/crosscheck/trace.py."""

    generate = decoder = update = None

    def __init__(self, llm: Any, config: Config):
        import vllm

        self._llm, self._how = llm, vllm.SamplingParams
        (self.model,) = llm.apply_model(lambda model: model)
        self.config, self.scorer = config, VllmScorer(self, config)
        weight = next(self.model.parameters())
        self.description = tracer.describe(weight.device, weight.dtype)
        self.description["versions"]["vllm"] = vllm.__version__
        attention = self.model.model.layers[0].self_attn.attn
        self.description["attention"] = attention.attn_backend.get_name()

    def _run(self, prompts: Sequence[np.ndarray], num_tokens: int, **asked) -> list[Any]:
        """vLLM's answers, greedy and of just so many tokens."""
        given = [{"prompt_token_ids": np.asarray(tokens).tolist()} for tokens in prompts]
        how = self._how(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **asked
        )
        with _refusing():
            return self._llm.generate(given, how, use_tqdm=False)

    def greedy(self, prompts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, N], all prompts at once."""
        answers = [out.outputs[0] for out in self._run(
            [p.tokens for p in prompts], num_tokens, logprobs=0)]  # fmt: skip
        logp = [[at[t].logprob for t, at in zip(a.token_ids, a.logprobs, strict=True)]
                for a in answers]  # fmt: skip
        return np.array([list(a.token_ids) for a in answers], np.int32), np.asarray(
            logp, np.float32
        )

    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        """Facts of each layer; q and k are seen as attention gets them, after RoPE."""
        rows = []
        for row_T in tokens_BT:
            hooks, seen = _watch(self.model.model.layers)
            with tracer.removing(hooks):
                self._run([row_T], 1)
            rows.append(tracer.stacked([tracer.facts_of_layer(**facts) for facts in seen]))
            _expect(len(row_T), rows[-1]["block"].shape[2], "a forward pass")
        return tracer.joined(rows)

    def logits(self, row_T) -> torch.Tensor:
        """Logits [T - 1, V] from which vLLM takes the log-probs of a prompt."""
        seen: list[torch.Tensor] = []
        hook = self.model.logits_processor.register_forward_hook(
            lambda _, x, y: seen.append(y.clone())
        )
        with tracer.removing([hook]):
            self._run([row_T], 1, prompt_logprobs=0)
        logits = torch.cat(seen[1:])  # after that of the token it samples, in one or more pieces
        _expect(len(row_T) - 1, len(logits), "logits of a prompt")
        return logits

    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        logits = (self.logits(row_T) for row_T in tokens_BT)
        return tracer.top_tokens(logits, self.config.rollout.temperature, number)


class VllmScorer(BatchedScorer):
    """Dense log-probs, from vLLM's logits; there is no sparse pass to replay."""

    def __init__(self, owner: VllmTracer, config: Config):
        super().__init__(config)
        self._logits = owner.logits

    def score(self, tokens_BT, temperature):
        tokens = torch.as_tensor(np.asarray(tokens_BT)).long()
        found = []
        for row_T in tokens:
            logits = self._logits(row_T)
            targets = row_T[1:].to(logits.device)
            found.append(tracer.chosen_and_entropy(logits, targets, float(temperature)))
        return [align(torch.cat(x).cpu(), tokens).numpy() for x in zip(*found, strict=True)]

    def overlaps(self, *args, **kwargs):
        raise NotImplementedError("vLLM's own models have no block-sparse pass")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What this build of vLLM cannot do, in one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UserError(f"vllm cannot run this model here: {one_line(error)}") from error


def _expect(wanted: int, found: int, what: str) -> None:
    """What hooks see depends on how vLLM works within: better none than half of it."""
    if found != wanted:
        raise UserError(f"vllm: {found} positions seen in {what}, expected {wanted}; "
                        "this version of vLLM cannot be traced")  # fmt: skip


def _watch(layers: Sequence[Any]) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Hooks on decoder layers, and the facts of each layer that they will have seen, [1, T, ...].

    Copies: vLLM goes on to change some of its tensors in place.
    """
    hooks, seen = [], []
    for layer in layers:
        facts: dict[str, torch.Tensor] = {}

        def attend(_, given, facts=facts):
            facts |= {name: x[None].clone() for name, x in zip("qkv", given, strict=True)}

        def project(_, given, facts=facts):
            facts["a"] = given[0][None].clone()

        def leave(_, given, made, facts=facts):
            facts["x"] = functools.reduce(torch.add, made)[
                None
            ]  # of the MLP, and what goes past it

        attention = layer.self_attn
        hooks += [
            attention.attn.register_forward_pre_hook(attend),
            attention.o_proj.register_forward_pre_hook(project),
            layer.register_forward_hook(leave),
        ]
        seen.append(facts)
    return hooks, seen
