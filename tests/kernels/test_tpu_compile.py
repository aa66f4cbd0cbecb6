"""What a TPU's compiler says about the kernels; without libtpu there is no such compiler here."""

import json
import os
import subprocess
import sys

import pytest

from kernels_pallas import aot
from kernels_pallas.tpu_compile import SHAPES
from tests.conftest import ROOT

pytest.importorskip("libtpu", reason="libtpu is not there for this machine")
CHIPS = list(aot.CHIPS)
VMEM_LIMIT = 16 * 2**20
"""Bytes a kernel may use by default on the smallest generation, v5e."""


def compile_rows(module, *flags, folder):
    """Run a module's command in a process of its own: libtpu reads its flags once."""
    out = folder / "rows.json"
    command = [sys.executable, "-m", module, f"--out={out}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return json.loads(out.read_text())


# Minutes of compilation: `make tpu-compile` and `pytest -m slow` run it, `make test` does not.
compiles = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    rows = compile_rows("kernels_pallas.tpu_compile", folder=tmp_path_factory.mktemp("kernels"))
    return {(r["chip"], r["name"]): r for r in rows}


@compiles
def test_every_kernel_compiles_for_every_generation(kernels):
    names = {name for _, name in kernels}
    assert len(names) == 4 * len(SHAPES) + 2 * 6
    assert set(kernels) == {(chip, name) for chip in CHIPS for name in names}
    assert not [r for r in kernels.values() if r["error"]]


@compiles
def test_on_chip_memory_fits_and_nothing_spills_in_decode(kernels):
    for (chip, name), r in kernels.items():
        assert 0 < r["vmem"] <= VMEM_LIMIT, (chip, name, r)
        assert r["bundles"] > 0 and r["smem"] < 2**20, (chip, name, r)
        if name.startswith("sparse_decode"):
            assert r["spills"] == 0, (chip, name, r)


@compiles
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_pool_is_written_in_place_and_never_copied(kernels, shape):
    size = 2 if shape.dtype.__name__ == "bfloat16" else 4
    blocks = shape.layers * shape.kv_heads * (shape.rows * shape.pages + 1)
    pool = blocks * 2 * shape.page * shape.head_dim * size
    for chip in CHIPS:
        row = kernels[chip, f"append_kv ({shape.name})"]
        assert row["aliased"] >= pool  # both results are their arguments
        for name in ("append_kv", "sparse_decode, list", "sparse_decode, dense", "select_pages"):
            assert kernels[chip, f"{name} ({shape.name})"]["hbm_temporaries"] < 0.01 * pool


DUMP = """
 0   :  { %1 = smov 0 }
0x1 LB: > { %2 = smov 0 }
0x2   : > { %3 = smov 0 }
0x3 LB: >> { %4 = smov 0 }
0x4   :  {}
0x5   : >> { %5 = smov 0 }
0x6 PF: > { %6 = smov 0 }
0x7 LB: >> { %7 = smov 0 }
0x8 PF: > { %8 = smov 0 }
0x9   :  { %9 = smov 0 }
"""


def test_bundles_are_those_of_the_largest_innermost_loop():
    assert aot.inner_loop_bundles(DUMP) == 3  # 0x3, the empty 0x4, 0x5; the other loop has one


def test_a_refusal_is_a_result_with_the_compilers_words():
    program = """
import jax, jax.numpy as jnp
from kernels_pallas import aot
aot.prepare()
x = aot.spec((2**34,), jnp.float32, aot.one_chip("v5e"))
row = aot.compile_program("v5e", "too large", lambda a: a + 1, [x])
print(row.error)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "memory" in result.stdout.lower(), result.stdout + result.stderr
