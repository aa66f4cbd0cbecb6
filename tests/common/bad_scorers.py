"""Scorers for test_grading.py, which worker processes import; standard library only."""

import builtins
import json
import math
import os
import signal
import subprocess
import sys
import threading
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


def fork_returns(answer, response):
    os.fork()
    return 0.5


def write_to_the_pool(answer, response):
    """Writes into every pipe it can find, then hangs or claims a perfect score."""
    for fd in range(3, 64):
        try:
            os.write(fd, bytes.fromhex(answer["hex"]))
        except OSError:
            pass
    time.sleep(answer["sleep"])
    return 1


def leave_alarm(answer, response):
    signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return 1


def leave_thread(answer, response):
    threading.Thread(target=lambda: (time.sleep(0.1), os._exit(9)), daemon=True).start()
    return 1


def leave_patch(answer, response):
    math.sqrt = json.loads = builtins.len = lambda *_: 7
    return 1


def leave_orphan(answer, response):
    """A child of a child, in a session of its own, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(answer["file"]).write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not (os.path.exists(answer["file"]) and Path(answer["file"]).read_text()):
        time.sleep(0.01)
    if answer["crash"]:
        os._exit(3)
    return 1


def take_memory(answer, response):
    return len(bytearray(answer["bytes"])) and 1


def root_of_4(answer, response):
    """0.5 after 0.2 s, if math and builtins are as they were."""
    time.sleep(0.2)
    return math.sqrt(4) / 4 * len("a")
