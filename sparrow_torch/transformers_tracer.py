"""What transformers' own models compute, for `sparrow trace --backend=transformers`.

The judge from outside: Qwen3ForCausalLM and LlamaForCausalLM as they are, in eager attention.
They sample nothing here and decode densely, so they take the tokens of another trace, and what
concerns pages is not recorded. q and k after RoPE are not visible from outside either.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

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
    """The model of model.path, in the configured type on this machine's device."""
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
        """Tokens and log-probs [B, N], one prompt at a time, through transformers' cache."""
        # Of the model's own, an end token or a repetition penalty would be followed too.
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
        """v, the attention's output and the block's output of each layer, by hooks."""
        layers = self.model.model.layers
        seen: list[dict[str, torch.Tensor]] = [{} for _ in layers]
        hooks = []
        for layer, facts in zip(layers, seen, strict=True):
            keep = functools.partial(_keep, facts)
            attention = layer.self_attn
            hooks += [
                attention.v_proj.register_forward_hook(lambda _, x, y, keep=keep: keep("v", y)),
                attention.o_proj.register_forward_pre_hook(lambda _, x, keep=keep: keep("a", x)),
                layer.register_forward_hook(lambda _, x, y, keep=keep: keep("x", y)),
            ]
        rows = []
        with tracer.removing(hooks):
            for row in tokens_BT:  # one by one: eager attention has all scores in memory
                self.model.model(self._tensor(row)[None], use_cache=False)
                rows.append(tracer.stacked([tracer.facts_of_layer(**facts) for facts in seen]))
        return tracer.joined(rows)

    @torch.no_grad()
    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = (self.model(self._tensor(row)[None], use_cache=False) for row in tokens_BT)
        logits = (out.logits[0, :-1] for out in rows)
        return tracer.top_tokens(logits, self.config.rollout.temperature, number)

    def update(self, batch: TrainBatch) -> Update:
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
    """For hooks: what a module was given or gave, alone or as the first of several."""
    facts[name] = value[0] if isinstance(value, tuple) else value


class TransformersScorer(BatchedScorer):
    """Dense log-probs; there is no sparse pass to replay."""

    def __init__(self, model, config: Config):
        super().__init__(config)
        self.model = model

    def logp_and_entropy(self, tokens_BT, temperature: float):
        """Of every token but the first, [B, T]; logits of one row at a time, anew in backward."""
        tokens = torch.as_tensor(np.asarray(tokens_BT), device=self.model.device).long()

        def one(row_T):
            logits = self.model(row_T[None], use_cache=False).logits[0, :-1]
            return tracer.chosen_and_entropy(logits, row_T[1:], temperature)

        rows = [checkpoint(one, row_T, use_reentrant=False) for row_T in tokens]
        chosen, entropy = (torch.cat(x) for x in zip(*rows, strict=True))
        return align(chosen, tokens), align(entropy, tokens)

    @torch.no_grad()
    def score(self, tokens_BT, temperature):
        return [x.cpu().numpy() for x in self.logp_and_entropy(tokens_BT, float(temperature))]

    def overlaps(self, *args, **kwargs):
        raise NotImplementedError("transformers' models have no block-sparse pass")
