"""Ctrl-C and SIGTERM: long work stops at a safe point, anything else at once.

A handler that raises does so in whatever frame runs, and Python swallows what is raised inside a
garbage-collection or weakref callback: the signal would be lost. So, inside `safe_points()`, the
first signal only sets a flag, and `check()`, called between chunks, batches and steps, raises
KeyboardInterrupt. A second signal ends the process at once; so does the first one outside.

Python's own handlers wait while native code runs (a compilation, minutes). Python's C handler does
not: it writes each signal to a pipe, and a thread counts them there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STATUS = 130
"""Exit status of a command that a signal stopped."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_requested = threading.Event()
_inside = 0
_pipe: int | None = None


def install() -> None:
    """Take the signals; from the main thread. A shell's background jobs have SIGINT ignored."""
    global _pipe, _inside
    _requested.clear()
    _inside = 0
    if _pipe is None:
        _pipe, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        threading.Thread(target=_count, args=(_pipe,), daemon=True, name="signals").start()
    for number in SIGNALS:
        signal.signal(number, _request)


@contextlib.contextmanager
def safe_points() -> Iterator[None]:
    """The code inside calls `check` often enough for the first signal to wait for it."""
    global _inside
    _inside += 1
    try:
        yield
        check()  # it came after the last point
    finally:
        _inside -= 1


def check() -> None:
    """A safe point: KeyboardInterrupt if a signal came."""
    if _requested.is_set():
        raise KeyboardInterrupt


def _request(number: int, frame: object) -> None:
    if not _inside:
        _end()
    _requested.set()


def _count(pipe: int) -> None:
    """In a thread: the second signal ends the process, even in the middle of native code."""
    seen = 0
    while numbers := os.read(pipe, 64):
        seen += sum(number in SIGNALS for number in numbers)
        if seen >= 2:
            _end()


def _end() -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"sparrow: stopped at once\n")
    os._exit(STATUS)


def _forget_in_child() -> None:
    """A forked child writes its signals to nobody's pipe."""
    if _pipe is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)
