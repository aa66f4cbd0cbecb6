"""Limits of time and memory for code that comes from a file: a chat template is a program."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_AGAIN_SECONDS = 0.2
"""The timer fires again after this time, as Python ignores an exception in a weakref callback."""


class TimeLimit:
    """`with TimeLimit(10):` raises TimeoutError in its block after 10 seconds of computing.

    It counts the processor time of all threads in user mode, since a busy machine is not the fault
    of the code. It needs signals, so in other threads than the main one there is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._on = threading.current_thread() is threading.main_thread()
        if self._on:
            self._before = signal.signal(signal.SIGVTALRM, self._late)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, _AGAIN_SECONDS)

    def __exit__(self, *_: object) -> None:
        if self._on:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def _late(self, number: int, frame: FrameType | None) -> None:
        own = (TimeLimit.__enter__.__code__, TimeLimit.__exit__.__code__)
        if frame is None or frame.f_code not in own:  # never interrupt the limit itself
            raise TimeoutError(f"not done after {self._seconds:g} seconds of computing")


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Raises MemoryError in its block when the process takes `more_bytes` more than it has now.

    The limit holds for the whole process, so no other thread may compute meanwhile. On other
    systems than Linux there is no limit.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more_bytes
    given = [x for x in (soft, hard) if x != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *given]), hard))
    try:
        yield
    except MemoryError:
        raise MemoryError(f"needs over {more_bytes >> 20} MiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
