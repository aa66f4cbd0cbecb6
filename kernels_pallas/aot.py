"""Compile for TPUs that are not there: what fits, what it takes, how the inner loop is scheduled.

With libtpu installed, XLA and Mosaic compile on a machine without a TPU exactly what they would
compile on one, and refuse what the chip would refuse. That says nothing about time: no number here
is a measurement on hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

CHIPS = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""Smallest topology of each generation that libtpu describes; kernels use one chip of it."""

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(LB|LH)?[A-Z ]*:\s*(>*) +(\{\})?")
_VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_TO_SMEM = re.compile(r"dma\.hbm_to_smem .*?size_in_granules=\*/(\d+)")
GRANULE_BYTES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program on one generation. Sizes in bytes per chip; bundles of the largest inner loop.

    vmem: the most that any kernel of the program holds. smem: scalars that are copied in before it
    starts. hbm_temporaries: what XLA allocates beside arguments and results; aliased: arguments
    that results are written into. bundles and spills are None where no schedule was dumped.
    """

    chip: str
    name: str
    seconds: float
    vmem: int
    hbm_arguments: int
    hbm_temporaries: int
    aliased: int
    smem: int | None = None
    bundles: int | None = None
    spills: int | None = None
    error: str = ""


def prepare(dump: Path | None = None) -> None:
    """Set what libtpu reads when it starts; call before anything is compiled.

    dump: folder for the schedules of the kernels (bundles, spills); it must be empty.
    """
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = flags


@functools.cache
def devices(topology: str):
    """The devices of a topology, e.g. "v5e:2x2"."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def one_chip(chip: str):
    """Sharding of arrays that live on a single chip."""
    return SingleDeviceSharding(devices(CHIPS[chip])[0])


def mesh(topology: str, shape: Sequence[int], axes: Sequence[str]) -> Mesh:
    """A mesh over all chips of a topology."""
    return Mesh(np.array(devices(topology)).reshape(*shape), tuple(axes))


def spec(shape: Sequence[int], dtype, sharding) -> jax.ShapeDtypeStruct:
    """An array that exists in name only."""
    if isinstance(sharding, tuple):
        sharding = NamedSharding(sharding[0], PartitionSpec(*sharding[1:]))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def compile_program(
    chip: str,
    name: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    dump: Path | None = None,
) -> Compiled:
    """Lower and compile f for one generation; a refusal is a result with `error` set."""
    before = set(dump.iterdir()) if dump else set()
    start = time.perf_counter()
    try:
        traced = jax.jit(f, donate_argnums=tuple(donate)).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
        seconds = time.perf_counter() - start
        text = " ".join(str(e).split())[:300] or type(e).__name__
        zero = dict.fromkeys(("vmem", "hbm_arguments", "hbm_temporaries", "aliased"), 0)
        return Compiled(chip=chip, name=name, seconds=seconds, error=text, **zero)
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    schedule = _schedule(sorted(set(dump.iterdir()) - before)) if dump else {}
    return Compiled(
        chip=chip,
        name=name,
        seconds=seconds,
        vmem=max((int(size) for size in _VMEM.findall(text)), default=0),
        hbm_arguments=memory.argument_size_in_bytes,
        hbm_temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        **schedule,
    )


def _schedule(files: Sequence[Path]) -> dict[str, int]:
    """Bundles of the largest innermost loop, spills, and scalars copied in, over all kernels."""
    out = {"bundles": 0, "spills": 0, "smem": 0}
    for file in files:
        # XLA's own fusions are dumped too; those of kernels bear the name of the pallas_call.
        if not file.name.endswith("-final_bundles.txt") or "schedule" in file.name:
            continue
        text = file.read_text(errors="replace")
        if "tpu_custom_call" not in text and "dma.hbm_to_vmem" not in text:
            continue
        out["bundles"] = max(out["bundles"], inner_loop_bundles(text))
        out["spills"] += len(re.findall(r"\bvst \[vmem:\[#allocation\d+_spill", text))
        granules = sum(int(n) for n in _TO_SMEM.findall(text))
        out["smem"] = max(out["smem"], granules * GRANULE_BYTES)
    return out


def inner_loop_bundles(text: str) -> int:
    """VLIW bundles of the largest loop of the greatest depth in a dumped schedule.

    A line of the dump is one bundle: address, marks of control flow, ':' and one '>' per loop that
    it stands in; 'LB' marks the first bundle of a loop's body.
    """
    loops: list[tuple[int, int]] = []  # (depth, bundles) of finished loops
    open_loops: list[list[int]] = []  # [depth, bundles]
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if not found:
            continue
        depth = len(found[2])
        if found[3] and open_loops:  # an empty bundle bears no marks: it belongs where it stands
            depth = open_loops[-1][0]
        while open_loops and open_loops[-1][0] > depth:
            loops.append(tuple(open_loops.pop()))
        if found[1] and depth and not (open_loops and open_loops[-1][0] == depth):
            open_loops.append([depth, 0])
        for loop in open_loops:
            loop[1] += 1
    loops += [tuple(loop) for loop in open_loops]
    deepest = max((depth for depth, _ in loops), default=0)
    return max((count for depth, count in loops if depth == deepest), default=0)
