"""Both kernel packages have the same files with the same public functions and classes.

Read from the source, so that the test runs where there is no triton.
"""

import ast

import pytest

from kernels_pallas import layout as in_jax
from kernels_triton import layout as in_torch
from tests.conftest import ROOT

PALLAS_ONLY = {
    "aot.py": "compiles for TPUs; gpu_compile.py is one file, as no other package compiles Triton",
    "tpu_compile.py": "what is compiled for TPUs; its counterpart is gpu_compile.py",
    "decode_block.py": "a decode step of sparse_decode; the Triton kernel is short enough for one",
    "page_list.py": "a top-k without a sort or a prefix sum; Triton has prefix sums",
    "layout.py logical_pages": "the pool of kernels_triton is stored in its logical axes",
    "page_words.py word_span": "a TPU block of keys may have fewer pages than a word has bits",
    "bench.py seconds": "times in a loop on the device; CUDA graphs serve microseconds",
    "bench.py check": "one comparison; kernels_triton has a whole file, bench_check.py",
}
TRITON_ONLY = {
    "gpu_compile.py": "what is compiled for GPUs; its counterparts are tpu_compile.py and aot.py",
    "bench_check.py": "checks on the card itself; there is no TPU for which it could be tried",
    "bench_peers.py": "no other library offers paged decode attention on a TPU",
    "cuda_graph.py": "XLA launches a whole step at once",
    "float8.py": "XLA and Mosaic convert float8 on every TPU",
    "sample_tokens.py": "XLA fuses the same lines of sparrow_jax into one pass",
    "reference.py log_softmax": "torch's own is 8e-5 off on a CPU; jax.nn.log_softmax is not",
    "sparse_decode.py join_splits": "a TPU core has all of a row; nothing is split",
    "sparse_decode.py processors": "the number of splits depends on it",
    "bench.py combine": "the launch that joins splits",
    "bench.py microseconds": "times of CUDA graphs; seconds serves a TPU",
    "bench.py copy_gb_per_s": "a TPU's peak is known; a GPU's is measured",
    "bench.py right": "calls bench_check.py",
    "bench.py provenance": "sparrow_torch/bench.py writes it too",
    "bench.py run": "sparrow_torch/bench.py runs it too",
    "tuning.py PrefillBlocks": "each kernel of the backward pass has sizes of its own",
    "tuning.py SampleTuning": "of sample_tokens.py",
    "tuning.py tune_sample": "of sample_tokens.py",
}
COMPILED = ("append_kv", "flash_prefill", "select_pages", "sparse_decode", "token_logprob")
TRITON_ONLY |= {
    f"{name}.py programs": "what gpu_compile.py compiles; jax needs shapes only"
    for name in COMPILED
}


def names(folder):
    """{"file.py", "file.py name", ...} of a package."""
    found = set()
    for file in (ROOT / folder).glob("*.py"):
        found.add(file.name)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                found.add(f"{file.name} {node.name}")
    return found


def unmatched(mine, others, allowed):
    """Names that only one package has, without those of files that only it has."""
    only = {name for name in mine - others if name not in allowed}
    return {name for name in only if name.split()[0] not in allowed}


def test_files_and_public_names_are_the_same_but_for_the_listed_ones():
    pallas, triton = names("kernels_pallas"), names("kernels_triton")
    assert unmatched(pallas, triton, PALLAS_ONLY) == set()
    assert unmatched(triton, pallas, TRITON_ONLY) == set()


def test_every_listed_difference_is_one():
    pallas, triton = names("kernels_pallas"), names("kernels_triton")
    assert set(PALLAS_ONLY) <= pallas - triton
    assert set(TRITON_ONLY) <= triton - pallas


def parameters(folder, operation):
    """Parameter names of an operation without the suffixes that name axes."""
    file = "token_logprob" if operation == "acceptance_overlap" else operation
    for node in ast.parse((ROOT / folder / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == operation:
            named = [*node.args.args, *node.args.kwonlyargs]
            return {a.arg.rstrip("BCDGHJKLMNPTVXx0123456789").rstrip("_") for a in named}
    raise AssertionError(f"{folder}/{file}.py has no {operation}")


@pytest.mark.parametrize("operation", [*COMPILED, "acceptance_overlap"])
def test_operations_take_the_same_arguments(operation):
    pallas, triton = (parameters(f"kernels_{x}", operation) for x in ("pallas", "triton"))
    # interpret: Triton's interpreter is chosen by its environment. chip: a GPU is asked itself.
    assert pallas - {"interpret", "chip"} == triton


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (16, 64), (4, 32), (3, 16)])
def test_a_page_and_its_landmarks_hold_the_same_numbers(page_size, head_dim):
    rows, lanes = in_jax.page_shape(page_size, head_dim)
    assert in_torch.page_shape(page_size, head_dim) == (2, page_size, head_dim)
    assert rows * lanes == 2 * page_size * head_dim
    rows, lanes = in_jax.landmark_shape(8, head_dim)
    assert in_torch.landmark_shape(8, head_dim) == (8, head_dim) and rows * lanes == 8 * head_dim


@pytest.mark.parametrize("module", [in_jax, in_torch])
def test_pages_that_tokens_touch(module):
    # 1 token: 1 page. 2 tokens, pages of 4: tokens 3 and 4 lie in 2. 5 tokens: 3 .. 7 in 2, but
    # 3 .. 8 (6 tokens) in 3. Pages of one token: as many pages as tokens.
    assert [module.touched_pages(n, 4) for n in (1, 2, 5, 6)] == [1, 2, 2, 3]
    assert [module.touched_pages(n, 1) for n in (1, 7)] == [1, 7]
