"""The rollout engine on torch: common/rollout/paged_engine.py plans, decode.py runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.config import RolloutConfig
from common.model.geometry import Geometry
from common.rollout.paged_engine import PagedEngine
from kernels_triton.cuda_graph import Capture, cuda_graphs
from kernels_triton.ops import Ops
from sparrow_torch import cache as kv_cache
from sparrow_torch.decode import Programs, run_again
from sparrow_torch.model import Decoder


class Engine(PagedEngine):
    """RolloutEngine of common/protocols.py: a paged cache, and slots that are refilled."""

    def __init__(
        self, geometry: Geometry, config: RolloutConfig, stop_ids, dtype, *, ops: Ops, device,
        capture: Capture | None = None,
    ):  # fmt: skip
        """capture None: CUDA graphs for kernels on a GPU; references force host syncs, so none."""
        super().__init__(config, stop_ids)
        device = torch.device(device)
        self.model = Decoder(geometry, ops=ops, dtype=dtype, device=device)
        graphs = ""
        if capture is None and device.type == "cuda":
            graphs = ", CUDA graphs" if ops.name == "kernel" else ", no CUDA graphs"
        if capture is None:
            capture = cuda_graphs() if graphs == ", CUDA graphs" else run_again
        self._capture = capture
        self.description = f"torch {torch.__version__} on {device}, {ops.name}{graphs}"
        self._programs: Programs | None = None

    def load_weights(self, params: Mapping[str, Any], version: int) -> None:
        """Copy weights by name, as Decoder.load takes them. No page outlives a generate call."""
        self.model.load(params)
        super().load_weights(self.model, version)

    def open(self) -> Programs:
        """The programs, made once: captured steps hold the addresses of weights and cache."""
        if self._programs is None:
            config, weight = self.config, self.model.embed_VD
            cache = kv_cache.allocate(
                self.model.geometry, self.num_pages, config.page_size, weight.dtype,
                device=weight.device,
            )  # fmt: skip
            self._programs = Programs(
                self.model,
                cache,
                num_slots=config.num_slots,
                table_width=self.table_width,
                chunk=config.decode_chunk,
                num_dense=config.num_dense_layers,
                stop_ids=self.stop_ids,
                capture=self._capture,
            )
        return self._programs
