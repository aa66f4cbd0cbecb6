"""Compiles for TPUs without a TPU: what fits, how much memory it takes, how loops are scheduled.

With libtpu installed, XLA and Mosaic compile on any machine what they would compile on a TPU, and
refuse what they would refuse there. No number here is a measurement on hardware, and none says how
long a program runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kernels_pallas.readme_table import replace_table, split_at_table

CHIPS = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""The smallest topology of each generation that libtpu knows; kernels use one chip of it."""

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+([A-Z ]*):\s*(>*) +(\{\})?")
_VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_TO_SMEM = re.compile(r"dma\.(?:hbm|vmem)_to_smem .*?size_in_granules=\*/(\d+)")
GRANULE_BYTES = 32
_COPY = re.compile(r" = (\w+)\[([\d,]*)\]\S* (?:copy|copy-done)\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program compiled for one generation; sizes in bytes per chip.

    vmem: the largest that XLA reserves for a kernel of the program. This is what the kernel needs,
        except on TPU7x and where the kernel sets a limit: then it is the limit.
    smem: scalars copied in for the call and for one program of the grid.
    hbm_temporaries: what XLA allocates beside arguments and results.
    aliased: bytes of arguments that results overwrite in place.
    largest_copy: the largest array that is only copied, possibly into another layout.
    bundles: instruction bundles of the largest loop inside the loop over the grid.
    straight: the longest stretch of such a loop without a branch.
    spills: registers stored to memory for lack of registers.

    smem, bundles, straight and spills are None if no schedule was dumped. error: why the compiler
    refused the program, else "".
    """

    chip: str
    name: str
    seconds: float
    vmem: int
    hbm_arguments: int
    hbm_temporaries: int
    aliased: int
    largest_copy: int
    smem: int | None = None
    bundles: int | None = None
    straight: int | None = None
    spills: int | None = None
    error: str = ""


def prepare(dump: Path | None = None) -> None:
    """Set the environment that libtpu reads when it starts; call this before compiling anything.

    dump: an empty folder for the schedules of kernels, from which bundles and spills are counted.
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
def devices(topology: str) -> list[jax.Device]:
    """The devices of a topology such as "v5e:2x2"."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def device_kind(chip: str) -> str:
    """Jax's name of a generation, for example "TPU v5 lite"."""
    return devices(CHIPS[chip])[0].device_kind


def one_chip(chip: str) -> SingleDeviceSharding:
    """The sharding of arrays on a single chip."""
    return SingleDeviceSharding(devices(CHIPS[chip])[0])


def mesh(topology: str, shape: Sequence[int], axes: Sequence[str]) -> Mesh:
    """A mesh over all chips of a topology."""
    return Mesh(np.array(devices(topology)).reshape(*shape), tuple(axes))


def spec(shape: Sequence[int], dtype, sharding) -> jax.ShapeDtypeStruct:
    """An abstract array: shape, type and sharding, without data.

    sharding: a jax sharding, or a tuple (mesh, axis name or None for each dimension).
    """
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
    """Lower and compile f for one generation; if the compiler refuses it, `error` says why."""
    before = set(dump.iterdir()) if dump else set()
    start = time.perf_counter()
    try:
        traced = jax.jit(f, donate_argnums=tuple(donate)).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
        seconds = time.perf_counter() - start
        text = " ".join(str(e).split())[:300] or type(e).__name__
        sizes = "vmem", "hbm_arguments", "hbm_temporaries", "aliased", "largest_copy"
        zero = dict.fromkeys(sizes, 0)
        return Compiled(chip=chip, name=name, seconds=seconds, error=text, **zero)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    assert memory is not None and hlo is not None, "the TPU compiler always reports both"
    kernels = [row for row in hlo.splitlines() if "tpu_custom_call" in row]
    named = (re.match(r"\s*(?:ROOT )?%(\S+) = ", row) for row in kernels)
    names = {match[1] for match in named if match}
    schedule: dict[str, Any] = _schedule(set(dump.iterdir()) - before, names) if dump else {}
    return Compiled(
        chip=chip,
        name=name,
        seconds=seconds,
        vmem=max((int(size) for row in kernels for size in _VMEM.findall(row)), default=0),
        hbm_arguments=memory.argument_size_in_bytes,
        hbm_temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        largest_copy=max(map(_array_bytes, _COPY.findall(hlo)), default=0),
        **schedule,
    )


def _array_bytes(array: tuple[str, str]) -> int:
    """Bytes of an array in the notation of HLO, ("bf16", "8,128")."""
    kind, dims = array
    bits = re.search(r"\d+", kind)  # the type pred has no number of bits
    return math.prod(int(d) for d in dims.split(",") if d) * (int(bits[0]) if bits else 8) // 8


def _schedule(files: Iterable[Path], names: set[str]) -> dict[str, int]:
    """bundles, straight, spills and smem of Compiled from the dumped schedules of some kernels."""
    out = {"bundles": 0, "straight": 0, "spills": 0, "smem": 0}
    for file in files:
        # Files are named id-kernel-number-stage.txt; XLA's own fusions are among them.
        found = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", file.name)
        if not found or found[1] not in names:
            continue
        text = file.read_text(errors="replace")
        for name, bundles in zip(("bundles", "straight"), loop_bundles(text), strict=True):
            out[name] = max(out[name], bundles)
        out["spills"] += len(re.findall(r"\bvst \[vmem:\[#allocation\d+_spill", text))
        granules = sum(int(n) for n in _TO_SMEM.findall(text))
        out["smem"] = max(out["smem"], granules * GRANULE_BYTES)
    return out


def loop_bundles(text: str) -> tuple[int, int]:
    """Bundles of the largest loop inside the loop over the grid, and its longest straight stretch.

    A line of the dump is one VLIW bundle: address, marks of control flow, ':' and one '>' for each
    loop around it. 'LB' marks the first bundle of a loop, any mark a bundle that is jumped to. The
    outermost loop is the one over the grid.
    """
    largest = longest = bundles = stretch = inside = 0
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if not found:
            continue
        mark = found[1].strip()
        if not found[3]:  # an empty bundle has no '>': it belongs to the loop of the line before
            inside = len(found[2]) >= 2
            bundles = 0 if "LB" in mark and len(found[2]) <= 2 else bundles
        bundles = bundles + 1 if inside else 0
        stretch = (0 if mark else stretch) + 1 if inside else 0
        largest, longest = max(largest, bundles), max(longest, stretch)
    return largest, longest


def line(r: Compiled) -> str:
    """One result as a line for the terminal."""
    if r.error:
        return f"{r.chip:6} {r.name:42} REFUSED after {r.seconds:.1f} s: {r.error}"
    mib = 2.0**-20
    schedule = ""
    if r.bundles is not None:
        schedule = f"  {r.bundles:5} bundles ({r.straight})  {r.spills} spills"
    smem = "" if r.smem is None else f"  SMEM {r.smem / 1024:5.0f} KiB"
    hbm = f"HBM {r.hbm_arguments * mib:8.0f} + {r.hbm_temporaries * mib:7.2f} MiB"
    return (
        f"{r.chip:6} {r.name:42} VMEM {r.vmem * mib:5.2f} MiB{smem}  {hbm}  "
        f"in place {r.aliased * mib:8.0f}{schedule}  {r.seconds:.1f} s"
    )


def provenance() -> str:
    """Versions of libtpu and jax, and today's date, for the table of a README."""
    libtpu = importlib.metadata.version("libtpu")
    return f"libtpu {libtpu}, jax {jax.__version__}, {datetime.date.today().isoformat()}"


def command(
    doc: str,
    name: str,
    compile_all: Callable[[list[str], str], list[Compiled]],
    table: Callable[[list[Compiled]], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Run the command line of a module that compiles programs; 1 if one is refused, else 0.

    compile_all(chips, only) compiles and prints every program with a name in which the regular
    expression `only` is found. --table writes table(rows) between the comments `name: begin` and
    `name: end` of a README, if every program compiles.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="default: %(default)s")
    parser.add_argument("--only", default="", help="regular expression: only matching programs")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    parser.add_argument("--table", type=Path, help="README in which to renew the table")
    arguments = parser.parse_args(argv)
    chips = arguments.chips.split(",")
    if unknown := set(chips) - set(CHIPS):
        parser.error(f"--chips: {', '.join(sorted(unknown))}: expected some of {', '.join(CHIPS)}")
    if arguments.table:
        if arguments.only or chips != list(CHIPS):
            parser.error("--table shows every program on every chip; leave out --only and --chips")
        try:  # before an hour of compilation
            split_at_table(arguments.table, name)
        except (OSError, ValueError) as e:
            parser.error(f"--table: {e}")
    rows = compile_all(chips, arguments.only)
    if arguments.out:
        arguments.out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    refused = [r for r in rows if r.error]
    print(f"{len(rows) - len(refused)} of {len(rows)} programs compile")
    if arguments.table and not refused:
        replace_table(arguments.table, name, table(rows))
    return 1 if refused else 0
