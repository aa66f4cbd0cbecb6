"""Graders that hang, crash and lie, many at once: rewards, order and pool size stay right."""

import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.tasks import grading
from common.tasks.grading import GraderPool, Job, checked_score

HERE = "tests.common.bad_scorers"
DEADLINE = 0.5


def job(scorer, **answer):
    return Job(scorer=f"{HERE}:{scorer}", answer=answer, response="")


@pytest.fixture
def pool():
    with GraderPool(2, DEADLINE) as pool:
        yield pool


def test_hung_and_crashed_workers_cost_only_their_own_job(pool):
    """Two workers; 4 hangs, 2 crashes, 1 exit, 1 exception, 1 NaN, 1 score of 2, 10 good ones."""
    first = pool.pids
    good = [job("echo", score=i / 10) for i in range(1, 11)]
    bad = [job("hang"), job("spin"), job("hang"), job("hang"), job("crash"), job("crash")]
    bad += [job("leave"), job("fail"), job("echo", score=float("nan")), job("echo", score=2)]
    jobs = [j for pair in zip(bad, good, strict=True) for j in pair]
    start = time.monotonic()
    scores = pool.score(jobs)
    seconds = time.monotonic() - start
    assert scores[1::2] == [i / 10 for i in range(1, 11)]  # results stand in the order of the jobs
    assert scores[0::2] == [0.0] * 10
    assert pool.counts == {"graded": 20, "timeout": 4, "crash": 3, "error": 1, "invalid": 2}
    # 4 hangs of 0.5 s on 2 workers = 1 s, and 7 restarts; nothing waits for the 1000 s
    assert seconds < 60
    assert len(pool.pids) == 2 and not set(first) & set(pool.pids)
    for pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool.score([job("echo", score=1)] * 5) == [1.0] * 5


def test_the_clock_starts_with_the_job_not_in_the_queue(pool):
    """8 jobs of 0.2 s on 2 workers: the last one ends 0.8 s after the call, past 0.5 s."""
    jobs = [Job(scorer=f"{HERE}:slow", answer={}, response="")] * 8
    assert pool.score(jobs) == [1.0] * 8


def assert_ends(pid):
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("a child of a scorer is still running")


def test_children_of_a_hung_scorer_end_with_it(pool, tmp_path):
    assert pool.score([job("hang_with_child", file=str(tmp_path / "pid"))]) == [0.0]
    assert_ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("crash", [False, True])
def test_an_orphan_in_a_session_of_its_own_ends_too(tmp_path, crash):
    with GraderPool(1, 10.0) as pool:
        jobs = [job("leave_orphan", file=str(tmp_path / "pid"), crash=crash), job("root_of_4")]
        assert pool.score(jobs) == [float(not crash), 0.5]
        assert_ends(int((tmp_path / "pid").read_text()))


def test_a_large_response(pool):
    big = Job(scorer=f"{HERE}:num_bytes", answer={}, response="x" * 5_000_000)
    assert pool.score([big, big]) == [0.5, 0.5]  # 5e6 / 1e7


@pytest.mark.parametrize("scorer", ["no_such_module:f", f"{HERE}:no_such_function", "no_colon"])
def test_a_scorer_that_cannot_be_imported_is_an_error(pool, scorer):
    unknown = Job(scorer=scorer, answer={}, response="")
    with pytest.raises(UserError, match=f"scorer {scorer}: .*expected module:function"):
        pool.score([job("echo", score=1), unknown])
    assert pool.score([job("echo", score=1)] * 3) == [1.0] * 3


def test_a_fork_that_returns_does_not_score_the_next_job():
    with GraderPool(1, 10.0) as pool:
        assert pool.score([job("fork_returns")] + [job("slow")] * 3) == [0.5, 1.0, 1.0, 1.0]


class Mark:
    def __reduce__(self):
        return os.mkdir, ("ran-in-the-parent",)


# The pool numbers its jobs from 0; the one that writes is number 1, the next one 2.
GARBAGE = {
    "bytes": b"\x00\x00\x00\x05hello\n",
    "pickle": pickle.dumps(("done", Mark())) + b"\n",
    "deep": b"[" * 3000 + b"\n",
    "digits": b"1" * 4090 + b"\n",
    "endless": b"x" * 20_000,
    "not an object": b"[1]\n",
    "of the next job": b'{"kind": "done", "job": 2, "score": 1, "clean": true}\n',
    "no score": b'{"kind": "done", "job": 1}\n',
    "unknown": b'{"kind": "exec", "job": 1}\n',
}


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_what_a_scorer_writes_to_the_pool_is_its_own_failure(text, tmp_path, monkeypatch):
    """Also when it hangs after it; nothing of it is executed, and the next job does not wait."""
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with GraderPool(1, 10.0) as pool:
        bad = job("write_to_the_pool", hex=text.hex(), sleep=1000)
        jobs = [job("echo", score=0.25), bad, job("echo", score=0.75)]
        assert pool.score(jobs) == [0.25, 0.0, 0.75]
        assert pool.counts == {"graded": 3, "timeout": 0, "crash": 1, "error": 0, "invalid": 0}
    assert time.monotonic() - start < 8  # less than a deadline
    assert not os.listdir(tmp_path)


def test_a_forged_result_costs_the_next_job_nothing(monkeypatch):
    """It forges its own result and hangs: the next job is not taken, and given to a new worker."""
    monkeypatch.setattr(grading, "ANSWER_SECONDS", 1.0)
    text = b'{"kind": "done", "job": 0, "score": 1, "clean": true}\n'
    with GraderPool(1, 10.0) as pool:
        jobs = [job("write_to_the_pool", hex=text.hex(), sleep=1000)]
        large = Job(scorer=f"{HERE}:num_bytes", answer={}, response="x" * 5_000_000)
        assert pool.score(jobs + [large, job("slow")]) == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("left", ["alarm", "thread", "patch"])
def test_nothing_outlives_a_job(left):
    """The alarm and the thread would end the next job (0.2 s) after 0.1 s."""
    with GraderPool(1, 10.0) as pool:
        assert pool.score([job(f"leave_{left}"), job("root_of_4")]) == [1.0, 0.5]
        assert pool.counts["crash"] == 0
        worker = pool.pids
        assert pool.score([job("root_of_4")]) == [0.5] and pool.pids == worker  # it was clean


def test_memory_is_limited(pool):
    """64 GiB are refused, 64 MiB are not: sizes far from the limit of 4 GiB."""
    jobs = [job("take_memory", bytes=64 << 30), job("take_memory", bytes=64 << 20)]
    assert pool.score(jobs) == [0.0, 1.0]
    assert pool.counts["error"] == 1


def test_many_bad_and_quick_jobs_mixed():
    """Every 6th job hangs, leaves a patch, forks, crashes or writes garbage; order is kept."""
    bad = [job("hang"), job("leave_patch"), job("fork_returns"), job("crash")]
    bad.append(job("write_to_the_pool", hex="00", sleep=0))
    right = [0.0, 1.0, 0.5, 0.0, 0.0]
    jobs, scores = [], []
    for i in range(60):
        jobs.append(bad[i // 6 % 5] if i % 6 == 0 else job("echo", score=i / 60))
        scores.append(right[i // 6 % 5] if i % 6 == 0 else i / 60)
    with GraderPool(3, 1.0) as pool:
        assert pool.score(jobs) == scores
        assert len(pool.pids) == 3
        # of 60 jobs 10 are bad, 2 of each kind; garbage counts as a crash
        assert pool.counts == {"graded": 60, "timeout": 2, "crash": 4, "error": 0, "invalid": 0}


def test_close_ends_all_processes():
    pool = GraderPool(2, DEADLINE)
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([])


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0, 0.0),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (True, None),
        (np.True_, None),
        (0.25, 0.25),
        (-1e-9, None),
        (1.0001, None),
    ]
    + [(float("nan"), None), (float("inf"), None), (None, None), ("0.75", None), (10**400, None)],
)
def test_only_numbers_from_0_to_1_are_scores(value, score):
    assert checked_score(value) == score


@pytest.mark.parametrize(("workers", "seconds"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_bad_settings_are_refused(workers, seconds):
    with pytest.raises(ValueError, match="expected >= 1 and > 0"):
        GraderPool(workers, seconds)
