"""The distribution, the locks and the borders between packages."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [
    "common", "configs", "kernels_pallas", "kernels_triton", "sparrow_jax", "sparrow_torch",
]  # fmt: skip
FRAMEWORKS = ["jax", "jaxlib", "flax", "optax", "orbax", "torch", "tensorflow", "transformers"]


def pins(name):
    """{package: version} of a lock file; fails on a line that pins nothing."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.lstrip().startswith("#"):
            match = re.fullmatch(r"([a-z0-9._-]+)==([^ ;]+)( ; .*)?", line)
            assert match, line
            found[match[1]] = match[2]
    return found


def test_every_package_is_listed_once_and_every_folder_of_code_is_listed():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert sorted(listed) == sorted(folders | set(PACKAGES))


def test_files_that_are_read_beside_the_code_are_shipped():
    data = PROJECT["tool"]["setuptools"].get("package-data", {})
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".md"):
                patterns = data.get(package, [])
                assert any(path.relative_to(ROOT / package).match(p) for p in patterns), path


def test_locks_pin_every_line_agree_and_name_no_host():
    base, test = pins("requirements.lock"), pins("requirements-test.lock")
    assert base.items() <= test.items()
    assert {"jax", "flax", "optax", "orbax-checkpoint", "numpy", "setuptools"} <= base.keys()
    assert not {"torch", "pytest", "tokenizers", "pyarrow", "reasoning-gym"} & base.keys()
    assert {"pytest", "pytest-xdist", "hypothesis", "ruff", "import-linter"} <= test.keys()
    for name in ("requirements.lock", "requirements-test.lock"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "--index" not in text and "/" not in re.sub("#.*", "", text)


def normal(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def test_locks_cover_what_the_project_asks_for():
    extras = PROJECT["project"]["optional-dependencies"]
    base = {normal(r) for r in PROJECT["project"]["dependencies"] + extras["jax"]}
    assert base <= pins("requirements.lock").keys()
    assert {normal(r) for r in extras["test"] + extras["data"]} <= pins(
        "requirements-test.lock"
    ).keys()


def imports_at_the_top(path):
    """Top-level names that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_recipes_import_the_config_only():
    for path in (ROOT / "configs").glob("*.py"):
        for name in imports_at_the_top(path):
            ours = name.split(".")[0] in PACKAGES
            allowed = name.startswith(("common.config", "configs.")) or name in (
                "common.config",
                "configs",
            )
            assert not ours or allowed, f"{path.name} imports {name}"


def test_common_loads_neither_jax_nor_torch_even_through_a_library():
    modules = sorted(
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in (ROOT / "common").rglob("*.py")
        if p.stem[0] != "_"
    )
    program = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "configs"])
def test_what_a_package_imports_is_declared(package):
    """Every third-party module imported anywhere belongs to a declared dependency."""
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {normal(r) for r in PROJECT["project"]["dependencies"] + extras["data"]}
    if package in ("kernels_pallas", "sparrow_jax"):
        declared |= {normal(r) for r in extras["jax"]} | {"jax"}
    if package in ("kernels_triton", "sparrow_torch"):
        declared |= {normal(r) for r in extras["torch"] + extras["triton"] + extras["smollm2"]}
        declared |= {normal(r) for r in extras["vllm"]}
    distribution = {"absl": "absl-py", "orbax": "orbax-checkpoint", "ml_dtypes": "ml-dtypes"}
    distribution |= {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for top in (name.split(".")[0] for name in names):
                if top not in sys.stdlib_module_names and top not in PACKAGES:
                    assert distribution.get(top, top) in declared, f"{path.name} imports {top}"
