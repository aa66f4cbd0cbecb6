"""What Triton's compiler and NVIDIA's assembler say about the kernels; they need no GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton", reason="there is no triton for this machine")
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
DECODE = "select_pages|sparse_decode|append_kv"


@pytest.fixture(scope="module", params=["decode", pytest.param("all", marks=pytest.mark.slow)])
def rows(request, tmp_path_factory):
    """In a process of its own: here the kernels are interpreted."""
    out = tmp_path_factory.mktemp("gpu") / "rows.json"
    command = [sys.executable, "-m", "kernels_triton.gpu_compile", f"--out={out}"]
    command += [f"--only={DECODE}"] if request.param == "decode" else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
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
