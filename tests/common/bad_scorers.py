"""Scorers for test_grading.py, which worker processes import; standard library only."""

import os
import subprocess
import sys
import time
from pathlib import Path


def echo(answer, response):
    return answer["score"]


def hang(answer, response):
    time.sleep(1000)


def spin(answer, response):
    while True:
        pass


def hang_with_child(answer, response):
    child = subprocess.Popen(["sleep", "1000"])
    Path(answer["file"]).write_text(str(child.pid))
    child.wait()


def crash(answer, response):
    os._exit(3)


def fail(answer, response):
    raise KeyError("no such thing")


def leave(answer, response):
    sys.exit(0)


def num_bytes(answer, response):
    return len(response) / 10**7


def slow(answer, response):
    time.sleep(0.2)
    return 1
