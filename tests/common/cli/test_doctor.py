"""`sparrow doctor`: one line, one reason, one remedy; no hang, no traceback."""

import os
import subprocess
import sys
import time

import pytest

from common.cli import doctor
from common.cli.doctor import Check, Probe, diagnose, print_checks, probe_python, run_probe, summary

GPU = Check(name="CUDA GPU", ok=True, detail="H200")
NO_GPU = Check(name="CUDA GPU", ok=False, detail="nvidia-smi not found", remedy="another machine")


@pytest.fixture(scope="module")
def checks():
    return diagnose(timeout=60)


def test_every_line_has_one_reason_and_one_remedy(checks, capsys):
    print_checks(checks)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(checks) + 2 and "Traceback" not in "".join(lines)
    for check, line in zip(checks, lines, strict=False):
        assert "\n" not in check.detail and check.detail
        assert check.ok or check.remedy, check
        assert line.startswith("ok  " if check.ok else "no  ")
        assert (" -> " in line) == (not check.ok)


def test_expected_checks_in_order(checks):
    assert [check.name for check in checks] == [
        "Python",
        "CPU cores",
        "memory",
        "disk",
        "JAX",
        "TPU",
        "CUDA GPU",
        "torch",
        "triton",
        "vllm",
        "libtpu",
        "reasoning-gym",
        "pyarrow",
        "tensorboard",
        "matplotlib",
        "bubblewrap",
    ]


def test_frameworks_stay_out_of_this_process():
    code = (
        "import sys\nfrom common.cli.doctor import diagnose\ndiagnose(timeout=1)\n"
        "bad = {'jax', 'torch', 'triton', 'vllm', 'tensorboard', 'pyarrow'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_a_hanging_probe_is_killed_with_its_children():
    # the grandchild inherits the pipe: killing the child alone would wait for it
    code = (
        "import subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(c.pid, flush=True)\ntime.sleep(60)\n"
    )
    start = time.monotonic()
    probe = probe_python(code, timeout=1.0)
    assert probe == Probe(error="no answer within 1 s")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise RuntimeError('libcuda.so is broken')", "RuntimeError: libcuda.so is broken"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("raise SystemExit(3)", "exit status 3"),
        ("print('hello')", "unexpected output 'hello'"),
        ("pass", "exit status 0"),
    ],
)
def test_broken_installations_become_one_line(code, error):
    assert probe_python(code, timeout=30) == Probe(error=error)


def test_noise_before_the_answer_is_ignored():
    code = "print('warning: noise'); print('{\"version\": \"1\"}')"
    assert probe_python(code, timeout=30).found == {"version": "1"}


def test_missing_program_is_one_line():
    status, _, error = run_probe(["no-such-program-here"], timeout=5)
    assert (
        status is None and error == "cannot start no-such-program-here: No such file or directory"
    )


def test_jax_lines():
    broken = doctor._jax(Probe(error="no answer within 60 s"))
    assert not broken.ok and broken.detail == "does not start: no answer within 60 s"
    cpu = {"version": "0.10.2", "platform": "cpu", "kind": "cpu", "num": 1}
    assert doctor._jax(Probe(found=cpu)).detail == "0.10.2, 1 device(s): cpu (cpu)"
    tpu = Probe(found={**cpu, "platform": "tpu", "kind": "TPU v5 lite", "num": 4})
    assert doctor._tpu(tpu).ok and "4 x TPU v5 lite" in doctor._tpu(tpu).detail


def test_torch_and_triton_need_what_they_need():
    cpu_build = Probe(found={"version": "2.9", "cuda": None, "num": 0})
    assert doctor._torch(cpu_build, NO_GPU).ok
    assert "does not see the GPU" in doctor._torch(cpu_build, GPU).detail
    triton = Probe(found={"version": "3.5"})
    assert doctor._triton(triton, GPU).ok
    assert "need a CUDA GPU" in doctor._triton(triton, NO_GPU).detail


def test_remedies_name_only_extras_that_exist(monkeypatch):
    class Metadata:
        @staticmethod
        def get_all(name):
            return ["tpu", "data"]

    monkeypatch.setattr(doctor.importlib.metadata, "metadata", lambda name: Metadata)
    assert doctor._install("pyarrow", "data") == "pip install 'sparrow-rl[data]'"
    assert doctor._install("torch", "torch") == "pip install torch"


def test_fake_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(script):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return doctor._gpu(timeout=10)

    two = install("printf 'NVIDIA H200, 143771 MiB, 570.1\\nNVIDIA H200, 143771 MiB, 570.1\\n'")
    assert two.ok and two.detail == "NVIDIA H200, 143771 MiB, 570.1 and 1 more"
    dead = install("echo 'NVIDIA-SMI has failed: driver not running' >&2; exit 9")
    assert not dead.ok and dead.detail.startswith("nvidia-smi fails: NVIDIA-SMI has failed")
    assert "no answer within 0.5 s" in _slow(program)


def _slow(program):
    program.write_text("#!/bin/sh\nsleep 60\n")
    return doctor._gpu(timeout=0.5).detail


def test_too_little_memory_and_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**30)
    monkeypatch.setattr(doctor, "MIN_DISK_GIB", 1e9)
    _, memory, disk = doctor._machine(tmp_path / "not" / "yet" / "made")
    assert not memory.ok and memory.detail == "1.0 GiB available, the demo needs 4"
    assert not disk.ok and disk.remedy


def test_cgroup_limits_count(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 999 kB MemAvailable: 8388608 kB",
        "/sys/fs/cgroup/memory.max": str(6 * 2**30),
        "/sys/fs/cgroup/memory.current": str(2**30),
        "/sys/fs/cgroup/cpu.max": "150000 100000",
    }
    monkeypatch.setattr(doctor, "_words", lambda path: files[path].split())
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert doctor.available_memory() == 5 * 2**30  # min(8 GiB, 6 - 1 GiB)
    assert doctor.num_cores() == 2  # 1.5 cores, rounded up
    files |= {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/cpu.max": "max 100000"}
    assert doctor.available_memory() == 8 * 2**30
    assert doctor.num_cores() == 8


def test_summary_says_what_runs():
    def check(name, ok):
        return Check(name=name, ok=ok, detail="x", remedy="y")

    assert summary([check("JAX", True), check("TPU", False)]).startswith(
        "This machine can run: JAX reference path (make demo). It cannot run: Pallas kernels"
    )
    assert "can run: nothing yet" in summary([check("JAX", False)])
