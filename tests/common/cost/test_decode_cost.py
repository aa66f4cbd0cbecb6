"""Cost of decoding: bytes by hand, eFLOPs against a loop over tokens."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from common.cost import decode_cost
from common.model.geometry import QWEN3, Geometry
from common.schedule.schedule import DENSE, Schedule

TINY = Geometry(
    vocab_size=61, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
ONE = Schedule(page_size=16, bin_tokens=2000, budgets=(1,))


def test_bytes_of_a_step_by_hand():
    """Layers of 32 x (8 + 4) x 16 + 3 x 32 x 48 = 10,752 numbers, a head of 61 x 32; a token has
    2 x 2 x 16 numbers a layer, so 128 bytes; 100 and 40 tokens, and the new one, lie in 7 and 3
    pages; budget 1 reads 4 and 3 of them, 2,048 bytes each, and landmarks of 64 bytes."""
    rows = np.array([100, 40])
    weights = 2 * (3 * 10_752 + 61 * 32)
    assert decode_cost.step_bytes(TINY, None, rows) == {
        "weights": weights, "kv_dense_layers": 2 * 141 * 128 + 2 * 128,
        "kv_sparse_layers": 142 * 128, "reserved_pages": 0, "landmarks": 0,
    }  # fmt: skip
    assert decode_cost.step_bytes(TINY, ONE, rows) == {
        "weights": weights, "kv_dense_layers": 2 * 142 * 128, "kv_sparse_layers": 1 * 2048,
        "reserved_pages": (3 + 3) * 2048, "landmarks": (7 + 3) * 64,
    }  # fmt: skip
    got = sum(decode_cost.row_terms(TINY, ONE, rows).values())
    assert got.tolist() == [2 * 101 * 128 + 4 * 2048 + 7 * 64, 2 * 41 * 128 + 3 * 2048 + 3 * 64]


def test_options_of_a_step():
    rows = np.array([1000])
    base = decode_cost.step_bytes(TINY, ONE, rows)
    half = decode_cost.step_bytes(TINY, ONE, rows, kv_bytes=1)
    assert half["kv_sparse_layers"] == base["kv_sparse_layers"] / 2
    assert half["landmarks"] == base["landmarks"]  # kept in bfloat16
    assert half["weights"] == base["weights"]
    assert decode_cost.step_bytes(TINY, ONE, rows, weight_bytes=4)["weights"] == 2 * base["weights"]
    for layers in (3, 7):  # no layer is left to be sparse
        terms = decode_cost.step_bytes(TINY, ONE, rows, num_dense_layers=layers)
        assert terms["kv_dense_layers"] == 3 * 1001 * 128
        assert terms["kv_sparse_layers"] == terms["reserved_pages"] == terms["landmarks"] == 0
    dense = dataclasses.replace(ONE, budgets=(DENSE,))
    assert decode_cost.step_bytes(TINY, dense, rows) == decode_cost.step_bytes(TINY, None, rows)
    with pytest.raises(ValueError, match="expected integer lengths"):
        decode_cost.row_terms(TINY, None, np.array([-1]))
    with pytest.raises(ValueError, match="expected integer lengths"):
        decode_cost.row_terms(TINY, ONE, np.array([1.5]))


def test_pages_are_read_once_a_page_is_needed():
    """k + 3 = 4 pages: all of them up to 64 tokens with the new one, then 4; dense grows on."""
    n = np.arange(200)
    kv = decode_cost.row_terms(TINY, ONE, n)
    read = (kv["kv_sparse_layers"] + kv["reserved_pages"]) / 2048
    assert read.tolist() == [min(4, -(-(i + 1) // 16)) for i in n]
    assert (kv["landmarks"] / 64).tolist() == [-(-(i + 1) // 16) for i in n]


def test_weights_that_are_read_and_that_are_kept():
    """Qwen3's published sizes; an untied embedding is kept and not read."""
    sizes = {name: decode_cost.num_parameters(g) / 1e9 for name, g in QWEN3.items()}
    assert sizes == pytest.approx(
        {"qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77}, abs=0.01
    )
    for g in QWEN3.values():
        norms = decode_cost.num_parameters(g) - decode_cost.step_weights(g)
        assert (norms > g.vocab_size * g.hidden_size) == (not g.tie_embeddings)


def test_page_size_with_the_fewest_bytes():
    """Pages of C' > C save n w (1/C - 1/C') / 2 of landmarks and read 3 (C' - C) w more of reserved
    pages: at as many selected tokens C is cheaper up to n = 6 C C' tokens. So 16 up to 3,072, 32 up
    to 12,288, 64 up to 49,152, and by cost alone 16 never beyond: what keeps it on the paper's
    front there is acceptance, which no cost model knows."""
    base = Schedule(page_size=16, bin_tokens=2000, budgets=(128,))
    sizes = (16, 32, 64, 128)

    def cheapest(n):
        """Averaged over the positions in a page of 128."""
        span = np.arange(n, n + 128)
        total = [
            sum(
                decode_cost.row_terms(
                    QWEN3["qwen3-4b"], decode_cost.same_tokens(base, c), span
                ).values()
            )
            for c in sizes
        ]
        return sizes[int(np.argmin([x.mean() for x in total]))]

    assert [cheapest(n) for n in (2600, 2900)] == [16, 16]
    assert [cheapest(n) for n in (3200, 8000, 12_000)] == [32, 32, 32]
    assert [cheapest(n) for n in (12_600, 30_000, 48_800)] == [64, 64, 64]
    assert [cheapest(n) for n in (49_500, 100_000)] == [128, 128]


def test_same_tokens_rounds_up_and_keeps_dense():
    schedule = Schedule(page_size=16, bin_tokens=10, budgets=(29, 64, 0, DENSE), name="s")
    assert decode_cost.same_tokens(schedule, 16) is schedule
    other = decode_cost.same_tokens(schedule, 64)
    assert other.page_size == 64 and other.budgets == (8, 16, 0, DENSE)  # 29 x 16 = 464 = 7.25 x 64
    assert decode_cost.same_tokens(schedule, 8).budgets == (58, 128, 0, DENSE)


def test_eflops_are_those_of_a_loop_over_tokens():
    """2 operations a number of KV and query head, 2 bytes a number, landmarks of the keys alone."""
    schedule = Schedule(page_size=8, bin_tokens=30, budgets=(2, 4))
    prompt, response, samples, intensity = 20, 50, 3, 7.0
    D, r = 3 * 2 * 2 * 16, 2  # 3 layers, keys and values of 2 heads of 16
    dense, sparse = np.zeros(2), np.zeros(4)
    for t in range(response):
        seen = prompt + t + 0.5
        dense += [samples * 2 * r * D * seen, 2 * D * (prompt + samples * (t + 0.5))]
        b = min(seen, schedule.budget(prompt + t) * 8)
        marks = np.array([samples * 2 * seen, 2 * (prompt + samples * (t + 0.5))]) * D / 2 / 8
        sparse += [samples * 2 * r * D * b, samples * 2 * D * b, *marks]
    options = {"prompt": prompt, "response": response, "samples": samples, "intensity": intensity}
    parameters = 2 * 3 * decode_cost.num_parameters(TINY) * 50
    got = decode_cost.eflops(TINY, None, **options)
    want = [parameters, dense[0], 7 * dense[1], 0, 0]
    assert list(got.values()) == pytest.approx(want)
    # the closed forms of the paper
    assert got["attention"] == pytest.approx(r * (2 * 20 + 50) * 50 * 3 * D)
    assert got["attention_memory"] == pytest.approx(7 * (2 * 20 * 50 * D + 3 * 50**2 * D))
    got = decode_cost.eflops(TINY, schedule, **options)
    want = [parameters, sparse[0], 7 * sparse[1], sparse[2], 7 * sparse[3]]
    assert list(got.values()) == pytest.approx(want)


def test_eflops_of_a_fixed_budget_have_the_papers_terms():
    budget = Schedule(page_size=16, bin_tokens=2000, budgets=(4,))  # 64 of at least 100 tokens
    got = decode_cost.eflops(TINY, budget, prompt=100, response=40, samples=2, intensity=5.0)
    D, r, B = 3 * 2 * 2 * 16, 2, 64
    assert got["attention"] == 2 * r * 2 * D * B * 40
    assert got["attention_memory"] == 2 * 5 * 2 * D * B * 40
    assert got["scoring"] == pytest.approx(2 * D * (2 * 100 + 40) * 40 / (2 * 16))
    assert got["scoring_memory"] == pytest.approx(5 * D * (100 * 40 + 2 * 40**2 / 2) / 16)


def test_the_model_of_bytes_needs_numpy_only():
    """sparrow_torch/bench.py uses it where only torch, triton and numpy are installed."""
    program = (
        "import sys, common.cost.decode_cost\n"
        "print({'absl', 'ml_dtypes', 'safetensors', 'rich', 'jinja2', 'matplotlib', 'scipy'}"
        " & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "set()\n"), result.stderr
