"""Exposes intermediate results of the torch backend to `sparrow trace` (common/crosscheck)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from common.config import Config
from common.crosscheck import sketch
from common.crosscheck.trace import FACTS, Update, greedy, loss_of
from common.crosscheck.trace_decode import Step
from common.model import hf
from common.types import TrainBatch
from kernels_triton.reference import log_softmax, page_scores
from sparrow_torch import backend, cache, learner
from sparrow_torch.scorer import next_token_view


def build(config: Config) -> Tracer:
    """A tracer of engine, scorer and gradients with the weights of model.path."""
    scorer, geometry, _ = backend.build_scorer(config)
    engine = backend.build_engine(config, geometry=geometry, stop_ids=())
    engine.load_weights(dict(hf.load(config.model.path)[1]), 0)
    return Tracer(engine, scorer, config)


def facts_of_layer(**arrays: torch.Tensor) -> dict[str, torch.Tensor]:
    """Projections of the arrays of a layer, and the norm of its output x; [B, T, ...] each."""
    flat = {FACTS[name]: y.reshape(*y.shape[:2], -1).float() for name, y in arrays.items()}
    to = lambda y: torch.from_numpy(sketch.directions(y.shape[-1])).to(y.device)  # noqa: E731
    facts = {name: y @ to(y) for name, y in flat.items()}
    return {**facts, "block_norm": flat["block"].norm(dim=-1)}


def describe(device: torch.device, dtype: torch.dtype) -> dict:
    """Device, type and versions, for the metadata of a trace."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return {"device": name, "dtype": str(dtype).removeprefix("torch."), "versions": versions}


def stacked(facts) -> dict[str, np.ndarray]:
    """Arrays [L, ...] by name, from a list with the facts of each layer."""
    return {name: torch.stack([f[name] for f in facts]).cpu().numpy() for name in facts[0]}


def joined(rows) -> dict[str, np.ndarray]:
    """Arrays [L, B, T, ...] by name, from a list with the facts [L, 1, T, ...] of each row."""
    return {name: np.concatenate([facts[name] for facts in rows], 1) for name in rows[0]}


def top_tokens(
    logits_of_rows: Iterable[torch.Tensor], temperature: float, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 has no meaning.

    logits_of_rows: yields [T - 1, V] for each of B rows.
    """
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0)).cpu().numpy()  # noqa: E731
    found = []
    for logits_TV in logits_of_rows:
        logp, ids = log_softmax(logits_TV.float() / temperature).topk(number)
        found.append((pad(ids.int()), pad(logp)))
    ids, logp = (np.stack(x) for x in zip(*found, strict=True))
    return ids, logp


def chosen_and_entropy(
    logits_TV, targets_T, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the targets, and entropies, [T] each, from logits of any type."""
    logp = log_softmax(logits_TV.float() / temperature)
    return logp.gather(-1, targets_T[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@contextlib.contextmanager
def removing(hooks) -> Iterator[None]:
    """Remove the hooks when the block ends, also after an error."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Tracer:
    """Tracer of common/crosscheck/trace.py."""

    def __init__(self, engine, scorer, config: Config):
        self.model, self.config, self.scorer = scorer.model, config, scorer
        self.generate = engine.generate
        embed = self.model.embed_VD
        self.description = {**describe(embed.device, embed.dtype), "attention": self.model.ops.name}

    def greedy(self, prompts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [B, T] of greedy decoding by the engine."""
        return greedy(self.generate, prompts)

    def tensor(self, x) -> torch.Tensor:
        """x as int64 on the device of the model."""
        return torch.as_tensor(x, device=self.model.embed_VD.device).long()

    @torch.no_grad()
    def forward(self, tokens_BT) -> Mapping[str, np.ndarray]:
        """Facts [L, B, T, ...] of a dense pass."""
        return stacked(self.model.hidden(self.tensor(tokens_BT), observe=facts_of_layer)[1])

    @torch.no_grad()
    def top(self, tokens_BT, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs [B, T, number] of the likeliest tokens; column 0 has no meaning."""
        rows = (row_T[None] for row_T in self.tensor(tokens_BT))
        hidden = (next_token_view(self.model.hidden(row), row)[0] for row in rows)
        logits = (self.model.logits(x) for x in hidden)
        return top_tokens(logits, self.config.rollout.temperature, number)

    def decoder(self, table_BP, max_selected: int) -> PagedCache:
        """An empty cache with this page table, to prefill and decode in."""
        return PagedCache(self, table_BP, max_selected)

    def update(self, batch: TrainBatch) -> Update:
        """Loss, gradients and new weights of one optimizer step."""
        c, model = self.config, self.model
        numbers = c.grpo.loss_numbers
        losses = [
            float(
                learner.accumulate_gradient(model, m, numbers, batch.fresh, c.rollout.temperature)[
                    "loss"
                ]
            )
            for m in batch.minibatches[0]
        ]
        for p in model.parameters():
            p.grad /= batch.denominators[0]
        gradients = {n: p.grad.float().cpu().numpy() for n, p in model.named_parameters()}
        weights = functools.partial(new_weights, c, gradients)
        return Update(loss_of(losses, batch), iter(gradients.items()), weights)


class PagedCache:
    """Cache of common/crosscheck/trace_decode.py."""

    def __init__(self, tracer: Tracer, table_BP, max_selected: int):
        self._model, self._tensor = tracer.model, tracer.tensor
        self._rollout, self._max_selected = tracer.config.rollout, max_selected
        self._table = tracer.tensor(table_BP)
        weight, page = self._model.embed_VD, self._rollout.page_size
        self._cache = cache.allocate(
            self._model.geometry, 1 + table_BP.size, page, weight.dtype, device=weight.device
        )

    @torch.no_grad()
    def prefill(self, tokens_BT, start_B, num_new_B) -> None:
        """Append prompt tokens densely."""
        new = (self._tensor(x) for x in (tokens_BT, start_B, num_new_B))
        self._model.extend(self._cache, *new, self._table)

    @torch.no_grad()
    def step(self, token_B, start_B, num_new_B, k_B) -> Step:
        """Append one token per row with budgets k_B; returns what the layers selected."""
        new = (self._tensor(x) for x in (token_B[:, None], start_B, num_new_B))
        _, facts = self._model.extend(
            self._cache, *new, self._table, k_B=self._tensor(k_B),
            max_selected=self._max_selected, num_dense=self._rollout.num_dense_layers,
            observe=self._facts,
        )  # fmt: skip
        sparse = [f for f in facts if "pages" in f]
        lse = stacked([{"lse": f["lse"]} for f in facts])["lse"]
        return Step(lse, *(stacked(sparse)[name] for name in ("pages", "scores")))

    def _facts(self, layer, q, marks, pages, lse, sparse) -> dict[str, torch.Tensor]:
        """Log-sum-exp of a layer; of a sparse layer also the selected pages and all scores."""
        if not sparse:
            return {"lse": lse[:, 0]}
        scores = page_scores(q[:, 0], marks, layer, self._table)
        return {"lse": lse[:, 0], "pages": pages, "scores": scores}


def new_weights(config: Config, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of model.path by name, in float32, after one optimizer step."""
    weights = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in hf.load(config.model.path)[1]}
    for name, w in weights.items():
        w.grad = torch.tensor(gradients[name])
    learner.make_optimizer(config.learner, weights.values())(1.0)
    return {name: w.detach().numpy() for name, w in weights.items()}
