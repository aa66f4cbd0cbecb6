"""Block sizes of the kernels by chip, type and shape: from what compiles and from bytes in flight.

Nothing here was measured on a chip.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

HBM_BYTES_PER_US = {
    "TPU v5 lite": 819_000,
    "TPU v5": 1_382_000,
    "TPU v5p": 1_382_000,
    "TPU v6 lite": 1_640_000,
    "TPU7x": 3_700_000,
}
"""HBM peak of one core by jax's device_kind (v5p and TPU7x chips have two)."""


@dataclasses.dataclass(frozen=True)
class DecodeTuning:
    """sparse_decode: pages per block (one step of the softmax), blocks in the ring (even)."""

    pages_per_block: int
    num_buffers: int


def tune_decode(dtype, head_dim: int, page_size: int, chip: str | None = None) -> DecodeTuning:
    """Blocks of 32 pages and at most 256 KiB, and about a microsecond of HBM reads in flight.

    A block is the grain of what a short row computes, so it is no larger than the MXU needs.
    Little's law: bytes in flight = bandwidth x latency. The latency of a read is not published;
    1 us is assumed. At most 16 buffers: a row reads ahead of itself as far as the next row only.
    chip: jax's device_kind; None = the default device (v5e where that is no TPU).
    """
    chip = chip or jax.devices()[0].device_kind
    needed = HBM_BYTES_PER_US.get(chip, HBM_BYTES_PER_US["TPU v5 lite"])
    page_bytes = 2 * page_size * head_dim * jnp.dtype(dtype).itemsize
    pages = max(1, min(32, 2**18 // page_bytes))
    ahead = -(-needed // (pages * page_bytes))
    return DecodeTuning(pages, min(16, max(4, (ahead + 2) // 2 * 2)))
