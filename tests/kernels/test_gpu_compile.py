"""What Triton's compiler and NVIDIA's assembler report about the kernels, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton", reason="there is no triton for this machine")
gpu_compile = pytest.importorskip("kernels_triton.gpu_compile")
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
DECODE = "select_pages|sparse_decode|append_kv|sample_tokens"


def python(*arguments):
    """Run Python in a new process, since this one interprets the kernels."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module", params=["decode", pytest.param("all", marks=pytest.mark.slow)])
def rows(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "rows.json"
    some = [f"--only={DECODE}"] if request.param == "decode" else []
    result = python("-m", "kernels_triton.gpu_compile", f"--out={out}", *some)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return json.loads(out.read_text())


def test_every_kernel_compiles_for_every_architecture(rows):
    names = {r["name"] for r in rows}
    assert sorted((r["arch"], r["name"]) for r in rows) == sorted(
        (arch, name) for arch in ARCHS for name in names
    )
    assert not [r for r in rows if r["error"]]
    for kernel in DECODE.split("|"):
        assert any(name.startswith(kernel) for name in names)


def test_the_decode_path_spills_nothing_and_fits(rows):
    for r in rows:
        assert 0 < r["registers"] and 1 <= r["occupancy"] <= 32, r
        if r["name"].startswith(tuple(DECODE.split("|"))) and "float8" not in r["name"]:
            assert r["spills"] == 0, r


def test_registers_and_spills_are_found_in_the_reports():
    report = """ptxas info    : Function properties for _attend
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 480 bytes cmem[0]
"""
    assert gpu_compile._nvidia_registers(report) == (168, 20)
    clean = report.replace("12 bytes", "0 bytes").replace("8 bytes", "0 bytes")
    assert gpu_compile._nvidia_registers(clean) == (168, 0)
    assembly = "    .sgpr_spill_count: 3\n    .vgpr_count:     256\n    .vgpr_spill_count: 41\n"
    assert gpu_compile._amd_registers(assembly) == (256, 44)


def test_a_refusal_is_a_result_with_the_compilers_words(tmp_path):
    program = """
import triton, triton.language as tl
from kernels_triton import gpu_compile

@triton.jit
def wrong(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1)  # a range of a length that is no power of 2

p = gpu_compile.Program("wrong", wrong, {"x_ptr": "*i32"}, {"N": 3}, 4, 1)
print(gpu_compile.compile_program("sm_90", p).error)
"""
    file = tmp_path / "wrong.py"
    file.write_text(program)
    result = python(str(file))
    assert "power of 2" in result.stdout, result.stdout + result.stderr
