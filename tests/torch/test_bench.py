"""sparrow_torch/bench.py as far as a machine without a GPU goes; times are not looked at."""

import pytest
import torch

from common.cost import decode_cost
from common.model.geometry import Geometry
from kernels_triton.ops import REFERENCE
from sparrow_torch import bench
from sparrow_torch.decode import run_again

TINY = Geometry(
    vocab_size=61, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=16, rope_theta=1e4,
)  # fmt: skip


@pytest.mark.parametrize(("name", "bound"), [("1.7b", 3.36), ("4b", 2.95), ("8b", 2.57)])
def test_bounds_are_near_the_published_ones(name, bound):
    """The paper's, of one H200 with a full cache, has other assumptions about what is read."""
    g = bench.MODELS[name]
    mixed, long = bench.batches(g, bench.CACHE_BYTES)
    sizes = [bench.both_bytes(name, g, b) for b in (mixed, long)]
    got = [size["dense"] / size["sparse"] for size in sizes]
    assert bound * 0.98 < got[0] < bound * 1.08 and got[1] > got[0]
    for b in (mixed, long):
        cached = int((b.lengths + bench.MARGIN).sum()) * decode_cost.token_bytes(g)
        assert 0.93 * bench.CACHE_BYTES < cached <= bench.CACHE_BYTES


def test_the_rows_of_a_model(monkeypatch):
    """Dense and sparse steps are those of the engine: one token for each row, appended."""
    monkeypatch.setattr(bench, "MARGIN", 32)
    steps = []

    def clock(step):
        before = step.cached_B.clone()
        step.run()
        assert step.active_B.all() and (step.cached_B == before + 1).all()
        assert step.logp_B.isfinite().all() and step.token_B.max() < 61
        steps.append(step)
        return 2.0 if step.shape.max_selected else 3.0

    rows = list(bench.run_model(
        "1.7b", TINY, REFERENCE, torch.device("cpu"), clock, 1.0, capture=run_again,
        cache_bytes=800 * decode_cost.token_bytes(TINY), dtype=torch.float32, context=256,
    ))  # fmt: skip
    assert [r["rows"] for r in rows] == [5, 3] and all(r["speedup"] == 1.5 for r in rows)
    assert rows[0]["sparse_tokens_per_s"] == 2500
    assert 0.9 < rows[0]["bound"] < 1  # of so few pages all are read, and their landmarks
    assert "1.7b   5 rows of 1 to 256 tokens" in bench.text(rows[0])
    assert bench.verdict(rows) == "1.7b: 1.50x, goal 3.0x"
    tables = [step.table_BP[step.table_BP > 0] for step in steps]
    assert all(len(t.unique()) == len(t) for t in tables)  # no page belongs to two rows
    assert [s.shape.max_selected > 0 for s in steps] == [False, True] * 2


def test_without_a_gpu_it_says_what_it_would_run(capsys):
    assert bench.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no GPU here") and out.count("bytes allow") == 6
    assert "1.7b: 61 rows of 1 to 32768 tokens, bytes allow 3.39x" in out


def test_room_for_the_cache():
    """What is free, less weights and 4 GiB; a row of 32K tokens has 4.5 GiB in 8B."""
    g = bench.MODELS["8b"]
    assert bench.cache_room(g, 149 * 10**9) == bench.CACHE_BYTES
    room = bench.cache_room(g, 40 * 2**30)
    assert room == int(0.95 * 40 * 2**30) - 2 * decode_cost.step_weights(g) - 2**32 > 4.5 * 2**30
    assert bench.cache_room(g, 20 * 2**30) == 0
