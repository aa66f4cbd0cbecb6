"""Ctrl-C and SIGTERM: long work stops at a safe point, anything else at once.

A signal handler may run in any frame. Python ignores exceptions in garbage-collection and weakref
callbacks, so a signal whose handler raised there would be lost. Therefore, inside `safe_points()`,
the first signal only sets a flag, and `check()`, called between chunks, batches and steps, raises
KeyboardInterrupt. A second signal ends the process at once, as the first one does outside.

Handlers written in Python have to wait while native code runs, such as a compilation of minutes.
The C handler of Python does not: it writes each signal to a pipe, where a thread counts them.
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
_seen = 0
_pipe: int | None = None


def install() -> None:
    """Install the handlers, in the main thread, even if a shell started us with SIGINT ignored."""
    global _pipe, _inside, _seen
    _requested.clear()
    _inside = _seen = 0
    if _pipe is None:
        _pipe, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        threading.Thread(target=_count, args=(_pipe,), daemon=True, name="signals").start()
    for number in SIGNALS:
        signal.signal(number, _request)


@contextlib.contextmanager
def safe_points() -> Iterator[None]:
    """For code that calls `check` often enough: the first signal waits for the next call."""
    global _inside
    _inside += 1
    try:
        yield
        check()  # for a signal after the last safe point
    finally:
        _inside -= 1


def check() -> None:
    """A safe point: raises KeyboardInterrupt if a signal has arrived."""
    if _requested.is_set():
        raise KeyboardInterrupt


def _request(number: int, frame: object) -> None:
    if not _inside:
        _end()
    _requested.set()


def _count(pipe: int) -> None:
    """Body of a thread: the second signal ends the process, even while native code runs."""
    global _seen
    while numbers := os.read(pipe, 64):
        _seen += sum(number in SIGNALS for number in numbers)
        if _seen >= 2:
            _end()


def _end() -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"sparrow: stopped at once\n")
    os._exit(STATUS)


def _forget_in_child() -> None:
    """In a forked child: do not write signals to the pipe of the parent."""
    if _pipe is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)
