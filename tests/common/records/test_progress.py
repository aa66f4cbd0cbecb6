"""Progress of long work: sparse plain lines, and a bar on a terminal."""

import io

import pytest

from common.records.progress import Progress, format_seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_progress_speaks_at_most_every_ten_seconds(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr("common.records.progress.time", clock)
    with Progress("profile", stream=stream) as progress:
        for done in range(1, 26):  # one call a second, 25 s
            clock.now += 1
            progress(done, 50)
    # at 10 s: 10 of 50 done, 1 s each, 40 s left; at 20 s: 30 s left; then the end
    assert stream.getvalue().splitlines() == [
        "profile: 10/50, ETA 40s",
        "profile: 20/50, ETA 30s",
        "profile: 25/50 in 25s",
    ]


def test_short_plain_progress_is_silent():
    stream = io.StringIO()
    with Progress("profile", stream=stream) as progress:
        progress(0, 2)
        progress(2, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2s"), (59.9, "59s"), (75.2, "1m15s"), (4000, "1h06m")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_bars_on_a_terminal_nest_and_print_above(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with Progress("training", stream=stream) as outer:
        outer(1, 4)
        with Progress("rollout", stream=stream) as inner:
            assert outer.is_bar and inner.is_bar
            inner(3, 8)
            inner.print("a line of the inner work")
        outer.print("step 1 [not markup]")
    text = stream.getvalue()
    assert "1/4" in text and "3/8" in text and "step 1 [not markup]" in text
    assert text.index("rollout") < text.index("a line of the inner work") < text.index("step 1 [")
