"""Records what vLLM computes: `sparrow trace --backend=vllm`.

vLLM runs unchanged, with its own models and attention over its own paged cache, in this process and
in eager mode. Greedy tokens and their log-probs are those that it returns to a user. Hooks record
what its layers and its head compute while it prefills the given tokens, one row at a time. It
decodes densely and has its own sampling noise, so it takes the tokens of another trace, and it does
not train.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # hooks need the model in this process
    "TORCHDYNAMO_DISABLE": "1",  # hooks cannot reach into compiled code
    "TRITON_F32_DEFAULT": "ieee",  # float32 products on a GPU in float32, not TF32
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables, which have to be set before vLLM is imported."""


def build(config: Config) -> VllmTracer:
    """A tracer of the model in model.path, in an engine that holds all rows of the trace.

    Raises: UserError if this build of vLLM cannot run the model; on a CPU it needs a head_dim of
    32, 64 or 128.
    """
    os.environ.update(SETTINGS)
    import vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = compute_dtype(config.learner.dtype, device)
    geometry, (T,) = hf_config.read_geometry(config.model.path), config.learner.length_buckets
    rows = config.rollout.num_slots
    length = T + 1  # vLLM samples at least one token after a prefill
    token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize
    with _refusing():
        llm = vllm.LLM(
            config.model.path, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, seed=0,
            enable_prefix_caching=False, max_model_len=length, max_num_seqs=rows,
            max_num_batched_tokens=max(rows, length),
            kv_cache_memory_bytes=2 * token * rows * (length + 256),  # 256: no page is longer
            gpu_memory_utilization=0.1,  # the share of memory that must be free
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
        """vLLM's greedy answers with exactly num_tokens tokens each."""
        given = [{"prompt_token_ids": np.asarray(tokens).tolist()} for tokens in prompts]
        how = self._how(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **asked
        )
        with _refusing():
            return self._llm.generate(given, how, use_tqdm=False)

    def greedy(self, prompts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, T], all prompts at once."""
        answers = [out.outputs[0] for out in self._run(
            [p.tokens for p in prompts], num_tokens, logprobs=0)]  # fmt: skip
        logp = [[at[t].logprob for t, at in zip(a.token_ids, a.logprobs, strict=True)]
                for a in answers]  # fmt: skip
        return np.array([list(a.token_ids) for a in answers], np.int32), np.asarray(
            logp, np.float32
        )

    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        """Facts of each layer; q and k as attention gets them, that is, after RoPE."""
        rows = []
        for row_T in tokens_BT:
            hooks, found = _watch(self.model.model.layers)
            with tracer.removing(hooks):
                self._run([row_T], 1)
            rows.append(tracer.stacked([tracer.facts_of_layer(**facts) for facts in found]))
            _expect(len(row_T), rows[-1]["block"].shape[2], "a forward pass")
        return tracer.joined(rows)

    def logits(self, row_T) -> torch.Tensor:
        """Logits [T - 1, V] from which vLLM takes the log-probs of a prompt."""
        found: list[torch.Tensor] = []
        hook = self.model.logits_processor.register_forward_hook(
            lambda _, x, y: found.append(y.clone())
        )
        with tracer.removing([hook]):
            self._run([row_T], 1, prompt_logprobs=0)
        # The first entry belongs to the sampled token; the prompt follows in one or more pieces.
        logits = torch.cat(found[1:])
        _expect(len(row_T) - 1, len(logits), "logits of a prompt")
        return logits

    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 has no meaning."""
        logits = (self.logits(row_T) for row_T in tokens_BT)
        return tracer.top_tokens(logits, self.config.rollout.temperature, number)


class VllmScorer(BatchedScorer):
    """A scorer of dense log-probs from vLLM's logits; there is no sparse pass to replay."""

    def __init__(self, owner: VllmTracer, config: Config):
        super().__init__(config)
        self._logits = owner.logits

    def score(self, tokens_BT, temperature) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, [B, T]; entry 0 is 0."""
        tokens = torch.as_tensor(np.asarray(tokens_BT)).long()
        found = []
        for row_T in tokens:
            logits = self._logits(row_T)
            targets = row_T[1:].to(logits.device)
            found.append(tracer.chosen_and_entropy(logits, targets, float(temperature)))
        logp, entropy = (torch.cat(x).cpu() for x in zip(*found, strict=True))
        return align(logp, tokens).numpy(), align(entropy, tokens).numpy()

    def overlaps(self, *args, **kwargs) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("vLLM's own models have no block-sparse pass")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn what vLLM raises for a model that it cannot run into a UserError of one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UserError(f"vllm cannot run this model here: {one_line(error)}") from error


def _expect(wanted: int, found: int, what: str) -> None:
    """Raise UserError unless the hooks saw all positions, which depends on vLLM's internals."""
    if found != wanted:
        raise UserError(f"vllm: {found} positions recorded in {what}, expected {wanted}; "
                        "this version of vLLM cannot be traced")  # fmt: skip


def _watch(layers: Sequence[Any]) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Hooks on decoder layers, and for each layer the dictionary that they fill, [1, T, ...].

    The arrays are copies, because vLLM changes some of its tensors in place.
    """
    hooks, layers_facts = [], []
    for layer in layers:
        facts: dict[str, torch.Tensor] = {}

        def attend(_, given, facts=facts) -> None:
            facts |= {name: x[None].clone() for name, x in zip("qkv", given, strict=True)}

        def project(_, given, facts=facts) -> None:
            facts["a"] = given[0][None].clone()

        def leave(_, given, made, facts=facts) -> None:
            # The output of the MLP plus the residual stream, which vLLM returns apart.
            facts["x"] = functools.reduce(torch.add, made)[None]

        attention = layer.self_attn
        hooks += [
            attention.attn.register_forward_pre_hook(attend),
            attention.o_proj.register_forward_pre_hook(project),
            layer.register_forward_hook(leave),
        ]
        layers_facts.append(facts)
    return hooks, layers_facts
