"""The rollout engine on JAX: common/rollout/paged_engine.py plans, the programs of decode.py run.

The cache is donated to each program, so only one generate call at a time may hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from common.config import RolloutConfig
from common.model.geometry import Geometry
from common.rollout.paged_engine import PagedEngine
from sparrow_jax import cache as kv_cache
from sparrow_jax.decode import Programs
from sparrow_jax.model import Cache


class Engine(PagedEngine):
    """RolloutEngine of common/protocols.py: a paged cache, and slots that are refilled."""

    def __init__(
        self, graph: nnx.GraphDef, geometry: Geometry, config: RolloutConfig,
        stop_ids: Sequence[int], dtype: Any,
    ):  # fmt: skip
        super().__init__(config, stop_ids)
        self.graph, self.geometry, self.dtype = graph, geometry, dtype
        self._cache: Cache | None = None

    def open(self) -> Programs:
        """The programs of the next call, with the weights and the cache that the engine holds."""
        return Programs(
            self.params,
            self._take_cache(),
            graph=self.graph,
            dtype=self.dtype,
            width=self.geometry.hidden_size,
            config=self.config,
            stop_ids=self.stop_ids,
            keep_cache=self._keep_cache,
        )

    def _take_cache(self) -> Cache:
        """The cache of the last call; a new one if there is none or a failed call consumed it."""
        held, self._cache = self._cache, None
        if held is None or held[0].is_deleted():
            held = kv_cache.allocate(
                self.geometry, self.num_pages, self.config.page_size, self.dtype
            )
        return held

    def _keep_cache(self, cache: Cache) -> None:
        """Keep the cache for the next call."""
        self._cache = cache
