"""The command `sparrow cost`: what it prints and writes, and the mistakes that it refuses."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from common.cli import command_line
from common.cost import cost_report, decode_cost, prediction
from common.model import hf
from common.model.geometry import QWEN3
from common.schedule.schedule import Schedule
from tests.common.cost.test_decode_cost import ONE, TINY
from tests.common.cost.test_prediction import h200, published, speedup


@pytest.mark.parametrize("name", QWEN3)
def test_what_pages_of_16_cost_more(name):
    """At most 6 % of the tokens a second of the best page size, at any of these lengths: that is
    how much more acceptance is worth. In eFLOPs, without reserved pages, larger is always
    cheaper."""
    for response in (2048, 8192, 32_768):
        rows = prediction.fixed_lengths(response, prompt=512)
        record = cost_report.compare(
            QWEN3[name], published(name), rows, h200(batch=8), [16, 32, 64, 128], 0.1
        )
        rates = {p["page_size"]: p["tokens_per_second"] for p in record["page_sizes"]}
        assert max(rates.values()) < 1.06 * rates[16]
        assert (record["best_page_size"] == 16) == (response == 2048)
    exact = Schedule(page_size=16, bin_tokens=2000, budgets=(32,))
    options = {"prompt": 512, "response": 8192, "samples": 8, "intensity": 206.0}
    by_page = [
        decode_cost.eflops_speedup(QWEN3[name], decode_cost.same_tokens(exact, c), **options)
        for c in (16, 32, 64)
    ]
    assert by_page == sorted(by_page)


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
    want = speedup("qwen3-4b", published("qwen3-4b"), prediction.fixed_lengths(32_768), h200())
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
        ("--lengths=-5", "neither a file nor a number of tokens"),
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
