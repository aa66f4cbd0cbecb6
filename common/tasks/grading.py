"""Scoring in worker processes, with a hard deadline for every job.

A scorer reads text that a policy made up, so it may hang, crash or return nonsense. Each job runs
alone in a worker. A worker that dies or exceeds the deadline is replaced; its job scores 0 and no
other job is affected. The time of a job counts from its start in a worker, not in the queue. A
worker is used again only after a job that left nothing behind (common/tasks/grading_worker.py).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.records import stopping
from common.tasks import grading_worker
from common.tasks.grading_worker import checked_score

__all__ = ["GraderPool", "Job", "checked_score"]

_log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""A worker that is not ready after this time, imports included, counts as dead."""
POLL_SECONDS = 0.5
"""While it waits for workers, the pool checks this often whether the run has to stop."""
MAX_FAILED_STARTS = 3
"""The run ends with an error when this many workers in a row die before they are ready."""
ANSWER_SECONDS = 10.0
"""A worker that does not confirm a job in this time is replaced; the job goes to another."""
_PROGRAM = Path(grading_worker.__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One response to score. scorer: "module:function", called as function(answer, response)."""

    scorer: str
    answer: Mapping[str, Any]
    response: Any


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker process.

    limit: monotonic time at which it is killed. ready: it has started. job: number of its job, None
    if it is idle. index: place of that job among the jobs of a call. taken: it has confirmed this
    job. proven: it has confirmed some job. text: beginning of a line that is not complete yet.
    """

    process: subprocess.Popen
    connection: Any
    limit: float
    ready: bool = False
    taken: bool = False
    proven: bool = False
    job: int | None = None
    index: int = 0
    text: bytes = b""

    @property
    def waited_for(self) -> bool:
        return self.job is not None or not self.ready


class GraderPool:
    """`num_workers` processes that score jobs; those that end are replaced.

    deadline_seconds: wall time of one job, from its start in a worker. counts: jobs so far
    (`graded`), and how many of them scored 0 because of a `timeout`, a `crash` of the worker, an
    `error` that the scorer raised, or an `invalid` score (not a number in [0, 1]). Close the pool,
    or use it in a `with` statement.
    """

    def __init__(self, num_workers: int, deadline_seconds: float) -> None:
        if num_workers < 1 or not deadline_seconds > 0:
            raise ValueError(f"{num_workers=}, {deadline_seconds=}: expected >= 1 and > 0")
        self.deadline_seconds = deadline_seconds
        self.counts = dict.fromkeys(("graded", "timeout", "crash", "error", "invalid"), 0)
        self._numbers = itertools.count()
        self._failed_starts = 0
        self._closed = False
        self._workers = [self._start() for _ in range(num_workers)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def score(self, jobs: Sequence[Job]) -> list[float]:
        """Scores in the order of `jobs`, each in [0, 1].

        Raises UserError for a scorer that cannot be imported, RuntimeError if workers cannot be
        started at all.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        before = dict(self.counts)
        scores, queue = [0.0] * len(jobs), collections.deque(range(len(jobs)))
        num_open = len(jobs)
        try:
            while num_open:
                stopping.check()
                self._assign(jobs, queue)
                num_open -= self._collect(scores, queue)
        finally:
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._replace(worker)  # after an interruption: nobody waits for these jobs
        self.counts["graded"] += len(jobs)
        failed = {
            k: n - before[k] for k, n in self.counts.items() if k != "graded" and n > before[k]
        }
        if failed:
            _log.warning("of %d responses, scored 0 for failed grading: %s", len(jobs), failed)
        return scores

    def close(self) -> None:
        """End all workers, also those that hang."""
        self._closed = True
        _end_processes(self._workers)
        self._workers = []

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assign(self, jobs: Sequence[Job], queue: collections.deque[int]) -> None:
        for worker in list(self._workers):
            if not queue:
                return
            if worker.waited_for:
                continue
            job, number = jobs[queue[0]], next(self._numbers)
            message = pickle.dumps((number, job.scorer, job.answer, job.response))
            # An idle worker sends nothing: what it sends now was forged by the last scorer.
            if not _is_silent(worker) or not _send(worker, message):
                self._replace(worker)
                continue
            worker.job, worker.index, worker.taken = number, queue.popleft(), False
            worker.limit = time.monotonic() + ANSWER_SECONDS

    def _collect(self, scores: list[float], queue: collections.deque[int]) -> int:
        """Wait for messages or the next deadline; returns the number of jobs that ended."""
        watched = [worker for worker in self._workers if worker.waited_for]
        timeout = min(min(w.limit for w in watched) - time.monotonic(), POLL_SECONDS)
        handles = {worker.connection: worker for worker in watched}
        num_ended = 0
        for handle in multiprocessing.connection.wait(list(handles), max(0.0, timeout)):
            num_ended += self._receive(handles[handle], scores, queue)
        now = time.monotonic()
        for worker in watched:
            late = now >= worker.limit and worker.waited_for
            if late and worker in self._workers and not worker.connection.poll():
                num_ended += self._lose(worker, "timeout", queue)
        return num_ended

    def _receive(self, worker: _Worker, scores: list[float], queue: collections.deque[int]) -> int:
        """Act on the lines that a worker sent; returns 1 if its job ended, else 0."""
        try:
            text = os.read(worker.connection.fileno(), grading_worker.MAX_LINE)
        except OSError:
            text = b""
        *lines, worker.text = (worker.text + text).split(b"\n")
        if not text or len(worker.text) > grading_worker.MAX_LINE:
            return self._lose(worker, "crash", queue)
        for line in lines:
            message = _parsed(line, worker)
            if message is None:
                _log.debug("not a message of a grader: %.100r", line)
                return self._lose(worker, "crash", queue)
            if message["kind"] in ("done", "error", "missing"):
                self._end(worker, message, scores)
                if not message["clean"] or worker.text or line is not lines[-1]:
                    self._replace(worker)
                return 1
            self._note(worker, message["kind"])
        return 0

    def _note(self, worker: _Worker, kind: str) -> None:
        now = time.monotonic()
        if kind == "ready":
            worker.ready = True
        elif kind == "importing":
            worker.limit = now + START_SECONDS
        else:
            worker.taken = worker.proven = True
            self._failed_starts = 0
            worker.limit = now + self.deadline_seconds

    def _end(self, worker: _Worker, message: Mapping[str, Any], scores: list[float]) -> None:
        """Record the result of a job."""
        worker.job = None
        if message["kind"] == "missing":
            self._replace(worker)
            raise UserError(
                f"scorer {message['why']}; expected module:function that can be imported here"
            )
        if message["kind"] == "error":
            self.counts["error"] += 1
            _log.debug("scorer failed: %s", message["why"])
            return
        score = checked_score(message["score"])
        self.counts["invalid"] += score is None
        scores[worker.index] = score or 0.0

    def _lose(self, worker: _Worker, reason: str, queue: collections.deque[int]) -> int:
        """Replace a hung or dead worker; returns 1 if its job ended with it, with a score of 0.

        A worker that is lost before it confirms its job was damaged by an earlier one, or died
        while it started or imported; then the job goes to another worker.
        """
        num_ended = int(worker.job is not None and worker.taken)
        if not worker.taken:
            self._failed_starts += not worker.proven
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RuntimeError(
                    f"{self._failed_starts} grader processes in a row ended before they could "
                    "score; read above what they, or the imports of the scorer, printed"
                )
            if worker.job is not None:
                queue.appendleft(worker.index)
        self.counts[reason] += num_ended
        self._replace(worker)
        return num_ended

    def _start(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        # -P: the folder of the program (common/) must not hide modules such as types.
        command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())]
        command += [str(self.deadline_seconds), str(os.getpid())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        os.set_blocking(ours.fileno(), False)
        worker = _Worker(process, ours, time.monotonic() + START_SECONDS)
        _send(worker, pickle.dumps(sys.path))
        return worker

    def _replace(self, worker: _Worker) -> None:
        _end_processes([worker])
        self._workers[self._workers.index(worker)] = self._start()


def _is_silent(worker: _Worker) -> bool:
    """True if the worker lives and has sent nothing since its last message."""
    try:
        os.read(worker.connection.fileno(), 1)
    except BlockingIOError:
        return not worker.text
    except OSError:
        pass
    return False


def _send(worker: _Worker, message: bytes) -> bool:
    """Write a message, for ANSWER_SECONDS at most; False if the worker is dead or reads nothing."""
    rest, limit = memoryview(message), time.monotonic() + ANSWER_SECONDS
    while rest:
        try:
            rest = rest[os.write(worker.connection.fileno(), rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(worker.connection.fileno(), select.POLLOUT)
            if not poll.poll(1000 * max(0.0, limit - time.monotonic())):
                return False
        except OSError:
            return False
    return True


def _parsed(line: bytes, worker: _Worker) -> dict[str, Any] | None:
    """The message in a line; None if the worker may not send it now (a scorer can forge lines)."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    kind = message.get("kind")
    if not worker.ready or worker.job is None:
        return message if kind == "ready" and not worker.ready else None
    expected = ("done", "error") if worker.taken else ("importing", "started", "missing")
    if kind not in expected or message.get("job") != worker.job:
        return None
    needs: dict[Any, set[str]] = {
        "done": {"score", "clean"},
        "error": {"why", "clean"},
        "missing": {"why", "clean"},
    }
    return message if needs.get(kind, set()) <= set(message) else None


def _end_processes(workers: Sequence[_Worker]) -> None:
    """End workers; their supervisors end all processes that the scorers started."""
    for worker in workers:
        worker.connection.close()
        worker.process.terminate()
    for worker in workers:
        try:
            worker.process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
