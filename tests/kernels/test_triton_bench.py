"""kernels_triton/bench.py without a GPU; times are not checked."""

import dataclasses
import json

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this machine")
from kernels_triton import bench, bench_check, bench_peers  # noqa: E402
from kernels_triton.ops import REFERENCE, kernels  # noqa: E402

SMALL = bench.Case(
    model="small", heads=4, batch=2, context=128, selected=5, kv_heads=2, head_dim=64,
    dtype="float32",
)  # fmt: skip
CPU = torch.device("cpu")


def test_bytes_that_have_to_be_read():
    """32,768 tokens of 8 heads: 4 KiB of keys and values a token, 2 KiB of landmarks a page."""
    case = bench.Case(model="", heads=16, kv_heads=8, batch=2, context=32_768, selected=256)
    want = {"select": 2 * 2048 * 2048, "attend": 2 * 256 * 16 * 4096, "dense": 2 * 32_768 * 4096}
    assert case.bytes_read == want | {"sparse": want["select"] + want["attend"]}


def test_cases_fit_the_card():
    small, large = (list(bench.cases(n * 10**9)) for n in (16, 141))
    assert len(large) == 27 and 0 < len(small) < 27
    assert max(c.bytes_read["dense"] for c in small) < 8e9


@pytest.fixture(scope="module")
def float8_queries():
    """float16 queries beside a float8 cache, as the interpreter cannot multiply bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bench_check.OUTER, torch.float8_e4m3fn, torch.float16)
        yield


def failures(ops, dtypes=(torch.float32,)):
    results = list(bench_check.checks(ops, CPU, dtypes, heads=((4, 2),), H=32))
    assert len(results) > 15
    return [r.name for r in results if not r.ok]


def test_right_operations_pass_the_checks(float8_queries):
    assert failures(kernels(), (torch.float16, torch.float8_e4m3fn)) == []
    assert failures(REFERENCE, (torch.bfloat16, torch.float32)) == []


def first_pages(q, marks, layer, table, pages, k, *, max_selected):
    ids, count = REFERENCE.select_pages(q, marks, layer, table, pages, k, max_selected=max_selected)
    listed = table[:, None, :max_selected].expand_as(ids)
    return torch.where(ids > 0, listed, 0), count


def one_key_less(q, kv, layer, ids, start, length):
    return REFERENCE.sparse_decode(q, kv, layer, ids, start - 1, (length - 1).clamp(min=1))


def one_key_of_a_list_less(q, kv, layer, ids, start, length):
    """Dense decode is right."""
    decode = one_key_less if ids.ndim == 3 else REFERENCE.sparse_decode
    return decode(q, kv, layer, ids, start, length)


def nothing_written(q, kv, layer, ids, start, length):
    out, lse = REFERENCE.sparse_decode(q, kv, layer, ids, start, length)
    out[-1] = torch.nan
    return out, lse


def no_landmark(kv, marks, *args):
    REFERENCE.append_kv(kv, marks.clone(), *args)
    return kv, marks


def writes_too_much(kv, marks, layer, k, v, table, start, count):
    return REFERENCE.append_kv(kv, marks, layer, k, v, table, start, count + 1)


def all_pages(q, k, v, **options):
    return REFERENCE.flash_prefill(q, k, v)


def twice_the_gradient(q, k, v, **options):
    return REFERENCE.flash_prefill(q, k, 2 * v - v.detach(), **options)


def no_gradient_of_the_head(hidden, head, token, *, temperature):
    return REFERENCE.token_logprob(hidden, head.detach() + 0 * head, token, temperature=temperature)


def no_temperature(*args, temperature):
    return REFERENCE.token_logprob(*args)


def swapped(dense, sparse, head, token, *, temperature):
    return REFERENCE.acceptance_overlap(dense, dense, head, token, temperature=temperature)


@pytest.mark.parametrize(("name", "fault", "seen"), [
    ("select_pages", first_pages, "selected pages"), ("sparse_decode", one_key_less, "output"),
    ("sparse_decode", one_key_of_a_list_less, "sparse decode"),
    ("flash_prefill", twice_the_gradient, "dv"),
    ("token_logprob", no_gradient_of_the_head, "gradient of head"),
    ("sparse_decode", nothing_written, "dense decode"), ("append_kv", no_landmark, "landmark"),
    ("append_kv", writes_too_much, "pool"), ("flash_prefill", all_pages, "replay"),
    ("token_logprob", no_temperature, "log-prob"), ("acceptance_overlap", swapped, "overlap"),
])  # fmt: skip
def test_wrong_operations_do_not(name, fault, seen):
    ops = dataclasses.replace(REFERENCE, **{name: fault})
    wrong = failures(ops)
    assert any(seen in w for w in wrong)


def test_wrong_kernels_are_not_timed(monkeypatch, capsys):
    def checks(*args):
        yield bench_check.Result("x", 1.0, 0.5)
        yield bench_check.Result("y", float("nan"), 0.5)

    monkeypatch.setattr(bench_check, "checks", checks)
    monkeypatch.setattr(bench, "provenance", lambda device: {"device": "none"})
    assert bench.run(CPU) is None
    assert "0 of 2 comparisons" in capsys.readouterr().out


@pytest.fixture
def clock(monkeypatch):
    """Everything that is timed runs once, with a made-up time of a millisecond."""

    def milli(f):
        f()
        return 1000.0

    monkeypatch.setattr(bench, "microseconds", milli)


def test_a_row_of_the_table(clock):
    row = bench.measure(REFERENCE, SMALL, CPU, copy=1.0)
    # 2 x 128 tokens of 1 KiB; 2 x 5 pages of 16 KiB; 2 x 8 landmarks of 512 B
    assert row["dense_gb_per_s"] == pytest.approx(2 * 128 * 1024 / 1e6)
    assert row["sparse_share"] == pytest.approx((2 * 5 * 16384 + 2 * 8 * 512) / 1e6)
    assert row["speedup"] == row["select_time"] == 1 and row["torch_us"] == 1000
    assert row["flashinfer_us"] == "not installed"
    assert "1.00x  select 100%, combine 0% of sparse; dense by torch 1000.0" in bench.text(row)
    json.dumps(row)
    good = row | {"dense_share": 0.86, "sparse_share": 0.75, "select_time": 0.15}
    assert bench.verdict([row, good]) == (
        "dense at 85% of copy bandwidth: 1; sparse at 75% of copy bandwidth: 1; "
        "selection within 15% of sparse attention: 1 of 2 rows"
    )


def test_the_timed_parts_are_the_operations_that_were_checked():
    x = bench.inputs(SMALL, CPU)
    got, want = (bench.parts(ops, SMALL, x) for ops in (kernels(), REFERENCE))
    torch.testing.assert_close(got["select"](), want["select"]())
    for name in ("sparse", "dense"):
        torch.testing.assert_close(got[name](), want[name](), atol=1e-5, rtol=1e-5)
    assert (want["sparse"]()[0] - want["dense"]()[0]).abs().max() > 0.01


def test_joining_splits_is_timed_where_there_are_several():
    assert bench.combine(SMALL, CPU) is None
    bench.combine(dataclasses.replace(SMALL, context=1024, selected=48), CPU)()


def test_a_peer_that_refuses_does_not_end_the_run(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no kernel\nfor this card")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    x = bench.inputs(SMALL, CPU)
    clock = lambda f: f()  # noqa: E731
    assert bench_peers.torch_sdpa(x, clock) == "refused: no kernel for this card"


def test_without_a_gpu_it_says_what_it_would_run(capsys):
    assert bench.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no GPU here; nothing was run.") and len(out.splitlines()) == 28
