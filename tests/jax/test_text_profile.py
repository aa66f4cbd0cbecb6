"""`sparrow profile --replay` from the command line: files, resumption, policies, mistakes."""

import json
import signal

import numpy as np
import pytest

from common.cli import command_line
from common.mismatch import acceptance
from common.schedule.profile_file import load_profile
from common.schedule.schedule_search import search
from sparrow_jax.backend import build_scorer
from sparrow_jax.scorer import Scorer
from tests.jax import tiny_model
from tests.jax.tiny_model import CONTEXT, PAGE, G

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, BIN = 40, 20
HOW = (
    f"--config.rollout.page_size={PAGE}", "--config.rollout.num_dense_layers=1",
    "--config.mismatch.min_tokens=15", f"--bin_tokens={BIN}", f"--max_tokens={T}",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels_pallas.reference.SEGMENTS", 1)  # less to compile
        yield tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def profile(model, tmp_path, monkeypatch):
    """profile("--flag", ...) in tmp_path on ids.json, 130 tokens; the exit status."""
    monkeypatch.chdir(tmp_path)
    tiny_model.write_ids(tmp_path / "ids.json", 130)

    def run(*flags, out="p.json", replay="ids.json", topk="1,3,100", how=HOW):
        given = f"--model={model}", f"--replay={replay}", f"--topk={topk}", f"--out={out}"
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return command_line.main(["profile", *given, *how, *flags])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return run


def test_a_profile_from_ids(profile, model, tmp_path, capsys):
    assert profile("--sequences=9", "--estimate=20") == 0
    found = load_profile(tmp_path / "p.json")
    said = capsys.readouterr().out
    assert "ids.json, 3 sequences of 40 tokens" in found["source"] and found["source"] in said
    assert found["policy"] == "mean" and "blocks of 64 tokens" in found["interval"]
    rows = [(k, b) for k in (1, 3, 100) for b in (0, 1)]
    assert [(r["k"], r["bin"]) for r in found["rows"]] == rows
    assert [r["count"] for r in found["rows"][:2]] == [3 * BIN, 3 * (BIN - 1)]  # token 0 is given
    for row in found["rows"]:
        one = row["k"] == 100 or (row["bin"] == 0 and row["k"] == 3)  # 20 tokens are 5 pages
        assert (row["p1"] > 1 - 1e-6) == one and row["enough"]
    assert [len(half["rows"]) for half in found["halves"]] == [6, 6]
    assert [half["rows"][1]["count"] for half in found["halves"]] == [2 * (BIN - 1), BIN - 1]
    for row in found["topk"]:
        assert row["p5_topk"] <= row["p5"] + 1e-6 and -1 < row["mean_bias"] < 0
    assert [s["k"] for s in found["shape"]] == [1, 3, 100]
    assert "<svg" in (tmp_path / "p.html").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "p.html", "p.json"]

    scorer, _, _ = build_scorer(tiny_model.config(model))
    rows = tiny_model.tokens(1, 130)[0, : 3 * T].reshape(3, T)
    (out,) = scorer.overlaps(
        rows, np.ones(rows.shape, bool), [np.full(T, 1, np.int32)], np.float32(1)
    )
    mask = np.ones((3, T), bool)
    mask[:, 0] = False
    want = acceptance.statistics(
        np.clip(out.alpha_BT, 0, 1), mask, np.arange(len(mask)),
        bin_tokens=BIN, min_tokens=15, block_tokens=64,
    )  # fmt: skip
    for row, stats in zip(found["rows"][:2], want, strict=True):
        for name in ("p1", "p5", "p50", "mean", "share_above_0_999", "p5_low", "p5_high"):
            assert row[name] == pytest.approx(getattr(stats, name), abs=1e-5), name


def test_a_schedule_is_found_in_it(profile, tmp_path):
    assert profile("--sequences=3", topk="0,5,100") == 0
    found = load_profile(tmp_path / "p.json")
    p5 = {(r["k"], r["bin"]): r["p5"] for r in found["rows"]}
    assert p5[0, 1] < p5[5, 1] < 1 - 1e-4
    tau = (p5[0, 1] + p5[5, 1]) / 2
    schedule = search(found, tau=tau, quantile=0.05)
    assert schedule.budgets[1] == 5 and schedule.page_size == PAGE
    assert schedule.provenance["source"] == found["source"]
    assert search(found, tau=1 - 1e-6, quantile=0.05).budgets[1] == 100


def passes(monkeypatch, stop_after=None):
    """Count the sparse passes of the scorer; Ctrl-C in the one after `stop_after`."""
    done, overlaps = [], Scorer.overlaps

    def counted(self, *args, **kwargs):
        for out in overlaps(self, *args, **kwargs):
            if len(done) == stop_after:
                raise KeyboardInterrupt
            done.append(kwargs["policy"])
            yield out

    monkeypatch.setattr(Scorer, "overlaps", counted)
    return done


def test_a_stopped_profile_goes_on_and_is_the_same(profile, tmp_path, monkeypatch, capsys):
    flags = "--sequences=3", "--estimate=20"
    assert profile(*flags, out="whole.json") == 0
    with monkeypatch.context() as patch:
        first = passes(patch, stop_after=4)
        assert profile(*flags) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert len(first) == 4 and not (tmp_path / "p.json").exists()
    with monkeypatch.context() as patch:
        second = passes(patch)
        assert profile(*flags) == 0
    assert len(second) == 9 - 4, "what was done is not done again"
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not (tmp_path / "p.json.parts").exists()


def test_other_settings_do_not_take_up_what_was_done(profile, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        passes(patch, stop_after=2)
        assert profile() == 130
    with monkeypatch.context() as patch:
        done = passes(patch)
        assert profile("--config.rollout.temperature=0.7") == 0
    assert len(done) == 3 and "p.json.parts: holds parts of other work" in capsys.readouterr().out


def test_policies_get_files_of_their_own(profile, tmp_path, capsys):
    assert profile("--policy=mean,window", topk="2") == 0
    said = capsys.readouterr().out
    for name in ("mean", "window"):
        assert load_profile(tmp_path / f"p-{name}.json")["policy"] == name
        assert f"policy {name}" in (tmp_path / f"p-{name}.html").read_text()
        assert f"\n{name:>8} " in said.split("at the bytes that `mean` reads")[1]
    assert not (tmp_path / "p.json").exists()
    rows = [load_profile(tmp_path / f"p-{name}.json")["rows"] for name in ("mean", "window")]
    assert rows[0][1]["p5"] != rows[1][1]["p5"]
    assert profile(topk="2") == 0
    alone = load_profile(tmp_path / "p.json")
    assert alone["rows"] == rows[0], "alone or in company"
    assert "halves" not in alone, "one sequence has no halves"


def test_other_policies_read_the_same_bytes_not_the_same_pages(profile, model, tmp_path):
    """window keeps no vector to choose by: from 8 pages on that is one more page of 8 vectors."""
    assert profile("--policy=window", topk="2") == 0
    found = [row["mean"] for row in load_profile(tmp_path / "p.json")["rows"]]
    scorer, _, _ = build_scorer(tiny_model.config(model))
    ids = tiny_model.tokens(1, 130)[:, :T]
    budgets = [np.where(np.arange(T) >= 28, 3, 2), np.full(T, 2)]
    equal, plain = scorer.overlaps(
        ids, np.ones(ids.shape, bool), map(np.int32, budgets), np.float32(1), policy="window"
    )
    assert found[1] == pytest.approx(equal.alpha_BT[0, BIN + 1 :].mean(), abs=1e-5)
    assert abs(found[1] - plain.alpha_BT[0, BIN + 1 :].mean()) > 1e-3


def test_text_goes_through_the_tokenizer(profile, model, tmp_path):
    """The rows are those of its ids."""
    from tokenizers import Tokenizer

    text = "Sparrows, hedges - and \u00fcn\u00efcode. " * 4
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ids = Tokenizer.from_file(f"{model}/tokenizer.json").encode(text).ids
    assert len(ids) == len(text.encode())  # a token per byte
    (tmp_path / "a.json").write_text(json.dumps(ids))
    for name in ("a.txt", "a.json"):
        assert profile(replay=name, topk="2", out=f"{name}.p") == 0
    rows = [load_profile(tmp_path / f"{name}.p")["rows"] for name in ("a.txt", "a.json")]
    assert rows[0] == rows[1] and rows[0][1]["p5"] < 1


def write(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "expected one JSON list of token ids"),
        ('"abc"', "expected one JSON list of token ids"),
        ("[]", "0 tokens; expected 16, four pages, or more"),
        (json.dumps([1] * 15), "15 tokens; expected 16, four pages, or more"),
        (json.dumps([1] * 50 + [-1]), "expected one JSON list of token ids"),
        (json.dumps([1] * 50 + [1.0]), "expected one JSON list of token ids"),
        (json.dumps([1] * 50 + [True]), "expected one JSON list of token ids"),
        (json.dumps([[1] * 50]), "expected one JSON list of token ids"),
        (json.dumps([1] * 50 + [2**31]), "expected one JSON list of token ids"),
        (json.dumps([1] * 20 + [G.vocab_size] + [1] * 20), "has token 260, the model has 260"),
        (b"[1, \xff]", "is no UTF-8 text"),
    ],
)
def test_ids_that_cannot_be_replayed(profile, tmp_path, capsys, content, words):
    name = write(tmp_path, "bad.json", content)
    refuses(capsys, profile(replay=name), f"--replay={name}: ", words)
    assert not (tmp_path / "p.json").exists() and not (tmp_path / "p.json.parts").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "0 tokens; expected 16"), ("too short", "9 tokens"), (b"caf\xe9" * 30, "is no UTF-8")],
)
def test_text_that_cannot_be_replayed(profile, tmp_path, capsys, content, words):
    name = write(tmp_path, "bad.txt", content)
    refuses(capsys, profile(replay=name), f"--replay={name}: ", words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replay=nowhere.txt"], "--replay=nowhere.txt: no such file"),
        (["--model=nowhere"], "--model=nowhere: no config.json there"),
        (["--model="], "--replay needs --model=DIR"),
        (["--model=", "--config.model.path=nowhere"], "nowhere/config.json: no such file"),
        ([f"--max_tokens={CONTEXT + 1}"], f"is {CONTEXT} (max_position_embeddings"),
        (["--max_tokens=0"], "--max_tokens=0: expected at least 1"),
        (["--max_tokens=15"], "15 tokens; expected 16, four pages, or more"),
        (["--max_tokens=a"], "flag --max_tokens=a"),
        (["--sequences=0"], "--sequences=0: expected at least 1"),
        (["--estimate=-1"], "--estimate=-1: expected at least 0"),
        (["--estimate=261"], "--estimate=261: the model has 260 tokens"),
        (["--policy=best"], "--policy=best: 'best'; expected each once, of mean, quest"),
        (["--policy=mean,mean"], "--policy=mean,mean: 'mean'; expected each once"),
        (["--policy="], "--policy=: ''; expected each once"),
        (["--topk="], "budgets=: expected whole numbers"),
        (["--topk=4,a"], "budgets=4,a: expected whole numbers"),
        (["--topk=1.5"], "budgets=1.5: expected a whole number"),
        (["--topk=4,2"], "budgets=(4, 2): expected rising numbers of pages"),
        (["--topk=2,2"], "budgets=(2, 2): expected rising numbers of pages"),
        (["--topk=-1,2"], "budgets=(-1, 2): expected at least 0"),
        (["--bin_tokens=0"], "bin_tokens=0"),
        (["--out=p.html"], "--out=p.html: name the .json"),
        (["--replay=", "--policy=mean"], "--policy has no effect without --replay"),
        (["--replay=", "--max_tokens=9"], "--max_tokens has no effect without --replay"),
        (["--config.learner.mesh=99,1,1"], "needs 99 devices"),
        (["--config.attention=kernel"], "config.attention='kernel' with platform='cpu'"),
    ],
)
def test_flags_that_do_not_fit(profile, tmp_path, capsys, flags, words):
    how = HOW[:3] if flags[0].startswith("--replay=") and len(flags) > 1 else HOW
    refuses(capsys, profile(*flags, how=how), words)
    assert not (tmp_path / "p.json").exists()


def refuses(capsys, status, *words):
    err = capsys.readouterr().err
    assert status == 2 and err.startswith("sparrow: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_broken_model_directory_is_named(profile, model, tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{")
    refuses(capsys, profile("--model=m"), "config.json", "JSON")
