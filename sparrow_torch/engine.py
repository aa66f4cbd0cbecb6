"""The rollout engine on torch: common/rollout/paged_engine.py plans, decode.py runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.config import ModelConfig, RolloutConfig
from common.rollout.paged_engine import PagedEngine
from kernels_triton.cuda_graph import Capture, cuda_graphs
from kernels_triton.ops import Ops
from sparrow_torch import cache as kv_cache
from sparrow_torch.decode import Programs, run_again
from sparrow_torch.model import Decoder


class Engine(PagedEngine):
    """Paged, slot-refilling sampler of one policy (RolloutEngine of common/protocols.py)."""

    def __init__(
        self, geometry: ModelConfig, config: RolloutConfig, stop_ids, dtype, *, ops: Ops, device,
        capture: Capture | None = None,
    ):  # fmt: skip
        """capture None: CUDA graphs with kernels on a GPU; references wait for the device."""
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
        """Weights by name, as Decoder.load takes them; no page outlives a generate call."""
        self.model.load(params)
        super().load_weights(self.model, version)

    def open(self) -> Programs:
        """Made once: captured steps know the places of weights, cache and hidden states."""
        if self._programs is None:
            config = self.config
            self._programs = Programs(
                self.model,
                kv_cache.allocate(self.model, self.num_pages, config.page_size),
                num_slots=config.num_slots,
                table_width=self.table_width,
                chunk=config.decode_chunk,
                num_dense=config.num_dense_layers,
                stop_ids=self.stop_ids,
                capture=self._capture,
            )
        return self._programs
