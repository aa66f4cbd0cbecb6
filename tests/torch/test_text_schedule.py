"""`sparrow profile --replay --schedule`: a schedule's tail on given text, with both scorers.

The tiny model has two layers. Keys of the second one depend on what the first one read: with both
sparse, the keys of early positions are others under k = 0 than under k = 3. With a dense first
layer they are the same whatever the budget.
"""

import contextlib
import json
import signal

import numpy as np
import pytest

from common import oracles
from common.cli import command_line
from common.mismatch import acceptance
from common.profile import schedule_check
from common.schedule.profile_file import load_profile
from common.schedule.schedule import DENSE, Schedule
from sparrow_jax.scorer import Scorer as JaxScorer
from tests.jax import tiny_model
from tests.jax.tiny_model import PAGE, G

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, BIN = 40, 20
GROWS = (0, 3)
ENGINES = ("jax", "torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels_pallas.reference.SEGMENTS", 1)  # less to compile
        yield tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def profile(model, tmp_path, monkeypatch):
    """profile("--schedule=k=3", ...) in tmp_path on ids.json, 130 tokens; the exit status."""
    monkeypatch.chdir(tmp_path)
    tiny_model.write_ids(tmp_path / "ids.json", 130)

    def run(*flags, out="c.json", engine="jax", num_dense=0):
        line = ["profile", f"--model={model}", "--replay=ids.json", f"--out={out}"]
        line += [f"--max_tokens={T}", "--config.mismatch.min_tokens=15"]
        line += [f"--config.rollout.page_size={PAGE}", f"--config.rollout.engine={engine}"]
        line += [f"--config.rollout.num_dense_layers={num_dense}", *flags]
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        with contextlib.ExitStack() as stack:
            for number, handler in handlers.items():
                stack.callback(signal.signal, number, handler)
            return command_line.main(line)

    return run


def save(path, budgets, **more):
    Schedule(page_size=PAGE, bin_tokens=BIN, budgets=budgets, name="found", **more).save(path)
    return f"--schedule={path.name}"


def read(folder, name="c.json"):
    return json.loads((folder / name).read_text())


def bins(record):
    """What a check and a profile have in common, by bin."""
    return [{x: v for x, v in row.items() if x != "promised"} for row in record["bins"]]


def uniform(folder, k):
    return [row for row in load_profile(folder / "p.json")["rows"] if row["k"] == k]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_uniform_schedule_has_the_tail_of_the_uniform_profile(profile, tmp_path, engine):
    how = {"engine": engine}
    text = f"--bin_tokens={BIN}", "--sequences=3"
    assert profile("--topk=0,3", *text, out="p.json", **how) == 0
    for k in (0, 3):
        assert profile(f"--schedule=k={k}", *text, **how) == 0
        assert bins(read(tmp_path)) == uniform(tmp_path, k)
        assert profile(save(tmp_path / "s.json", (k, k)), "--sequences=3", **how) == 0
        assert bins(read(tmp_path)) == uniform(tmp_path, k)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_dense", [0, 1])
def test_a_growing_schedule_differs_where_its_early_keys_do(profile, tmp_path, engine, num_dense):
    """Bin 0 is that of k = 0; bin 1 is that of k = 3 if the keys it reads are, else lower."""
    how = {"engine": engine, "num_dense": num_dense}
    assert profile("--topk=0,3", f"--bin_tokens={BIN}", out="p.json", **how) == 0
    assert profile(save(tmp_path / "s.json", GROWS), **how) == 0
    found, few, more = bins(read(tmp_path)), uniform(tmp_path, 0), uniform(tmp_path, 3)
    assert [(row["k"], row["start"], row["count"]) for row in found] == [(0, 0, 20), (3, 20, 19)]
    assert found[0] == few[0] != more[0]
    if num_dense == 1:
        assert found[1] == more[1]
    else:
        assert found[1]["mean"] < more[1]["mean"] - 1e-3
    for row, want in zip(found, of_oracle(num_dense), strict=True):
        for name in ("mean", "p1", "p5", "p50", "p5_low", "p5_high"):
            assert row[name] == pytest.approx(getattr(want, name), abs=1e-5), name


def of_oracle(num_dense):
    """Statistics of the growing schedule by the float64 decoder."""
    ids = tiny_model.tokens(1, 130)[0, :T]
    how = {"page_size": PAGE, "num_dense_layers": num_dense}
    weights = tiny_model.oracle_weights()
    dense = oracles.decoder_forward(weights, G, ids, **how)
    how |= {"sparse_T": np.ones(T), "budgets": lambda t: GROWS[t // BIN]}
    sparse = oracles.decoder_forward(weights, G, ids, **how)
    alpha = np.pad(oracles.acceptance_overlap(dense[:-1], sparse[:-1], 1.0), (1, 0))[None]
    mask = np.arange(T)[None] > 0
    return acceptance.statistics(
        np.clip(alpha, 0, 1), mask, np.zeros(1), bin_tokens=BIN, min_tokens=15, block_tokens=64
    )


def test_the_tail_stands_beside_what_the_profile_promised(profile, tmp_path, capsys):
    """Bin 0 is as promised; a dense bin 1 was promised alpha = 1, but reads sparse keys."""
    assert profile("--topk=0", f"--bin_tokens={BIN}", "--sequences=3", out="p.json") == 0
    tau = uniform(tmp_path, 0)[0]["p5"]
    assert command_line.main(["schedule", "--profile=p.json", f"--tau={tau}", "--out=s.json"]) == 0
    capsys.readouterr()
    assert profile("--schedule=s.json", "--sequences=3") == 0
    record, said = read(tmp_path), capsys.readouterr().out
    first, last = record["bins"]
    names = ("p5", "p5_low", "p5_high")
    assert first["promised"] == {"k": 0, **{name: first[name] for name in names}}
    assert last["k"] == "dense" and last["promised"] == {"k": "dense", **dict.fromkeys(names, 1.0)}
    assert last["p5"] < 0.99
    gap = f"by {1 - last['p5']:.3f} at most (positions 20-40)"
    assert f"p5 is lower than the schedule's profile promised in 1 of 2 bins, {gap}" in said
    assert f"positions 20-40  k = dense  p5 {last['p5']:.3f} [" in said and "57 tokens" in said
    assert f"found for tau={tau}, quantile=0.05; it is judged by mismatch.tau=0.86" in said
    assert (
        record["source"] == "ids.json, 3 sequences of 40 tokens, replayed with the schedule itself"
    )
    assert record["schedule"]["bins"][1]["k"] == "dense"
    assert record["summary"]["len_mean"] == T and record["summary"]["reward"] is None
    assert sorted(p.name for p in tmp_path.iterdir() if "c.json" in p.name) == ["c.json"]


def test_pages_read_and_bins_that_the_text_does_not_reach(profile, tmp_path, capsys):
    """Queries that see 1 ... 39 tokens; 5 pages at most in bin 0, of which k + 3 = 3 are read.

    Bin 0 (1 ... 20 tokens): pages 1 2 3 4 5, four times each; read 1 2 3 3 3: 48 of 60.
    Bin 1 (21 ... 39): 6 7 8 9 four times, 10 thrice; read k + 3 = 6 of each: 114 of 150.
    """
    assert profile(save(tmp_path / "s.json", (0, 3, 5, 9))) == 0
    record, said = read(tmp_path), capsys.readouterr().out
    assert record["summary"]["share_of_pages"] == pytest.approx((48 + 114) / (60 + 150))
    assert [row["bin"] for row in record["bins"]] == [0, 1] and record["unjudged_bins"] == [2, 3]
    assert "no tokens in bins 2-3 (positions 40..79): not judged" in said
    assert "of 2 judged bins hold" in said and "promised" not in said
    assert profile("--schedule=s.json", "--config.mismatch.min_tokens=21") == 0
    assert read(tmp_path)["meets"] is None and read(tmp_path)["unjudged_bins"] == [0, 1, 2, 3]
    assert "no bin has enough tokens to judge; name a longer text" in capsys.readouterr().out


def passes(monkeypatch, stop_after=None):
    """Count the sparse passes of the scorer; Ctrl-C in the one after `stop_after`."""
    done, overlaps = [], JaxScorer.overlaps

    def counted(self, *args, **kwargs):
        for out in overlaps(self, *args, **kwargs):
            if len(done) == stop_after:
                raise KeyboardInterrupt
            done.append(kwargs["policy"])
            yield out

    monkeypatch.setattr(JaxScorer, "overlaps", counted)
    return done


def test_a_stopped_check_goes_on_but_not_with_another_schedule(
    profile, tmp_path, monkeypatch, capsys
):
    flags = save(tmp_path / "s.json", GROWS), "--sequences=3"
    assert profile(*flags, out="whole.json") == 0
    with monkeypatch.context() as patch:
        assert passes(patch, stop_after=2) == [] and profile(*flags) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()
    with monkeypatch.context() as patch:
        done = passes(patch)
        assert profile(*flags) == 0 and len(done) == 1, "what was done is not done again"
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    with monkeypatch.context() as patch:
        passes(patch, stop_after=2)
        assert profile(*flags) == 130
    with monkeypatch.context() as patch:
        done = passes(patch)
        save(tmp_path / "s.json", (1, 3))  # the same file name
        assert profile(*flags) == 0 and len(done) == 3
    assert "c.json.parts: holds parts of other work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--schedule="], "schedule='': no such file and no published name"),
        (["--schedule=no.json"], "schedule='no.json': no such file and no published name"),
        (["--schedule=k=x"], "schedule='k=x': expected k=<non-negative integer>"),
        (["--schedule=dense"], "--schedule=dense: is dense, alpha is 1; name a sparse schedule"),
        (["--schedule=all.json"], "--schedule=all.json: is dense, alpha is 1"),
        (["--schedule=ids.json"], "ids.json: expected a JSON object, got list"),
        (["--schedule=s.json", "--config.rollout.page_size=8"], "made for page_size=4, got"),
        (["--schedule=s.json", f"--bin_tokens={BIN}"], "--bin_tokens has no effect with --sched"),
        (["--schedule=k=3", "--topk=3"], "--topk has no effect with --schedule"),
        (["--schedule=k=3", "--policy=mean"], "--policy has no effect with --schedule; leave"),
        (["--schedule=k=3", "--estimate=20"], "--estimate has no effect with --schedule"),
        (["--schedule=k=3", "--replay="], "--max_tokens has no effect without --replay"),
        (["--schedule=k=3", "--replay=no.txt"], "--replay=no.txt: no such file"),
        (["--schedule=k=3", "--sequences=0"], "--sequences=0: expected at least 1"),
        (["--schedule=k=3", "--model="], "--replay needs --model=DIR"),
        (["--schedule=k=3", "--max_tokens=97"], "is 96 (max_position_embeddings"),
    ],
)
def test_what_does_not_fit_is_one_line(profile, tmp_path, capsys, flags, words):
    save(tmp_path / "s.json", GROWS)
    save(tmp_path / "all.json", (DENSE, DENSE))
    assert profile(*flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("sparrow: ") and err.count("\n") == 1 and words in err, err
    assert not (tmp_path / "c.json").exists() and not (tmp_path / "c.json.parts").exists()


def test_a_history_that_promises_nothing():
    """Another quantile, other bins, words for numbers, no list: nothing is said of such a bin."""
    good = {"start": 0, "end": BIN, "k": 4, "measured_k": 2, "p5": 0.9, "low": 0.8, "high": 1}
    for entry, kept in (
        (good, {0: {"k": 2, "p5": 0.9, "p5_low": 0.8, "p5_high": 1}}),
        ({**good, "p5": "0.9"}, {}),
        ({**good, "start": 64}, {}),
        ({"start": 0, "end": BIN, "k": 4}, {}),
        ("a word", {}),
    ):
        found = Schedule(page_size=4, bin_tokens=BIN, budgets=(4,), provenance={"bins": [entry]})
        assert schedule_check.promised(found, "p5") == kept
        assert schedule_check.promised(found, "p1") == {}
    for history in ({}, {"bins": 3}, {"bins": None}):
        found = Schedule(page_size=4, bin_tokens=BIN, budgets=(4,), provenance=history)
        assert schedule_check.promised(found, "p5") == {}
