"""The rollout engine on torch: common/paged_engine.py plans, the programs below run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.config import ModelConfig, RolloutConfig
from common.paged_engine import PREFILL_ROWS, Decoding, Drawn, PagedEngine
from kernels_triton.ops import Ops
from sparrow_torch import cache as kv_cache
from sparrow_torch.model import Decoder
from sparrow_torch.sampling import sample


class Engine(PagedEngine):
    """Paged, slot-refilling sampler of one policy (RolloutEngine of common/protocols.py)."""

    def __init__(
        self, geometry: ModelConfig, config: RolloutConfig, stop_ids, dtype, *, ops: Ops, device
    ):
        super().__init__(config, stop_ids)
        self.device = torch.device(device)
        self.model = Decoder(geometry, ops=ops, dtype=dtype, device=self.device)
        self.description = f"torch {torch.__version__} on {self.device}, {ops.name}"
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def load_weights(self, params: Mapping[str, Any], version: int) -> None:
        """Weights by name, as Decoder.load takes them; no page outlives a generate call."""
        self.model.load(params)
        super().load_weights(self.model, version)

    def open(self) -> _Programs:
        return _Programs(self)

    def take_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool, allocated once: programs write it in place."""
        if self._cache is None:
            size = self.num_pages, self.config.page_size
            self._cache = kv_cache.allocate(self.model, *size)
        return self._cache


class _Programs:
    """Device of common/paged_engine.py."""

    def __init__(self, engine: Engine):
        self.engine, self.cache = engine, engine.take_cache()
        embed_VD = engine.model.embed_VD
        self.hidden_SD = embed_VD.new_zeros(engine.config.num_slots, embed_VD.shape[1])
        self.prompt_hidden = embed_VD.new_zeros(PREFILL_ROWS, embed_VD.shape[1])

    def _tensor(self, x) -> torch.Tensor:
        return torch.as_tensor(x, device=self.engine.device)

    @torch.no_grad()
    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP) -> None:
        tokens_BT, start_B, num_new_B, page_table_BP = map(
            self._tensor, (tokens_BT, start_B, num_new_B, page_table_BP)
        )
        hidden_BTD = self.engine.model.extend(
            self.cache, tokens_BT, start_B, num_new_B, page_table_BP
        )
        last = (num_new_B - 1).clamp(min=0).long()
        newest = hidden_BTD[torch.arange(len(last), device=last.device), last]
        self.prompt_hidden = torch.where((num_new_B > 0)[:, None], newest, self.prompt_hidden)

    @torch.no_grad()
    def fork(self, starts: Sequence[tuple[int, int, int, int]]) -> None:
        source, slot, page_from, page_to = self._tensor(starts).T
        self.hidden_SD[slot] = self.prompt_hidden[source]
        kv, _ = self.cache
        kv[:, :, page_to] = kv[:, :, page_from]

    @torch.no_grad()
    def decode(self, d: Decoding) -> Drawn:
        """A step draws a token from hidden_SD, then runs it through the model; see Decoding."""
        engine, model = self.engine, self.engine.model
        active, cached, limit, table, budgets = map(
            self._tensor, (d.active_S, d.cached_S, d.limit_S, d.page_table_SP, d.budgets)
        )
        key_S = tuple(self._tensor(k.astype("int64")) for k in d.key_S)
        stop_ids = self._tensor(engine.stop_ids)
        tokens, logps = [], []
        drawn = torch.zeros_like(cached)
        for _ in range(engine.config.decode_chunk):
            logits = self.hidden_SD.float() @ model.head().float().mT
            token, logp = sample(logits, key_S, cached, d.temperature, d.top_p)
            tokens.append(torch.where(active, token, 0))
            logps.append(torch.where(active, logp, 0))
            drawn = drawn + active
            active = active & ~torch.isin(token, stop_ids) & (cached + 1 < limit)
            sparse: dict[str, Any] = {}
            if d.max_selected:
                k_B = budgets[(cached // d.bin_tokens).clamp(max=len(budgets) - 1).long()]
                sparse = {"k_B": k_B, "max_selected": d.max_selected}
            out = model.extend(
                self.cache, token[:, None], cached, active.int(), table,
                num_dense=engine.config.num_dense_layers, **sparse,
            )  # fmt: skip
            self.hidden_SD = torch.where(active[:, None], out[:, 0], self.hidden_SD)
            cached = cached + active
        rows = torch.stack(tokens, 1).int(), torch.stack(logps, 1)
        return Drawn(*(x.cpu().numpy() for x in (active, cached, *rows, drawn)))

    def close(self) -> None:
        pass
