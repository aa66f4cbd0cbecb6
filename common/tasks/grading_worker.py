"""The program of a grader process; it imports the standard library only, to start quickly.

    python grading_worker.py FD DEADLINE_SECONDS PARENT_PID

    trainer (GraderPool) -- pipe --> supervisor --fork--> grader --runs--> scorer -> its children

The supervisor never runs a scorer. Every process that a scorer leaves behind, in whatever session,
becomes a child of the grader or the supervisor (PR_SET_CHILD_SUBREAPER), so the supervisor can end
it: when the pool says so (SIGTERM), when the grader ends, or when the trainer is gone.

The grader reads pickles from the trainer. It answers with lines of JSON of at most MAX_LINE bytes,
never with pickles, because a scorer can write into this pipe too:

    {"kind": "ready"}                               at the start
    {"kind": "importing" | "started", "job": 7}     its import begins, its deadline begins
    {"kind": "done", "job": 7, "score": 0.5, "clean": true}
    {"kind": "error" | "missing", "job": 7, "why": "...", "clean": true}

clean = false: the job left something behind, so the pool replaces this worker.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import json
import math
import numbers
import operator
import os
import pickle
import resource
import signal
import sys
import time
from typing import Any

MAX_LINE = 4096
MEMORY_BYTES = 4 << 30
"""Address space that a job may use beyond that of the worker after its imports."""
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_SHARED = ("builtins", "json", "math", "random", "re", "time")
"""Modules that scorers share; a worker is replaced if a job changes a function in them."""
_dumps, _write, _getpid = json.dumps, os.write, os.getpid  # bound before any scorer runs


def checked_score(value: Any) -> float | None:
    """`value` as a float if it is a number in [0, 1], else None; True and "0.75" are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if math.isfinite(score) and 0 <= score <= 1 else None


def supervise(connection: int, deadline_seconds: float, parent: int) -> None:
    """Fork the grader; end with it, with the parent, or at SIGTERM, and leave no process behind."""
    os.set_inheritable(connection, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to handle
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    _prctl(_SUBREAPER, 1)
    supervisor = os.getpid()
    grader = os.fork()
    if grader == 0:
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        _prctl(_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
        try:
            if os.getppid() == supervisor:
                _Grader(connection, deadline_seconds).run()
        finally:
            os._exit(1)
    os.close(connection)
    while os.getppid() == parent and _lives(grader):
        told = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, 1.0)
        if told and told.si_signo == signal.SIGTERM:
            break
    kill_descendants()


def _lives(grader: int) -> bool:
    """False once the grader has ended; reaps every other child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) not in (0, grader):
            pass
        return ended == 0
    return False


def kill_descendants() -> None:
    """Kill all descendants, until none is left: orphans become our children."""
    while True:
        for process in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, queue = [], [os.getpid()]
    while queue:
        queue += (mine := children.get(queue.pop(), []))
        found += mine
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")


class _Grader:
    """Runs one job after the other until the pool closes the pipe."""

    def __init__(self, connection: int, deadline_seconds: float) -> None:
        self._connection, self._deadline_seconds = connection, deadline_seconds
        self._pid = os.getpid()
        self._scorers: dict[str, Any] = {}
        self._functions: list[tuple[dict[str, Any], operator.itemgetter]] = []
        self._before: tuple = ()

    def run(self) -> None:
        with open(self._connection, "rb", closefd=False) as pipe:
            sys.path[:] = pickle.load(pipe)
            self._say(kind="ready")
            while True:
                try:
                    job = pickle.load(pipe)
                except EOFError:
                    return
                self._say(**self._run(*job))

    def _run(self, number: int, name: str, answer: Any, response: Any) -> dict[str, Any]:
        try:
            scorer = self._scorers.get(name) or self._import(number, name)
        except Exception as error:
            return {"kind": "missing", "job": number, "why": _words(name, error), "clean": False}
        result: dict[str, Any] = {"job": number}
        _limit_cpu(self._deadline_seconds)
        self._say(kind="started", job=number)
        clean = True
        try:
            result |= {"kind": "done", "score": checked_score(scorer(answer, response))}
        except Exception as error:
            result |= {"kind": "error", "why": _words(name, error)}
            clean = not isinstance(error, MemoryError)
        if _getpid() != self._pid:
            os._exit(0)  # a fork that the scorer made; only the first process may answer
        return {**result, "clean": clean and not _has_children() and self._state() == self._before}

    def _import(self, number: int, name: str) -> Any:
        self._say(kind="importing", job=number)
        module, _, function = name.partition(":")
        scorer = getattr(importlib.import_module(module), function)
        self._scorers[name] = scorer
        self._functions = []
        watched = {*_SHARED, *(scorer.partition(":")[0] for scorer in self._scorers)}
        for space in [vars(sys.modules[name]) for name in watched if name in sys.modules]:
            names = [name for name, value in space.items() if callable(value)]
            self._functions.append((space, operator.itemgetter(*names)))
        self._before = self._state()
        _limit_memory()
        return scorer

    def _state(self) -> tuple:
        """State that a job must not change: functions, timers, threads, folder, output."""
        try:
            functions = [get(names) for names, get in self._functions]
            folder = os.getcwd()
        except (KeyError, OSError):
            return ()
        timers = [signal.getitimer(timer) for timer in _TIMERS]
        return functions, timers, _thread._count(), folder, sys.stdout, sys.stderr

    def _say(self, **message: Any) -> None:
        _write(self._connection, _dumps(message).encode() + b"\n")


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _words(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {error}"[:300]  # far below MAX_LINE, escapes included


def _limit_memory() -> None:
    """Limit the address space: MEMORY_BYTES more than is in use now; a job gets MemoryError."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or used + MEMORY_BYTES < hard:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))


def _limit_cpu(deadline_seconds: float) -> None:
    """Let the system end this process if it computes long after the deadline and is not killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + deadline_seconds) + 30
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    supervise(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
