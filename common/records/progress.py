"""Progress of long work, for every command: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

_live: list[Any] = []
"""The rich bar on the terminal, at most one; nested work adds a line to it."""


def format_seconds(seconds: float) -> str:
    """Seconds in words: 75.2 as '1m15s', 4000 as '1h06m', 0.25 as '0.2s'."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _start_bar(stream: TextIO) -> Any:
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("ETA"),
        bars.TimeRemainingColumn(),
        console=Console(file=stream),
    )
    bar.start()
    return bar


class Progress:
    """Shows progress: a bar with ETA on a terminal, else a plain line at most every 10 seconds.

    Use: `with Progress("profile") as progress: engine.generate(..., progress=progress)`. A call
    with (done, total) is cheap, and the total may change. Bars may be nested.
    """

    def __init__(
        self, description: str, *, stream: TextIO | None = None, every_seconds: float = 10.0
    ) -> None:
        self._description, self._every = description, every_seconds
        self._stream = sys.stderr if stream is None else stream
        self._start = self._last = time.monotonic()
        self._state = (0, 0)
        self._bar: Any = None

    @property
    def is_bar(self) -> bool:
        """True while a live bar is on the terminal."""
        return self._bar is not None

    def __enter__(self) -> Progress:
        self._start = self._last = time.monotonic()
        if self._stream.isatty():
            self._owner = not _live
            if self._owner:
                _live.append(_start_bar(self._stream))
            self._bar = _live[0]
            self._task = self._bar.add_task(self._description, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        self._state = (done, total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            left = (now - self._start) / done * (total - done) if done else None
            eta = "" if left is None else f", ETA {format_seconds(left)}"
            self.print(f"{self._description}: {done}/{total}{eta}")

    def print(self, line: str, *, style: str | None = None) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, style=style, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            if self._owner:
                _live.pop().stop()
            else:
                self._bar.refresh()  # shows the last state before the line is removed
                self._bar.remove_task(self._task)
            self._bar = None
        elif self._last > self._start:  # it printed lines: print a last one
            done, total = self._state
            spent = format_seconds(time.monotonic() - self._start)
            self.print(f"{self._description}: {done}/{total} in {spent}")
