"""Scoring in worker processes, with a hard deadline for every job.

A scorer may hang, crash, or return nonsense, because it reads text that a policy made up. Each job
runs alone in a worker; a worker past the deadline, or dead, is killed and replaced, its job scores
0, and no other job notices. The clock of a job starts when a worker starts it, not in the queue.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common import stopping

_log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""A worker that is not ready by then (imports included) counts as dead."""
POLL_SECONDS = 0.5
"""So often the wait for a worker looks whether the run was told to stop."""
MAX_FAILED_STARTS = 3
"""So many workers in a row that die before they are ready end the run with an error."""
_SCORER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """scorer: "module:function"; function(answer, response) returns a score in [0, 1]."""

    scorer: str
    answer: Mapping[str, Any]
    response: Any


def checked_score(value: Any) -> float | None:
    """`value` as float if it is a number in [0, 1], else None."""
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if math.isfinite(score) and 0 <= score <= 1 else None


@dataclasses.dataclass(eq=False)
class _Worker:
    """job: number of the job it runs, None = idle; limit: monotonic time at which it is killed."""

    process: Any
    connection: Any
    limit: float
    ready: bool = False
    job: int | None = None


class GraderPool:
    """`num_workers` processes that score jobs; always that many, whatever the scorers do.

    deadline_seconds: wall time of one job, from its start on a worker. counts: jobs so far that
    were `graded`, and of these scored 0 because of a `timeout`, a `crash` of the worker, an `error`
    raised by the scorer, or an `invalid` score (no number in [0, 1]). Close it, or use `with`.
    """

    def __init__(self, num_workers: int, deadline_seconds: float) -> None:
        if num_workers < 1 or not deadline_seconds > 0:
            raise ValueError(f"{num_workers=}, {deadline_seconds=}: expected >= 1 and > 0")
        self.deadline_seconds = deadline_seconds
        self.counts = dict.fromkeys(("graded", "timeout", "crash", "error", "invalid"), 0)
        self._context = multiprocessing.get_context("spawn")
        self._failed_starts = 0
        self._closed = False
        self._workers = [self._start() for _ in range(num_workers)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def score(self, jobs: Sequence[Job]) -> list[float]:
        """Scores in the order of `jobs`, each in [0, 1].

        Raises RuntimeError if workers cannot be started at all.
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
                num_open -= self._collect(scores)
        finally:
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._replace(worker)  # interrupted: what still runs is of no use to anyone
        self.counts["graded"] += len(jobs)
        failed = {
            k: n - before[k] for k, n in self.counts.items() if k != "graded" and n > before[k]
        }
        if failed:
            _log.warning("of %d responses, scored 0 for failed grading: %s", len(jobs), failed)
        return scores

    def close(self) -> None:
        """End all workers, hung ones too."""
        self._closed = True
        for worker in self._workers:
            self._kill(worker)
        self._workers = []

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assign(self, jobs: Sequence[Job], queue: collections.deque[int]) -> None:
        for worker in list(self._workers):
            if not queue:
                return
            if worker.ready and worker.job is None:
                try:
                    worker.connection.send(jobs[queue[0]])
                except OSError:  # died while idle: the job goes to another worker
                    self._replace(worker)
                else:
                    worker.job = queue.popleft()
                    worker.limit = time.monotonic() + START_SECONDS

    def _collect(self, scores: list[float]) -> int:
        """Wait for messages or the next deadline; returns how many jobs came to an end."""
        watched = [w for w in self._workers if w.job is not None or not w.ready]
        timeout = min(min(w.limit for w in watched) - time.monotonic(), POLL_SECONDS)
        handles = {worker.connection: worker for worker in watched}
        num_ended = 0
        for handle in multiprocessing.connection.wait(list(handles), max(0.0, timeout)):
            num_ended += self._receive(handles[handle], scores)
        now = time.monotonic()
        for worker in watched:
            late = now >= worker.limit and (worker.job is not None or not worker.ready)
            if late and worker in self._workers and not worker.connection.poll():
                num_ended += self._lose(worker, "timeout")
        return num_ended

    def _receive(self, worker: _Worker, scores: list[float]) -> int:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            return self._lose(worker, "crash")
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "started":
            worker.limit = time.monotonic() + self.deadline_seconds
        else:
            score = checked_score(value) if kind == "done" else None
            if kind == "error":
                self.counts["error"] += 1
                _log.debug("scorer failed: %s", value)
            elif score is None:
                self.counts["invalid"] += 1
            scores[worker.job] = score or 0.0
            worker.job = None
            return 1
        return 0

    def _lose(self, worker: _Worker, reason: str) -> int:
        """Replace a hung or dead worker; returns 1 if it had a job (which keeps its score of 0)."""
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RuntimeError(
                    f"{self._failed_starts} grader processes in a row were never ready; "
                    "their errors are above (a script needs `if __name__ == '__main__':`)"
                )
        had_job = worker.job is not None
        if had_job:
            self.counts[reason] += 1
        self._replace(worker)
        return int(had_job)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        args = (theirs, self.deadline_seconds, os.getpid())
        process = self._context.Process(target=_work, args=args, daemon=True, name="grader")
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic() + START_SECONDS)

    def _replace(self, worker: _Worker) -> None:
        self._kill(worker)
        self._workers[self._workers.index(worker)] = self._start()

    def _kill(self, worker: _Worker) -> None:
        worker.connection.close()
        if worker.ready:  # leads a process group of its own: children of the scorer go with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()
        worker.process.close()


def _work(connection: Any, deadline_seconds: float, parent: int) -> None:
    """Main function of a worker: one job after the other until the pool closes the pipe."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection.send(("ready", None))
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            module, _, function = job.scorer.partition(":")
            scorer = getattr(importlib.import_module(module), function)
            _limit_cpu(deadline_seconds)
            connection.send(("started", None))
            outcome = ("done", checked_score(scorer(job.answer, job.response)))
        except _SCORER_ERRORS as error:
            outcome = ("error", f"{job.scorer}: {type(error).__name__}: {error}"[:500])
        connection.send(outcome)


def _end_with(parent: int) -> None:
    """End a worker whose parent is gone, even in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _limit_cpu(deadline_seconds: float) -> None:
    """Let the system end this process if it computes far past the deadline and nobody kills it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + deadline_seconds) + 30
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
