"""The rollout engine on JAX: common/rollout/paged_engine.py plans, the programs of decode.py run.

The cache is donated to each program, so it has one holder at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from common.config import ModelConfig, RolloutConfig
from common.rollout.device import PREFILL_ROWS, DecodeResult, Decoding, Fork
from common.rollout.paged_engine import PagedEngine
from sparrow_jax import cache as kv_cache
from sparrow_jax import decode


class Engine(PagedEngine):
    """Paged, slot-refilling sampler of one policy (RolloutEngine of common/protocols.py)."""

    def __init__(self, graph, geometry: ModelConfig, config: RolloutConfig, stop_ids, dtype):
        super().__init__(config, stop_ids)
        self.graph, self.geometry, self.dtype = graph, geometry, dtype
        self._cache = None

    def open(self) -> _Programs:
        return _Programs(self)

    def take_cache(self):
        """The pool of the last call, or a new one."""
        held, self._cache = self._cache, None
        if held is None or held[0].is_deleted():
            held = kv_cache.allocate(
                self.geometry, self.num_pages, self.config.page_size, self.dtype
            )
        return held

    def keep_cache(self, cache) -> None:
        """For the next call."""
        self._cache = cache


class _Programs:
    """Device of common/rollout/device.py."""

    def __init__(self, engine: Engine):
        self.engine, self.cache = engine, engine.take_cache()
        width = engine.geometry.hidden_size
        self.hidden_SD = jnp.zeros((engine.config.num_slots, width), engine.dtype)
        self.prompt_hidden = jnp.zeros((PREFILL_ROWS, width), engine.dtype)

    def prefill(self, tokens_BT, start_B, num_new_B, page_table_BP) -> None:
        engine = self.engine
        self.cache, self.prompt_hidden = decode.prefill(
            engine.params, self.cache, tokens_BT, start_B, num_new_B, page_table_BP,
            self.prompt_hidden, graph=engine.graph, dtype=engine.dtype,
        )  # fmt: skip

    def fork(self, starts: Sequence[Fork]) -> None:
        table = np.zeros((4, self.engine.config.num_slots), np.int32)
        table[:, : len(starts)] = np.array(starts, np.int32).T
        self.cache, self.hidden_SD = decode.fork(
            self.cache, self.hidden_SD, self.prompt_hidden, source_F=table[0], slot_F=table[1],
            page_from_F=table[2], page_to_F=table[3], count=len(starts),
        )  # fmt: skip

    def decode(self, d: Decoding) -> DecodeResult:
        engine = self.engine
        out = decode.decode(
            engine.params, self.cache, self.hidden_SD, d.active_S, d.cached_S, d.limit_S, d.key_S,
            d.page_table_SP, d.budgets, np.int32(d.bin_tokens), np.float32(d.temperature or 1.0),
            np.float32(d.top_p), graph=engine.graph, dtype=engine.dtype,
            num_tokens=engine.config.decode_chunk, stop_ids=engine.stop_ids,
            max_selected=d.max_selected, num_dense=engine.config.num_dense_layers,
            greedy=d.temperature == 0, nucleus=d.top_p < 1,
        )  # fmt: skip
        self.cache, self.hidden_SD = out[:2]
        active_S, cached_S, tokens_ST, logp_ST, num_sampled_S = jax.device_get(out[2:])
        return DecodeResult(
            active_S=active_S, cached_S=cached_S, tokens_ST=tokens_ST, logp_ST=logp_ST,
            num_sampled_S=num_sampled_S,
        )  # fmt: skip

    def close(self) -> None:
        self.engine.keep_cache(self.cache)
