"""The tables of compiled kernels are written into their READMEs by the command that makes them."""

import pytest

from kernels_pallas import aot, readme_table, tpu_compile
from kernels_triton import readme_table as in_triton
from sparrow_jax import tpu_programs
from tests.conftest import ROOT

PAGE = """# Kernels

<!-- made-up: begin -->
old table
<!-- made-up: end -->

Remarks.
"""


@pytest.mark.parametrize("module", [readme_table, in_triton])
def test_only_what_is_between_the_comments_is_replaced(tmp_path, module):
    file = tmp_path / "README.md"
    file.write_text(PAGE)
    for _ in range(2):  # the second time changes nothing
        module.replace_table(file, "made-up", module.markdown_table(["a", "b"], [["1", "2"]]))
        table = "\n| a | b |\n|---|---|\n| 1 | 2 |\n"
        assert file.read_text() == PAGE.replace("old table", table)


@pytest.mark.parametrize("module", [readme_table, in_triton])
@pytest.mark.parametrize("page", [
    "", PAGE + PAGE, PAGE.replace("begin", "x"), PAGE.replace("end", "x"),
    "<!-- made-up: end --> <!-- made-up: begin -->",
])  # fmt: skip
def test_a_page_without_its_two_comments_is_refused_and_left_alone(tmp_path, module, page):
    file = tmp_path / "README.md"
    file.write_text(page)
    with pytest.raises(ValueError, match="expected one line <!-- made-up: begin -->"):
        module.replace_table(file, "made-up", "new")
    assert file.read_text() == page


@pytest.mark.parametrize(("readme", "name"), [
    ("kernels_pallas/README.md", "tpu-compile"), ("kernels_triton/README.md", "gpu-compile"),
    ("sparrow_jax/README.md", "tpu-programs"),
])  # fmt: skip
def test_each_readme_has_its_comments_and_the_makefile_names_it(readme, name):
    before, after = readme_table.split_at_table(ROOT / readme, name)
    table = (ROOT / readme).read_text()[len(before) : -len(after)]
    assert "programs" in table and "|---|" in table
    assert f"--table={readme}" in (ROOT / "Makefile").read_text()


def compiled(chip, name, **changes):
    sizes = {
        "seconds": 2.4, "vmem": 3 * 2**19, "hbm_arguments": 5 * 2**20, "hbm_temporaries": 2**20,
        "aliased": 2**22, "largest_copy": 0,
    }  # fmt: skip
    return aot.Compiled(chip=chip, name=name, **sizes | changes)


def test_tables_of_made_up_tpu_results(monkeypatch):
    monkeypatch.setattr(aot, "provenance", lambda: "today")
    dumped = {"smem": 2048, "bundles": 90, "straight": 70}
    rows = [compiled(chip, "a (x)", **dumped) for chip in aot.CHIPS]
    rows += [compiled(chip, "b (x)") for chip in aot.CHIPS]
    rows[-1] = compiled("tpu7x", "b (x)", seconds=11, hbm_temporaries=0)
    first, _, _, rule, *lines = tpu_compile.table(rows).splitlines()
    assert first == "2 programs on each of v5e, v5p, v6e, tpu7x; all compile (today)."
    assert rule == "|---|---|---|---|---|---|"
    schedule = ", ".join(["90 (70)"] * 4)
    assert lines == [f"| a (x) | 1.5 | 2 | 1.0 | {schedule} | 2 |",
                     "| b (x) | 1.5 | - | 0.0-1.0 | - | 2-11 |"]  # fmt: skip
    text = tpu_programs.table([compiled("v5e", "decode (x) on v5e:2x2")])
    assert text.splitlines()[-1] == "| decode (x) | v5e:2x2 | 5 + 1 | 4 | 0 | 2 |"


def test_table_of_made_up_gpu_results():
    gpu_compile = pytest.importorskip("kernels_triton.gpu_compile")
    rows = [
        gpu_compile.Compiled(
            arch=arch, name=name, seconds=1.0, registers=90 + i, spills=i, shared=2048, occupancy=3
        )
        for i, arch in enumerate(gpu_compile.TARGETS)
        for name in ("a (x)", "b (x)")
    ]
    first, _, header, _, *lines = gpu_compile.table(rows).splitlines()
    assert first.startswith("8 programs; all compile (triton ")
    assert header == "| kernel (shape) | sm_80 | sm_90 | sm_100 | gfx942 |"
    cells = "90 / 0 / 2 / 3 | 91 / 1 / 2 / 3 | 92 / 2 / 2 / 3 | 93 / 3 / 2 / 3"
    assert lines == [f"| a (x) | {cells} |", f"| b (x) | {cells} |"]


def test_a_table_of_some_programs_or_of_no_page_is_refused_before_any_compilation(tmp_path, capsys):
    def compile_all(chips, only):
        raise AssertionError("compiled")

    def run(*flags):
        aot.command("Doc.", "made-up", compile_all, str, flags)

    file, other = tmp_path / "README.md", tmp_path / "other.md"
    file.write_text(PAGE)
    other.write_text("no comments")
    for flags, message in [
        ([f"--table={other}"], "expected one line <!-- made-up: begin -->"),
        ([f"--table={tmp_path / 'missing.md'}"], "No such file"),
        ([f"--table={file}", "--only=append_kv"], "leave out --only"),
        ([f"--table={file}", "--chips=v5e"], "leave out --only"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            run(*flags)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert file.read_text() == PAGE
