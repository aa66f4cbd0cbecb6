"""Peak bandwidth, peak compute and memory of accelerators, each from its vendor's public page.

Compute is bfloat16 with float32 sums, without the 2:4 sparsity of weights that doubles the figure
in some data sheets. The chip "this" is the CPU that runs the command; its figures are measured.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import numpy as np

from common.errors import UserError
from common.records.json_checks import integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator: memory, and the peaks of its bandwidth and of dense bfloat16 operations."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    memory_bytes: float
    source: str

    @property
    def intensity(self) -> float:
        """Operations in the time that one byte takes: flops_per_second / bytes_per_second."""
        return self.flops_per_second / self.bytes_per_second

    def times(self, count: int) -> Chip:
        """`count` chips as one of `count` times the size; communication is taken to be free."""
        count = integer(count, "chips", 1)
        if count == 1:
            return self
        return dataclasses.replace(
            self,
            name=f"{count} x {self.name}",
            bytes_per_second=count * self.bytes_per_second,
            flops_per_second=count * self.flops_per_second,
            memory_bytes=count * self.memory_bytes,
        )

    def describe(self) -> str:
        """One line of text, in GB, GB/s and TFLOP/s."""
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.0f} GB at {self.bytes_per_second / 1e9:.0f} "
            f"GB/s, {self.flops_per_second / 1e12:.4g} TFLOP/s ({self.source})"
        )


def _chip(name: str, gb_per_s: float, tflops: float, gb: float, source: str) -> Chip:
    return Chip(
        name=name, bytes_per_second=gb_per_s * 1e9, flops_per_second=tflops * 1e12,
        memory_bytes=gb * 1e9, source=source,
    )  # fmt: skip


_GOOGLE = "docs.cloud.google.com/tpu/docs"
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("a100", 2039, 312, 80, "NVIDIA A100 data sheet, 80 GB SXM"),
        _chip("h100", 3350, 989.4, 80, "NVIDIA H100 data sheet, SXM; half of 1,979 with sparsity"),
        _chip("h200", 4800, 989.4, 141, "NVIDIA H200 data sheet, SXM; half of 1,979 with sparsity"),
        _chip("b200", 7700, 2250, 180, "NVIDIA Blackwell data sheet, HGX B200; half of 4,500"),
        _chip("mi300x", 5300, 1307.4, 192, "AMD Instinct MI300X data sheet"),
        _chip("v5e", 819, 197, 16, f"{_GOOGLE}/v5e"),
        _chip("v5p", 2765, 459, 95, f"{_GOOGLE}/v5p"),
        _chip("v6e", 1638, 918, 32, f"{_GOOGLE}/v6e"),
        _chip("tpu7x", 7380, 2307, 192, f"{_GOOGLE}/tpu7x"),
    )
}
"""name -> chip. NVIDIA's data sheets give 7.7 and 8 TB/s for a B200; this is the lower one."""


def find(name: str) -> Chip:
    """The chip of that name; "this" measures this machine, in about a second."""
    if name == "this":
        return measure()
    if name not in CHIPS:
        raise UserError(f"--chip={name}: unknown chip; expected one of {', '.join(CHIPS)}, this")
    return CHIPS[name]


def measure(copy_bytes: int = 2**28, width: int = 2048) -> Chip:
    """This machine's processors by numpy: a copy of `copy_bytes`, a float32 product of `width`.

        bytes/s = 2 copy_bytes / best time (read and written);  FLOP/s = 2 width^3 / best time

    Only the CPU is measured, not a GPU or TPU of the machine. memory_bytes is the whole RAM.
    """
    x = np.ones(copy_bytes // 4, np.float32)
    y = np.empty_like(x)
    copied = 2 * x.nbytes / _best_seconds(lambda: np.copyto(y, x))
    a = np.ones((width, width), np.float32)
    flops = 2 * width**3 / _best_seconds(lambda: a @ a)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Chip(
        name="this", bytes_per_second=copied, flops_per_second=flops, memory_bytes=memory,
        source="measured: numpy copy, float32 product",
    )  # fmt: skip


def _best_seconds(work: Callable[[], object], repeats: int = 4) -> float:
    """The shortest of a few runs; the first one, which warms up, counts as well."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
