"""kernels_pallas/bench.py without a TPU; times are not checked."""

import dataclasses

import jax
import pytest

from kernels_pallas import bench
from kernels_pallas.ops import REFERENCE, kernels
from tests.kernels.ladder import ON_WAIT

SMALL = bench.Case(
    context=128, heads=4, batch=2, selected=5, kv_heads=2, head_dim=64, dtype="float32"
)


def test_bytes_that_have_to_be_read():
    """32,768 tokens of 8 heads: 4 KiB of keys and values a token, 2 KiB of landmarks a page."""
    case = bench.Case(context=32_768, heads=16, batch=2, selected=256)
    want = {"select": 2 * 2048 * 2048, "attend": 2 * 256 * 16 * 4096, "dense": 2 * 32_768 * 4096}
    assert case.bytes_read == want


@pytest.mark.parametrize("ops", [REFERENCE, kernels(ON_WAIT)], ids=lambda ops: ops.name)
def test_right_operations_pass(ops):
    errors = bench.check(ops, SMALL)
    assert errors["ids_differ"] == 0 and max(errors.values()) < 1e-5


def test_wrong_operations_do_not():
    ops = REFERENCE

    def first_pages(q, marks, layer, table, pages, k, *, max_selected):
        return table[:, None, :max_selected].repeat(2, 1), pages

    def halved(*args):
        out, lse = ops.sparse_decode(*args)
        return out / 2, lse

    errors = bench.check(dataclasses.replace(ops, select_pages=first_pages), SMALL)
    assert errors["ids_differ"] > 0.1
    errors = bench.check(dataclasses.replace(ops, sparse_decode=halved), SMALL)
    assert errors["out_error"] > 0.1 > errors["lse_error"]


def test_a_row_of_the_table(monkeypatch):
    """All parts run, with a made-up time of a millisecond each."""

    def millisecond(f, x):
        jax.block_until_ready(jax.jit(f)(x))
        return 1e-3

    monkeypatch.setattr(bench, "seconds", millisecond)
    row = bench.measure(REFERENCE, SMALL, peak=1.0)
    # 2 x 128 tokens of 1 KiB; 2 x 5 pages of 16 KiB; 2 x 8 landmarks of 512 B
    assert row["dense_gb_per_s"] == pytest.approx(2 * 128 * 1024 / 1e6)
    assert row["attend_share"] == pytest.approx(2 * 5 * 16384 / 1e6)
    assert row["top_k_share"] == row["scattered_share"] == pytest.approx(2 * 8 * 512 / 1e6)
    assert row["speedup"] == 1 and row["select_bytes"] == 1 / 20
    assert "select 100% of attend (bytes 5%)" in bench.text(row)
    good = row | {"dense_share": 0.86, "attend_share": 0.6, "select_time": 0.2}
    assert bench.verdict([row, good]) == (
        "dense at 85% of peak: 1; attend at 60% of peak: 1; "
        "selection within 20% of attention: 1 of 2 rows"
    )


def test_time_of_a_call():
    x = bench.inputs(SMALL)
    assert 0 < bench.seconds(lambda x: x["q"] * 2, x, repeats=2, inner=2) < 1


def test_without_a_tpu_it_says_what_it_would_run(capsys):
    assert bench.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no TPU here (the device is cpu); nothing was run. It would measure:\n")
    assert len(out.splitlines()) == 13
