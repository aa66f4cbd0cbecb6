"""Compiles every kernel for four GPU architectures: python -m kernels_triton.gpu_compile

The head geometries are those of Qwen3 1.7B, 4B, 8B and 14B in bfloat16; decode attention is also
compiled for a float8 cache. No GPU is needed: Triton's compiler and NVIDIA's assembler come with
the triton package. Exit status 1 if the compiler refuses a program, or if a kernel of the bfloat16
decode path spills registers.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from kernels_triton.readme_table import markdown_table, replace_table, split_at_table

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100 / H200, B200, MI300X."""
SHARED_BYTES = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024, "gfx942": 65536}
"""Shared memory of one multiprocessor; on NVIDIA's a block takes 1 KiB more than it asks for."""
SHAPES = {"1.7B": (16, 8), "8B": (32, 8), "14B": (40, 8)}
"""Query and KV heads; Qwen3 4B has those of 8B."""
HEAD_DIM, PAGE = 128, 16
DECODE = ("select_pages", "sparse_decode", "append_kv", "sample_tokens")


class Program(NamedTuple):
    """A kernel to compile: types of its arguments, values of its constexprs, launch options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel compiled for one architecture.

    registers: per thread. spills: bytes stored and loaded for lack of registers (AMD: registers).
    shared: bytes of shared memory of a block. occupancy: blocks that one multiprocessor holds at a
    time, limited by registers, shared memory and threads. error: why the compiler refused the
    kernel, else "".
    """

    arch: str
    name: str
    seconds: float
    registers: int = 0
    spills: int = 0
    shared: int = 0
    threads: int = 0
    occupancy: int = 0
    error: str = ""


def compile_program(arch: str, p: Program) -> Compiled:
    """Compile a kernel for one architecture; if the compiler refuses it, `error` says why."""
    names = list(p.kernel.arg_names)
    signature = {name: p.signature.get(name, "constexpr") for name in names}
    signature |= dict.fromkeys(p.constexprs, "constexpr")
    # As in a launch: pointers, widths and strides are multiples of 16, except those of page scales.
    strides = [n for n in names if n.startswith(("stride_", "s_")) and n != "stride_sm"]
    aligned = [n for n in names if signature[n].startswith("*") or n == "D"] + strides
    attributes = {
        (names.index(n),): [["tt.divisibility", 16]] for n in aligned if signature[n] != "constexpr"
    }
    source = ASTSource(fn=p.kernel, signature=signature, constexprs=p.constexprs, attrs=attributes)
    options = {"num_warps": p.num_warps, "num_stages": p.num_stages}
    start = time.perf_counter()
    try:
        compiled = triton.compile(source, target=TARGETS[arch], options=options)
    except (TritonError, RuntimeError) as e:  # from Triton, and from MLIR's passes
        text = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        return Compiled(arch=arch, name=p.name, seconds=time.perf_counter() - start, error=text)
    seconds, shared = time.perf_counter() - start, compiled.metadata.shared
    threads = p.num_warps * TARGETS[arch].warp_size
    if arch.startswith("sm_"):
        registers, spills = _assemble(compiled.asm["ptx"], int(arch[3:]))
        held = [65536 // (-(-registers // 8) * 8 * threads), 2048 // threads]
        held.append(SHARED_BYTES[arch] // (shared + 1024))
    else:
        registers, spills = _amd_registers(compiled.asm["amdgcn"])
        waves = min(8, 512 // (-(-registers // 8) * 8))  # per SIMD; a compute unit has four of them
        held = [4 * waves // p.num_warps]
        held.append(SHARED_BYTES[arch] // max(shared, 1))
    return Compiled(
        arch=arch, name=p.name, seconds=seconds, registers=registers, spills=spills, shared=shared,
        threads=threads, occupancy=min(held),
    )  # fmt: skip


def _assemble(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and bytes of spills that NVIDIA's assembler reports."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    newer = folder / "ptxas-blackwell"
    assembler = newer if arch >= 90 and newer.is_file() else folder / "ptxas"
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "kernel.ptx"
        file.write_text(ptx)
        command = [assembler, "-v", f"--gpu-name={name}", file, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _nvidia_registers(report)


def _nvidia_registers(report: str) -> tuple[int, int]:
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))


def _amd_registers(assembly: str) -> tuple[int, int]:
    def count(name) -> int:
        return sum(int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", assembly))

    return count("vgpr_count"), count("vgpr_spill_count") + count("sgpr_spill_count")


def programs() -> Iterator[Program]:
    """Every kernel at every head geometry, each program once."""
    from kernels_triton import (
        append_kv,
        flash_prefill,
        sample_tokens,
        select_pages,
        sparse_decode,
        token_logprob,
    )

    modules = select_pages, sparse_decode, append_kv, flash_prefill, token_logprob
    seen = set()
    for shape, (heads, kv_heads) in SHAPES.items():
        for module in modules:
            for p in module.programs("bf16", heads, kv_heads, HEAD_DIM, PAGE):
                what = repr((p.kernel.__name__, p.signature, p.constexprs, p[4:]))
                if what not in seen:
                    seen.add(what)
                    yield p._replace(name=f"{p.name} ({shape})")
    yield from sample_tokens.programs("fp32", *SHAPES["8B"], HEAD_DIM, PAGE)  # logits are float32
    # float8 is read as bytes, since some cards do not convert it.
    for p in sparse_decode.programs("u8", *SHAPES["8B"], HEAD_DIM, PAGE):
        yield p._replace(name=f"{p.name} (8B, float8)")


def line(r: Compiled) -> str:
    """One result as a line for the terminal."""
    if r.error:
        return f"{r.arch:7} {r.name:44} REFUSED after {r.seconds:.1f} s: {r.error}"
    return (
        f"{r.arch:7} {r.name:44} {r.registers:3} registers  {r.spills:3} spilled  "
        f"{r.shared / 1024:6.1f} KiB shared  {r.threads:4} threads  {r.occupancy:2} blocks  "
        f"{r.seconds:.1f} s"
    )


def table(rows: Sequence[Compiled]) -> str:
    """The table of README.md: one row for each kernel and shape, a column per architecture."""
    by_name: dict[str, dict[str, str]] = {}
    for r in rows:
        cell = f"{r.registers} / {r.spills} / {r.shared / 1024:.0f} / {r.occupancy}"
        by_name.setdefault(r.name, {})[r.arch] = cell
    cells = [[name, *(archs[arch] for arch in TARGETS)] for name, archs in by_name.items()]
    made = f"triton {triton.__version__}, {datetime.date.today().isoformat()}"
    return f"{len(rows)} programs; all compile ({made}).\n\n" + markdown_table(
        ["kernel (shape)", *TARGETS], cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the module's docstring has the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--only", default="", help="regular expression: only matching programs")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    parser.add_argument("--table", type=Path, help="README in which to renew the table")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set, with which Triton compiles nothing; unset it")
    triton.knobs.compilation.always_compile = True  # do not reuse what an earlier run compiled
    archs = arguments.archs.split(",")
    if unknown := set(archs) - set(TARGETS):
        parser.error(
            f"--archs: {', '.join(sorted(unknown))}: expected some of {', '.join(TARGETS)}"
        )
    if arguments.table:
        if arguments.only or archs != list(TARGETS):
            parser.error("--table shows every program everywhere; leave out --only and --archs")
        try:  # before minutes of compilation
            split_at_table(arguments.table, "gpu-compile")
        except (OSError, ValueError) as e:
            parser.error(f"--table: {e}")
    rows = []
    for arch in archs:
        for p in programs():
            if re.search(arguments.only, p.name):
                rows.append(compile_program(arch, p))
                print(line(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    spilled = [r for r in rows if r.spills and r.name.startswith(DECODE) and "float8" not in r.name]
    refused = [r for r in rows if r.error]
    fine = f"{len(rows) - len(refused)} of {len(rows)} programs compile"
    print(f"{fine}; {len(spilled)} of the decode path spill")
    if arguments.table and not refused:
        replace_table(arguments.table, "gpu-compile", table(rows))
    return 1 if refused or spilled else 0


if __name__ == "__main__":
    sys.exit(main())
