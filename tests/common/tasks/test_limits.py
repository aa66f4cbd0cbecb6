"""Chat templates that loop for ever or make gigabytes: one line, soon; seeded and by hand."""

import random
import resource
import signal
import time

import pytest

from common.config import TaskConfig
from common.tasks import chat, limits, registry
from common.tasks.chat import load_codec
from tests.common.task_files import row, write_jsonl, write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
TIME = (
    LOOP, LOOP.replace("x", ""), "{{ 3**(10**8) % 7 }}", "{{ ('a '*(10**7)) | urlize }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [ns.x|length] "
    "%}{% endfor %}",
)  # fmt: skip
MEMORY = (
    "{{ 'a' * 10**11 }}", "{{ [0] * 10**11 }}", "{{ '%99999999999d' % 1 }}",
    "{{ 'a' | center(10**11) }}", "{{ '{:>99999999999}'.format(1) }}", "{{ 'a'.ljust(10**11) }}",
    "{{ 'aaaa'.replace('a','a'*10**5).replace('a','a'*10**5) }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}{{ ns.x }}",
)  # fmt: skip
NUMBERS = ("0", "-1", "7", "10**4", "10**6", "10**9", "10**11", "10**100", "1.5", "'a'", "none")
VALUES = (
    "'a' * {n}", "[0] * {n}", "range({n})", "{n} ** {n}", "messages", "'%{n}d' % 1",
    "'a' | center({n})", "messages | tojson(indent={n})", "('a' * {n}) | wordwrap(1)",
    "range({n}) | list | length", "(range({n}) | list) | batch({n}) | list", "'a'.join(range({n}))",
    "f({n})", "messages[{n}]", "'a'.zfill({n})", "('a' * {n}) | upper | reverse",
    "range({n}) | sum", "[[]] * {n} | sum(start=[])", "('a' * {n}).split('a')", "x * {n}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    monkeypatch.setattr(chat, "RENDER_BYTES", 2**28)


def refused(folder, template):
    """Seconds of computing that it took, and the one line; None where there is a prompt."""
    codec, start = load_codec(write_tokenizer(folder / "t", template), ""), time.process_time()
    try:
        codec.encode(HELLO, loading=True)
        line = None
    except ValueError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 500
    return time.process_time() - start, line


@pytest.mark.parametrize("template", TIME)
def test_a_template_that_runs_on_is_cut_off(tmp_path, template):
    seconds, line = refused(tmp_path, template)
    assert line.startswith("the chat template cannot render the messages (TimeoutError: not done ")
    assert line.endswith("after 0.2 seconds of computing)") and seconds < 20


@pytest.mark.parametrize("template", MEMORY)
def test_a_template_that_makes_gigabytes_is_cut_off(tmp_path, monkeypatch, template):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 60)
    line = refused(tmp_path, template)[1]
    assert line.endswith("(MemoryError: needs over 256 MiB of memory)")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_a_prompt_as_long_as_a_library_is_refused_before_the_tokenizer_has_it(tmp_path):
    """4,194,304 characters are the most."""
    line = refused(tmp_path, "{{ 'a' * 4194305 }}")[1]
    assert line.startswith("a prompt of 4194305 characters, expected at most 4194304")
    name = write_jsonl(tmp_path / "d.jsonl", [row()] * 3)
    with pytest.raises(ValueError, match=r"d.jsonl, line 1: a prompt of 4194305 characters"):
        registry.build_task(TaskConfig(name=name, tokenizer=str(tmp_path / "t")))


def test_limits_leave_nothing_behind():
    """A clock that went on would end some later work; a limit that stayed, too."""
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    with limits.memory_limit(2**30), limits.TimeLimit(9):
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 8
    with pytest.raises(TimeoutError, match="not done after 0.05 sec"), limits.TimeLimit(0.05):
        compute(60)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    after = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    assert after == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_deadline_that_python_swallows_comes_again():
    """What a handler raises inside `__del__` is swallowed, as inside a weakref callback."""

    class Slow:
        def __del__(self):
            compute(0.2)

    with pytest.raises(TimeoutError), limits.TimeLimit(0.1):
        Slow()
        compute(60)


def test_time_that_others_compute_does_not_count(tmp_path):
    """A machine that is busy, or a pause, is no fault of a template."""
    with limits.TimeLimit(0.2):
        time.sleep(0.5)


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def random_template(rng):
    def value():
        return rng.choice(VALUES).replace("{n}", rng.choice(NUMBERS))

    parts = ["{% set x = 'ab' %}{% macro f(n) %}{{ f(n) if n is odd else n }}{% endmacro %}"]
    for _ in range(rng.randint(1, 3)):
        piece = "{{ " + value() + " }}"
        for _ in range(rng.choice((0, 0, 1, 2))):
            piece = "{% for i in " + value() + " %}" + piece + "{% endfor %}"
        parts.append(piece)
    return "".join(parts)


def test_random_templates_end_soon_in_a_prompt_or_one_line(tmp_path):
    rng, lines = random.Random(3), 0
    for _ in range(60):
        template = random_template(rng)
        seconds, line = refused(tmp_path, template)
        assert seconds < 20, template
        lines += line is not None
    assert 20 < lines < 60
