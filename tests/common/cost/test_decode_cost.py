"""sparrow cost: bytes by hand, the paper's bounds, eFLOPs against a loop, lengths, the command."""

import dataclasses
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from common.cli import command_line
from common.cost import chips, cost_report, decode_cost, eflops, lengths
from common.cost.lengths import Lengths
from common.errors import UserError
from common.model import hf
from common.model.geometry import QWEN3, Geometry
from common.schedule.schedule import DENSE, Schedule

TINY = Geometry(
    vocab_size=61, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
ONE = Schedule(page_size=16, bin_tokens=2000, budgets=(1,))
CHIP = chips.Chip(
    name="c", bytes_per_second=1e6, flops_per_second=1e12, memory_bytes=1e6, source="a test"
)
BOUNDS = {"qwen3-1.7b": 3.36, "qwen3-4b": 2.95, "qwen3-8b": 2.57, "qwen3-14b": 1.85}


def published(name, tau="0.86"):
    return cost_report.read_schedule(f"{name}-{tau}")


def h200(**changes):
    return decode_cost.Setting(chip=chips.CHIPS["h200"], **changes)


def speedup(name, schedule, rows, setting):
    g = QWEN3[name]
    batch = decode_cost.batch_that_fits(g, rows, schedule.page_size, setting)
    dense, sparse = (decode_cost.predict(g, s, rows, batch, setting) for s in (None, schedule))
    return sparse["tokens_per_second"] / dense["tokens_per_second"]


# --- bytes ---


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
    got = decode_cost.row_bytes(TINY, ONE, rows)
    assert got.tolist() == [2 * 101 * 128 + 4 * 2048 + 7 * 64, 2 * 41 * 128 + 3 * 2048 + 3 * 64]
    assert decode_cost.decode_speedup(TINY, ONE, rows) == pytest.approx(
        (weights + 3 * 142 * 128) / (weights + 2 * 142 * 128 + 7 * 2048 + 10 * 64)
    )


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
        decode_cost.row_bytes(TINY, None, np.array([-1]))
    with pytest.raises(ValueError, match="expected integer lengths"):
        decode_cost.row_bytes(TINY, ONE, np.array([1.5]))


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


# --- lengths and the batch ---


def test_rows_in_flight_by_hand():
    """R = 1, 2, 3, 4 in equal parts: P(R > t) = 1, 3/4, 1/2, 1/4."""
    rows = lengths.histogram([0, 2, 4], [5, 5], prompt=10)
    assert rows.weights.tolist() == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rows.cached.tolist() == [10, 11, 12, 13]
    assert rows.mean_response == pytest.approx(2.5)
    assert rows.mean_cached == pytest.approx(10 + (0.75 + 1 + 0.75) / 2.5)
    assert lengths.fixed(3).weights.tolist() == [1, 1, 1]
    late = lengths.histogram([4, 5, 9], [1, 0])
    assert late.weights.tolist() == pytest.approx([1] * 5) and late.longest_response == 5


def test_rows_in_flight_are_those_of_a_simulated_engine():
    """A slot that is refilled at once passes through every length of one response after another."""
    rng = np.random.default_rng(0)
    rows = lengths.histogram([0, 20, 100], [30, 10])
    short = rng.random(40_000) < 0.75
    ends = np.where(short, rng.integers(1, 21, 40_000), rng.integers(21, 101, 40_000))
    seen = np.concatenate([np.arange(n) for n in ends])
    assert ends.mean() == pytest.approx(rows.mean_response, rel=0.02)
    assert seen.mean() == pytest.approx(rows.mean_cached, rel=0.02)
    assert rows.mean_cached > 1.8 * lengths.fixed(23).mean_cached  # long ones are seen more often
    late = rows.weights[50:].sum() / rows.weights.sum()
    assert np.mean(seen >= 50) == pytest.approx(late, rel=0.05)


def test_batch_by_hand():
    """33 KB of weights and rows of 64 tokens: 4 pages of 3 x (2,048 + 64) = 6,336 bytes."""
    setting = decode_cost.Setting(chip=CHIP, samples=1, memory_share=0.5, reserve=True)
    rows = lengths.fixed(64)
    assert decode_cost.row_memory(TINY, rows, 16, setting) == 4 * 6336
    room = 0.5 * 1e6 - 2 * decode_cost.num_parameters(TINY)
    assert decode_cost.batch_that_fits(TINY, rows, 16, setting) == room // (4 * 6336) > 10
    growing = dataclasses.replace(setting, reserve=False)  # 1, 2, 3 and 4 pages in equal parts
    assert decode_cost.row_memory(TINY, rows, 16, growing) == 2.5 * 6336
    shared = dataclasses.replace(setting, samples=4)  # 40 tokens: 2 full pages, a quarter each
    prompt = lengths.fixed(24, prompt=40)
    assert decode_cost.row_memory(TINY, prompt, 16, shared) == (4 - 0.75 * 2) * 6336
    asked = dataclasses.replace(setting, batch=3)
    assert decode_cost.batch_that_fits(TINY, rows, 16, asked) == 3
    for fault in ({"batch": 1000}, {"memory_share": 0.01}):
        with pytest.raises(UserError, match="do not fit: .* give more --chips"):
            decode_cost.batch_that_fits(TINY, rows, 16, dataclasses.replace(setting, **fault))


def test_prediction_by_hand():
    """One row that stays at 0 cached tokens, at 1 MB/s: bytes are microseconds."""
    setting = decode_cost.Setting(chip=CHIP, samples=1)
    rows = Lengths(prompt=0, weights=np.ones(1))
    got = decode_cost.predict(TINY, None, rows, 1, setting)
    size = sum(decode_cost.step_bytes(TINY, None, np.array([0])).values())
    assert got["step_seconds"] == pytest.approx(size / 1e6)
    assert got["tokens_per_second"] == pytest.approx(1e6 / size)
    slow = dataclasses.replace(CHIP, flops_per_second=1e5)
    bound = decode_cost.predict(TINY, None, rows, 5, dataclasses.replace(setting, chip=slow))[
        "seconds"
    ]
    assert bound["weights"] == pytest.approx(2 * decode_cost.step_weights(TINY) * 5 / 1e5)
    # 4 heads of 16: 4 x 4 x 16 operations a layer for a key and its value
    assert bound["kv_dense_layers"] == pytest.approx(2 * 5 * 256 / 1e5)
    rows = Lengths(prompt=10, weights=np.ones(20))
    flops = 2 * decode_cost.layer_weights(TINY) * 10 + 3 * (4 * 4 * 16) * 10 * 10 / 2
    prefill = decode_cost.predict(TINY, ONE, rows, 5, dataclasses.replace(setting, samples=2))
    assert prefill["seconds"]["prefill"] == pytest.approx(5 / (20 * 2) * flops / 1e12)


# --- what the paper says ---


@pytest.mark.parametrize(("share", "tolerance"), [(0.75, 0.011), (decode_cost.MEMORY_SHARE, 0.025)])
@pytest.mark.parametrize("name", QWEN3)
def test_byte_bounds_of_the_paper(name, share, tolerance):
    """One H200, cache full, schedule 0.86, responses of 32K: rows in flight at all lengths, no
    prompt, `share` of 141 GB for weights and cache, landmarks in it; embedding not read."""
    got = speedup(name, published(name), lengths.fixed(32_768), h200(memory_share=share))
    assert got == pytest.approx(BOUNDS[name], rel=tolerance)


def test_the_bounds_depend_on_each_part_of_the_model():
    """Without dense layers or landmarks, or with rows all at their end, they are missed."""
    g, schedule, rows = QWEN3["qwen3-4b"], published("qwen3-4b"), lengths.fixed(32_768)
    setting = h200(memory_share=0.75)
    assert speedup("qwen3-4b", schedule, rows, dataclasses.replace(setting, num_dense_layers=0)) > (
        1.05 * BOUNDS["qwen3-4b"]
    )
    batch = decode_cost.batch_that_fits(g, rows, 16, setting)
    sparse = decode_cost.predict(g, schedule, rows, batch, setting)
    dense = decode_cost.predict(g, None, rows, batch, setting)["step_seconds"]
    without = sparse["step_seconds"] - sparse["seconds"]["landmarks"]
    assert dense / without > 1.05 * BOUNDS["qwen3-4b"]
    last = Lengths(prompt=32_767, weights=np.ones(1))
    assert abs(speedup("qwen3-4b", schedule, last, setting) / BOUNDS["qwen3-4b"] - 1) > 0.05


def test_speedup_falls_with_the_size_of_the_model():
    """At 32K: with the models' own schedules and with one for all, in both cost models. At 8K 4B
    gains more than 1.7B, whose schedule is denser there."""
    rows = lengths.fixed(32_768, prompt=1024)
    options = {"prompt": 1024, "response": 32_768, "samples": 8}
    options["intensity"] = chips.CHIPS["h200"].intensity
    for one in (None, published("qwen3-4b")):
        own = {name: one or published(name) for name in QWEN3}
        by_bytes = [speedup(name, own[name], rows, h200()) for name in QWEN3]
        by_eflops = [eflops.speedup(g, own[name], **options) for name, g in QWEN3.items()]
        for values in (by_bytes, by_eflops):
            assert values == sorted(values, reverse=True) and values[0] > 1.1 * values[-1]
    short = lengths.fixed(8192, prompt=1024)
    small, larger = (speedup(n, published(n), short, h200()) for n in ("qwen3-1.7b", "qwen3-4b"))
    assert larger > small


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
            decode_cost.row_bytes(QWEN3["qwen3-4b"], decode_cost.same_tokens(base, c), span)
            for c in sizes
        ]
        return sizes[int(np.argmin([x.mean() for x in total]))]

    assert [cheapest(n) for n in (2600, 2900)] == [16, 16]
    assert [cheapest(n) for n in (3200, 8000, 12_000)] == [32, 32, 32]
    assert [cheapest(n) for n in (12_600, 30_000, 48_800)] == [64, 64, 64]
    assert [cheapest(n) for n in (49_500, 100_000)] == [128, 128]


@pytest.mark.parametrize("name", QWEN3)
def test_what_pages_of_16_cost_more(name):
    """At most 6 % of the tokens a second of the best page size, at any of these lengths: that is
    how much more acceptance is worth. In eFLOPs, without reserved pages, larger is always
    cheaper."""
    for response in (2048, 8192, 32_768):
        rows = lengths.fixed(response, prompt=512)
        record = cost_report.compare(
            QWEN3[name], published(name), rows, h200(batch=8), [16, 32, 64, 128], 0.1
        )
        rates = {p["page_size"]: p["tokens_per_second"] for p in record["page_sizes"]}
        assert max(rates.values()) < 1.06 * rates[16]
        assert (record["best_page_size"] == 16) == (response == 2048)
    exact = Schedule(page_size=16, bin_tokens=2000, budgets=(32,))
    options = {"prompt": 512, "response": 8192, "samples": 8, "intensity": 206.0}
    by_page = [
        eflops.speedup(QWEN3[name], decode_cost.same_tokens(exact, c), **options)
        for c in (16, 32, 64)
    ]
    assert by_page == sorted(by_page)


def test_same_tokens_rounds_up_and_keeps_dense():
    schedule = Schedule(page_size=16, bin_tokens=10, budgets=(29, 64, 0, DENSE), name="s")
    assert decode_cost.same_tokens(schedule, 16) is schedule
    other = decode_cost.same_tokens(schedule, 64)
    assert other.page_size == 64 and other.budgets == (8, 16, 0, DENSE)  # 29 x 16 = 464 = 7.25 x 64
    assert decode_cost.same_tokens(schedule, 8).budgets == (58, 128, 0, DENSE)


def test_whole_step_by_the_papers_measurements():
    """2.21x of the rollout was 1.97x of the step, 2.41x was 2.11x: a tenth is not rollout."""
    assert decode_cost.whole_step_speedup(2.21, 0.1) == pytest.approx(1.97, abs=0.01)
    assert decode_cost.whole_step_speedup(2.41, 0.1) == pytest.approx(2.11, abs=0.02)
    assert decode_cost.whole_step_speedup(2.21, 0) == pytest.approx(2.21)


# --- eFLOPs ---


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
    got = eflops.eflops(TINY, None, **options)
    want = [parameters, dense[0], 7 * dense[1], 0, 0]
    assert list(got.values()) == pytest.approx(want)
    # the closed forms of the paper
    assert got["attention"] == pytest.approx(r * (2 * 20 + 50) * 50 * 3 * D)
    assert got["attention_memory"] == pytest.approx(7 * (2 * 20 * 50 * D + 3 * 50**2 * D))
    got = eflops.eflops(TINY, schedule, **options)
    want = [parameters, sparse[0], 7 * sparse[1], sparse[2], 7 * sparse[3]]
    assert list(got.values()) == pytest.approx(want)


def test_eflops_of_a_fixed_budget_have_the_papers_terms():
    budget = Schedule(page_size=16, bin_tokens=2000, budgets=(4,))  # 64 of at least 100 tokens
    got = eflops.eflops(TINY, budget, prompt=100, response=40, samples=2, intensity=5.0)
    D, r, B = 3 * 2 * 2 * 16, 2, 64
    assert got["attention"] == 2 * r * 2 * D * B * 40
    assert got["attention_memory"] == 2 * 5 * 2 * D * B * 40
    assert got["scoring"] == pytest.approx(2 * D * (2 * 100 + 40) * 40 / (2 * 16))
    assert got["scoring_memory"] == pytest.approx(5 * D * (100 * 40 + 2 * 40**2 / 2) / 16)


# --- chips ---


def test_chips_are_complete_and_sane():
    for name, chip in chips.CHIPS.items():
        assert chip.name == name and len(chip.source) > 10
        assert 1e11 < chip.bytes_per_second < 1e13 and 1e10 < chip.memory_bytes < 1e12
        assert 100 < chip.intensity < 600  # FLOP a byte
    four = chips.CHIPS["h200"].times(4)
    assert four.memory_bytes == 4 * 141e9 and four.intensity == chips.CHIPS["h200"].intensity
    assert four.describe().startswith("4 x h200: 564 GB at 19200 GB/s")
    with pytest.raises(UserError, match="expected one of a100, h100"):
        chips.find("h300")


def test_this_machine_is_measured(monkeypatch):
    """Two clock readings a second apart around each of four runs: 2 x bytes, 2 x width^3 in it."""
    monkeypatch.setattr(chips.time, "perf_counter", iter(map(float, range(16))).__next__)
    chip = chips.measure(copy_bytes=4096, width=10)
    assert (chip.bytes_per_second, chip.flops_per_second) == (8192, 2000)
    assert chip.memory_bytes > 2**28


# --- the command ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, line):
    status = command_line.main(["cost", *shlex.split(line)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_prints_and_writes_what_it_computes(folder, capsys):
    line = "--model=qwen3-4b --schedule=qwen3-4b-0.86 --lengths=32768 --prompt=0 --out=c/cost.json"
    status, out, err = run(capsys, line)
    assert (status, err) == (0, "")
    record = json.loads((folder / "c" / "cost.json").read_text())
    want = speedup("qwen3-4b", published("qwen3-4b"), lengths.fixed(32_768), h200())
    assert record["speedup"] == pytest.approx(want)
    assert f"{want:.2f}x" in out and f"{record['whole_step_speedup']:.2f}x" in out
    assert sum(record["sparse"]["seconds"].values()) == record["sparse"]["step_seconds"]
    assert [p["page_size"] for p in record["page_sizes"]] == [16, 32, 64, 128]
    assert record["page_sizes"][0]["tokens_per_second"] == record["sparse"]["tokens_per_second"]
    assert record["setting"]["chip"]["name"] == "h200" and "NVIDIA H200" in out


def test_own_model_schedule_file_and_histogram(folder, capsys):
    hf.save(folder / "m", TINY, {n: np.zeros(s) for n, s in decode_cost.param_shapes(TINY).items()})
    dataclasses.replace(ONE, page_size=32, name="mine").save(folder / "s.json")
    (folder / "h.json").write_text('{"edges": [0, 100, 400], "counts": [3, 1]}')
    found = {}
    for model in ("m", "m/config.json"):
        line = f"--model={model} --schedule=s.json --lengths=h.json --prompt=50 --batch=4"
        status, out, _ = run(capsys, f"{line} --page_sizes=16 --chip=v5e --chips=2 --out=c.json")
        assert status == 0 and "2 x v5e" in out and "mine (pages of 32)" in out
        found[model] = json.loads((folder / "c.json").read_text())
    a, b = found.values()
    assert a.pop("model") != b.pop("model") and a == b
    assert a["mean_response"] == pytest.approx(0.75 * 50.5 + 0.25 * 250.5)
    assert a["batch"] == 4 and a["longest_response"] == 400
    assert [p["page_size"] for p in a["page_sizes"]] == [16, 32]
    assert a["page_sizes"][0]["budgets"] == [2]


def test_reserved_pages_mean_fewer_rows_and_less_speedup(folder, capsys):
    """Our engines take a row's pages at once, so about half as many rows share the weights."""
    line = "--model=qwen3-8b --schedule=qwen3-8b-0.86 --lengths=32768 --out=c.json"
    records = []
    for flag, words in [("", "at the mean of rows in flight"), (" --reserve", "the longest")]:
        status, out, _ = run(capsys, line + flag)
        assert status == 0 and words in out
        records.append(json.loads((folder / "c.json").read_text()))
    growing, reserved = records
    assert 0.45 < reserved["batch"] / growing["batch"] < 0.55
    assert reserved["speedup"] < 0.95 * growing["speedup"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("--model=qwen3-3b", "did you mean qwen3-"),
        ("--model=zzz", "built in: qwen3-1.7b"),
        ("--schedule=dense", "is dense; name one to compare"),
        ("--schedule=qwen3-4b-0.87", "nearest name"),
        ("--schedule=h.json", "format=None, expected 'sparrow-schedule-1'"),
        ("--lengths=0", "--lengths=0: expected an integer in [1,"),
        ("--lengths=-5", "no such file, and no number of tokens"),
        ("--lengths=h.json", "h.json: key 'counts' is missing"),
        ("--lengths=i.json", "2 edges and 2 counts; expected rising edges"),
        ("--lengths=j.json", "j.json: counts[0]=-1: expected an integer"),
        ("--lengths=k.json", "k.json: not a JSON file"),
        ("--lengths=l.json", "all counts are 0"),
        ("--lengths=n.json", "expected rising edges"),
        ("--prompt=-1", "--prompt=-1: expected"),
        ("--samples=0", "--samples=0: expected"),
        ("--chip=h300", "unknown chip"),
        ("--chips=0", "chips=0: expected"),
        ("--chips=1" + 400 * "0", "expected an integer at most 2147483647"),
        ("--samples=1" + 400 * "0", "expected an integer at most 2147483647"),
        ("--lengths=o.json", "expected an integer at most 2147483647"),
        ("--lengths=p.json", "p.json: not a JSON file"),
        ("--schedule=q.json", "q.json: bin_tokens=1000"),
        ("--page_sizes=16,x", "expected numbers with commas"),
        ("--page_sizes=0", "--page_sizes=0: expected"),
        ("--kv_bytes=3", "--kv_bytes=3: expected 1"),
        ("--memory_share=1.5", "--memory_share=1.5: expected in (0, 1]"),
        ("--memory_share=nan", "--memory_share=nan: expected in (0, 1]"),
        ("--train_share=1", "--train_share=1: expected in [0, 1)"),
        ("--model=qwen3-14b --chip=v5e", "rows do not fit"),
        ("--out=.", "is a directory"),
    ],
)
def test_mistakes_end_in_one_line(folder, capsys, change, part):
    for name, text in {
        "h": '{"edges": [0, 1]}', "i": '{"edges": [0, 1], "counts": [1, 1]}',
        "j": '{"edges": [0, 1], "counts": [-1]}', "k": "{", "l": '{"edges": [0, 1], "counts": [0]}',
        "n": '{"edges": [5, 1], "counts": [1]}',
        "o": '{"edges": [0, 1], "counts": [1' + 400 * "0" + "]}",
        "p": '{"edges": [0, 1], "counts": [1' + 5000 * "0" + "]}",
        "q": '{"format": "sparrow-schedule-1", "page_size": 16, "bin_tokens": 1' + 30 * "0"
             + ', "bins": [{"start": 0, "end": 64, "k": 4}]}',
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(text)
    given = "--model=qwen3-4b --schedule=k=64 --lengths=1000 "
    status, out, err = run(capsys, given + change)
    assert (status, out) == (2, "") and part in err and err.count("\n") == 1


def test_the_model_of_bytes_needs_numpy_only():
    """sparrow_torch/bench.py uses it where only torch, triton and numpy are installed."""
    program = (
        "import sys, common.cost.decode_cost\n"
        "print({'absl', 'ml_dtypes', 'safetensors', 'rich', 'jinja2', 'matplotlib', 'scipy'}"
        " & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "set()\n"), result.stderr
