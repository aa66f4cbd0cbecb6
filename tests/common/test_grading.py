"""Graders that hang, crash and lie, many at once: rewards, order and pool size stay right."""

import os
import time
from pathlib import Path

import pytest

from common.grading import GraderPool, Job, checked_score

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


def test_children_of_a_hung_scorer_end_with_it(pool, tmp_path):
    assert pool.score([job("hang_with_child", file=str(tmp_path / "pid"))]) == [0.0]
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the child of a killed scorer is still running")


def test_unknown_scorer_and_large_responses(pool):
    big = Job(scorer=f"{HERE}:num_bytes", answer={}, response="x" * 5_000_000)
    unknown = Job(scorer="no_such_module:f", answer={}, response="")
    assert pool.score([big, unknown, big]) == [0.5, 0.0, 0.5]  # 5e6 / 1e7
    assert pool.counts["error"] == 1


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
    [(0, 0.0), (1, 1.0), (True, 1.0), (0.25, 0.25), (-1e-9, None), (1.0001, None)]
    + [(float("nan"), None), (float("inf"), None), (None, None), ("text", None), (10**400, None)],
)
def test_only_numbers_from_0_to_1_are_scores(value, score):
    assert checked_score(value) == score


@pytest.mark.parametrize(("workers", "seconds"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_bad_settings_are_refused(workers, seconds):
    with pytest.raises(ValueError, match="expected >= 1 and > 0"):
        GraderPool(workers, seconds)
