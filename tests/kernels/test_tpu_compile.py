"""What the TPU compiler reports about the kernels; skipped without libtpu."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from kernels_pallas import aot
from kernels_pallas.ops import Ops
from kernels_pallas.tpu_compile import SHAPES
from tests.conftest import ROOT

pytest.importorskip("libtpu", reason="libtpu is not there for this machine")
VMEM_LIMIT = 48 * 2**20
"""Of the 64 MiB of TPU7x, the smallest VMEM of the generations."""
SOME = {
    "kernels_pallas.tpu_compile": r"\(1\.7B\)|sparse_decode, list .*(H=64|float8)",
    "sparrow_jax.tpu_programs": r"decode.*1\.7B",
}
"""What `make test` compiles, for every generation; `make tpu-compile` and `-m slow` compile all."""


def python(*arguments):
    """Run Python in a new process, since libtpu reads its flags once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)


def compile_rows(module, *flags, folder):
    out = folder / "rows.json"
    result = python("-m", module, f"--out={out}", *flags)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return {(r["chip"], r["name"]): r for r in json.loads(out.read_text())}


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def kernels(request, tmp_path_factory):
    module = "kernels_pallas.tpu_compile"
    flags = [f"--only={SOME[module]}"] if request.param == "some" else []
    return compile_rows(module, *flags, folder=tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def programs(request, tmp_path_factory):
    module = "sparrow_jax.tpu_programs"
    flags = [f"--only={SOME[module]}"] if request.param == "some" else []
    return compile_rows(module, *flags, folder=tmp_path_factory.mktemp("programs"))


def test_every_kernel_compiles_for_every_generation(kernels):
    names = {name for _, name in kernels}
    assert set(kernels) == {(chip, name) for chip in aot.CHIPS for name in names}
    operations = {re.sub(r",? .*", "", name) for name in names}
    assert operations == {f.name for f in dataclasses.fields(Ops)} - {"name"}
    assert not [r for r in kernels.values() if r["error"]]


def test_on_chip_memory_fits_and_nothing_spills_in_decode(kernels):
    for (chip, name), r in kernels.items():
        assert 0 < r["vmem"] <= VMEM_LIMIT, (chip, name, r)
        if r["bundles"] is not None:  # the decode kernels
            assert 0 < r["straight"] <= r["bundles"] and r["smem"] < 2**20, (chip, name, r)
        if name.startswith("sparse_decode") and "float32" not in name:
            assert r["spills"] == 0, (chip, name, r)


def test_the_pool_is_written_in_place_and_never_copied(kernels):
    for shape in SHAPES:
        blocks = shape.kv_heads * (shape.rows * shape.pages + 1)
        pool = blocks * 2 * shape.page * shape.head_dim * jnp.dtype(shape.dtype).itemsize
        for (_, name), row in kernels.items():
            if name.endswith(f"({shape.name})") and row["bundles"] is not None:
                # The scales of a float8 cache are laid out anew.
                assert row["hbm_temporaries"] < (0.1 if "float8" in name else 0.01) * pool, row
                assert row["largest_copy"] < 0.01 * pool, row
                assert not name.startswith("append_kv") or row["aliased"] >= pool


def test_programs_compile_fit_and_keep_the_cache_in_place(programs):
    assert {chip for chip, _ in programs} == set(aot.CHIPS)
    for (chip, name), r in programs.items():
        assert not r["error"], r
        assert r["hbm_arguments"] + r["hbm_temporaries"] < HBM_BYTES[chip], r
        if "learner" not in name:  # the cache is the most of what a rollout holds
            assert r["aliased"] > 0.7 * r["hbm_arguments"], r
            assert r["largest_copy"] < 0.25 * r["aliased"], r


HBM_BYTES = {"v5e": 16 * 10**9, "v5p": 95 * 10**9, "v6e": 32 * 10**9, "tpu7x": 96 * 10**9}
"""HBM of one device; on TPU7x that is half a chip."""


DUMP = """
 0   :  { %1 = smov 0 }
0x1 LB: > { %2 = smov 0 }
0x2   : > { %3 = smov 0 }
0x3 LB: >> { %4 = smov 0 }
0x4   :  {}
0x5 LB: >>> { %5 = smov 0 }
0x6 PF: >> { %6 = smov 0 }
0x7 LB: >> { %7 = smov 0 }
0x8 PF: > { %8 = smov 0 }
0x9   :  { %9 = smov 0 }
"""


def test_bundles_are_those_of_the_largest_loop_within_the_grid():
    # 0x3, the empty 0x4, the loop 0x5 inside it and 0x6; the loop right behind it has one
    assert aot.loop_bundles(DUMP) == (4, 2)


def test_spills_and_scalars_are_those_of_the_programs_own_kernels(tmp_path):
    more = """
0xa   : > { %5 = vst [vmem:[#allocation7_spill] sm:$0xff] %v1 }
0xb   : > { %6 = dma.hbm_to_smem [thread:$0]  %s1, /*size_in_granules=*/96, [#allocation3] }
"""
    (tmp_path / "17-wanted.1-72-final_bundles.txt").write_text(DUMP + more)
    (tmp_path / "17-other-72-final_bundles.txt").write_text(DUMP + 2 * more)
    (tmp_path / "17-wanted.1-71-original.txt").write_text(2 * more)
    found = aot._schedule(tmp_path.iterdir(), {"wanted.1"})
    assert found == {"bundles": 4, "straight": 2, "spills": 1, "smem": 96 * 32}


def test_a_copy_of_a_large_array_is_seen():
    program = """
import jax, jax.numpy as jnp
from kernels_pallas import aot
aot.prepare()
x = aot.spec((4, 2**20, 128), jnp.bfloat16, aot.one_chip("v5e"))
write = lambda a: a.at[1, 2].set(3.0)
for donate in ((0,), ()):
    row = aot.compile_program("v5e", "write", write, [x], donate=donate)
    print(row.largest_copy, row.aliased)
"""
    result = python("-c", program)
    assert result.stdout == f"0 {2**30}\n{2**30} 0\n", result.stdout + result.stderr


def test_a_refusal_is_a_result_with_the_compilers_words():
    program = """
import jax, jax.numpy as jnp
from kernels_pallas import aot
aot.prepare()
x = aot.spec((2**34,), jnp.float32, aot.one_chip("v5e"))
row = aot.compile_program("v5e", "too large", lambda a: a + 1, [x])
print(row.error)
"""
    result = python("-c", program)
    assert "memory" in result.stdout.lower(), result.stdout + result.stderr
