"""Ctrl-C and SIGTERM: never lost, one line, status 130, a second one ends at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import gc, os, signal, sys, time
from common.cli import command_line
from common.records import stopping

def signal_in_a_callback_of_the_collector():
    # What is raised there is swallowed by Python ("Exception ignored in").
    def callback(phase, info):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), signal.{name})
    gc.callbacks.append(callback)
    gc.collect()

def native():
    # Holds the main thread for a minute or more without the interpreter's lock, as a compilation.
    import hashlib
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

{decorator}
def work(argv):
    print("started", flush=True)
    {body}

command_line._dispatch = work
sys.exit(command_line.main(["train"]))
"""
SAFE = "@stopping.safe_points()"
STEPS = "for step in range(600): stopping.check(); print('step', step); time.sleep(0.1)"


def start(body, decorator=SAFE, name="SIGTERM"):
    program = PROGRAM.format(body=body, decorator=decorator, name=name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    return process


def ends(process):
    """(status, stderr, stdout)."""
    out, err = process.communicate(timeout=20)
    return process.returncode, err, out


STOPPED = "sparrow: stopped; the same command resumes\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_inside_a_garbage_collection_is_not_lost(name):
    body = f"signal_in_a_callback_of_the_collector(); {STEPS.replace('600', '3')}".replace(
        "; for", "\n    for"
    )
    status, err, out = ends(start(body, name=name))
    assert (status, err) == (130, STOPPED)
    assert "step" not in out


def test_a_signal_after_the_last_safe_point_still_counts():
    status, err, _ = ends(start("signal_in_a_callback_of_the_collector()"))
    assert (status, err) == (130, STOPPED)


def test_a_command_without_safe_points_stops_at_once():
    body = "signal_in_a_callback_of_the_collector(); print('still working')"
    status, err, out = ends(start(body, decorator=""))
    assert (status, err, out) == (130, "sparrow: stopped at once\n", "")


def test_a_step_is_finished_before_the_stop():
    process = start(STEPS)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    status, err, out = ends(process)
    assert (status, err) == (130, STOPPED)
    assert out.splitlines()[-1].startswith("step ")


def test_the_second_signal_ends_native_code_at_once():
    process = start("native()")
    began = time.monotonic()
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    status, err, _ = ends(process)
    assert (status, err) == (130, "sparrow: stopped at once\n")
    assert time.monotonic() - began < 15


def test_a_second_command_in_a_process_counts_its_own_signals():
    """Its first signal waits for a safe point, although the command before it had one too."""
    status, err, out = ends(start(
        "signal_in_a_callback_of_the_collector(); time.sleep(0.3)\n"
        "    if not os.environ.pop('SECOND', ''):\n"
        "        os.environ['SECOND'] = '1'; command_line.main(['train'])\n"
        f"    {STEPS.replace('600', '3')}"
    ))  # fmt: skip
    assert (status, err) == (130, 2 * STOPPED)
    assert "step" not in out


def test_a_forked_child_does_not_stop_its_parent():
    body = (
        "import warnings; warnings.simplefilter('ignore'); child = os.fork()\n"
        "    if child == 0: time.sleep(60)\n"
        "    time.sleep(0.2); [(os.kill(child, 15), time.sleep(0.2)) for _ in range(2)]\n"
        "    os.kill(child, 9); os.waitpid(child, 0)"
    )
    status, err, _ = ends(start(body))
    assert (status, err) == (0, "")
