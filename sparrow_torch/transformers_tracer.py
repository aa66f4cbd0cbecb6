"""Records what transformers' own models compute: `sparrow trace --backend=transformers`.

This is the independent reference: Qwen3ForCausalLM and LlamaForCausalLM, unchanged, with eager
attention. They decode densely and do not sample here, so they take the tokens of another trace, and
nothing about pages is recorded. Nor are q and k after RoPE, which hooks cannot reach.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from common.config import Config
from common.crosscheck.trace import Update, loss_of
from common.mismatch.batched_scorer import BatchedScorer
from common.model import hf, hf_config
from common.types import TrainBatch
from kernels_triton.reference import log_softmax
from sparrow_torch import tracer
from sparrow_torch.backend import compute_dtype
from sparrow_torch.learner import policy_loss_sum
from sparrow_torch.scorer import align


def build(config: Config) -> TransformersTracer:
    """A tracer of the model in model.path, in the configured type, on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = compute_dtype(config.learner.dtype, device)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=dtype, attn_implementation="eager"
    )
    return TransformersTracer(model.to(device).eval(), config)


class TransformersTracer:
    """Tracer of common/crosscheck/trace.py."""

    generate = decoder = None

    def __init__(self, model, config: Config):
        self.model, self.config = model, config
        self.scorer = TransformersScorer(model, config)
        self.description = tracer.describe(model.device, model.dtype)
        self.description["versions"]["transformers"] = transformers.__version__
        self.description["attention"] = "eager"

    def _tensor(self, x) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x), device=self.model.device).long()

    @torch.no_grad()
    def greedy(self, prompts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, T], one prompt at a time, through transformers' cache."""
        # The model's own configuration could end a row early or penalize repetition.
        self.model.generation_config = transformers.GenerationConfig()
        how = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        rows = []
        for prompt in prompts:
            given = self._tensor(prompt.tokens)[None]
            out = self.model.generate(
                given, attention_mask=torch.ones_like(given), generation_config=how
            )
            tokens = out.sequences[0, len(prompt.tokens) :]
            logp = log_softmax(torch.cat(out.logits).float())
            rows.append((tokens, logp.gather(1, tokens[:, None])[:, 0]))
        tokens_BN, logp_BN = (torch.stack(x).cpu().numpy() for x in zip(*rows, strict=True))
        return tokens_BN, logp_BN

    @torch.no_grad()
    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        """Values, attention outputs and block outputs of each layer, which hooks record."""
        layers = self.model.model.layers
        found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
        hooks = []
        for layer, facts in zip(layers, found, strict=True):
            keep = functools.partial(_keep, facts)
            attention = layer.self_attn
            hooks += [
                attention.v_proj.register_forward_hook(lambda _, x, y, keep=keep: keep("v", y)),
                attention.o_proj.register_forward_pre_hook(lambda _, x, keep=keep: keep("a", x)),
                layer.register_forward_hook(lambda _, x, y, keep=keep: keep("x", y)),
            ]
        rows = []
        with tracer.removing(hooks):
            for row in tokens_BT:  # one at a time, because eager attention holds all scores
                self.model.model(self._tensor(row)[None], use_cache=False)
                rows.append(tracer.stacked([tracer.facts_of_layer(**facts) for facts in found]))
        return tracer.joined(rows)

    @torch.no_grad()
    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 has no meaning."""
        rows = (self.model(self._tensor(row)[None], use_cache=False) for row in tokens_BT)
        logits = (out.logits[0, :-1] for out in rows)
        return tracer.top_tokens(logits, self.config.rollout.temperature, number)

    def update(self, batch: TrainBatch) -> Update:
        """Loss, gradients and new weights of one optimizer step."""
        c, losses = self.config, []
        for m in batch.minibatches[0]:
            arrays = {n: torch.as_tensor(x, device=self.model.device) for n, x in vars(m).items()}
            logp_BT, _ = self.scorer.logp_and_entropy(m.tokens_BT, c.rollout.temperature)
            numbers = c.grpo.loss_numbers
            loss, _ = policy_loss_sum(logp_BT, arrays, *numbers, True)
            loss.backward()
            losses.append(float(loss.detach()))
        for p in self.model.parameters():
            p.grad /= batch.denominators[0]
        geometry = hf_config.read_geometry(c.model.path)
        own = {n: p.grad.float().cpu().numpy() for n, p in self.model.named_parameters()}
        gradients = dict(hf.stack(own, geometry))
        weights = functools.partial(tracer.new_weights, c, gradients)
        return Update(loss_of(losses, batch), iter(gradients.items()), weights)


def _keep(facts: dict[str, torch.Tensor], name: str, value) -> None:
    """Record a module's input or output in a hook; of several values, the first."""
    facts[name] = value[0] if isinstance(value, tuple) else value


class TransformersScorer(BatchedScorer):
    """A scorer of dense log-probs; there is no sparse pass to replay."""

    def __init__(self, model, config: Config):
        super().__init__(config)
        self.model = model

    def logp_and_entropy(self, tokens_BT, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of every token but the first, [B, T].

        Only the logits of one row are in memory at a time; the backward pass computes them again.
        """
        tokens = torch.as_tensor(np.asarray(tokens_BT), device=self.model.device).long()

        def one(row_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.model(row_T[None], use_cache=False).logits[0, :-1]
            return tracer.chosen_and_entropy(logits, row_T[1:], temperature)

        rows = [checkpoint(one, row_T, use_reentrant=False) for row_T in tokens]
        chosen, entropy = (torch.cat(x) for x in zip(*rows, strict=True))
        return align(chosen, tokens), align(entropy, tokens)

    @torch.no_grad()
    def score(self, tokens_BT, temperature) -> tuple[np.ndarray, np.ndarray]:
        """Dense log-prob and entropy of every token, [B, T]; entry 0 is 0."""
        logp, entropy = self.logp_and_entropy(tokens_BT, float(temperature))
        return logp.cpu().numpy(), entropy.cpu().numpy()

    def overlaps(self, *args, **kwargs) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("transformers' models have no block-sparse pass")
