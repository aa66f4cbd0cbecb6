"""`sparrow doctor`: what this machine can run, and a reason and a remedy for what it cannot.

Frameworks are imported in child processes with a deadline, so that a broken installation or a
hanging driver becomes one line and neither a traceback nor a hang. All probes run concurrently.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GIB = 2**30
MIN_MEMORY_GIB, MIN_DISK_GIB = 4.0, 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report. detail: what was found, or why it failed; remedy: what to do then."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def line(self) -> str:
        """'ok  name  detail' or 'no  name  detail -> remedy'."""
        remedy = f" -> {self.remedy}" if self.remedy and not self.ok else ""
        return f"{'ok' if self.ok else 'no'}  {self.name:<16} {self.detail}{remedy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of a child process: the JSON that it printed, or one line about what went wrong."""

    found: Mapping[str, Any] | None = None
    error: str = ""


_JAX = """
import json, jax
devices = jax.devices()
print(json.dumps({"version": jax.__version__, "platform": devices[0].platform,
                  "kind": devices[0].device_kind, "num": len(devices)}))
"""
_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda if cuda else None,
                  "num": torch.cuda.device_count() if cuda else 0}))
"""
_TRITON = """
import json, triton
print(json.dumps({"version": triton.__version__}))
"""


def run_probe(command: Sequence[str], *, timeout: float) -> tuple[int | None, str, str]:
    """(exit status, stdout, stderr); the status is None if it was killed or could not start.

    The child gets a session of its own, and the whole session is killed at the deadline, since a
    grandchild that keeps the pipe open would make us wait for ever.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return None, "", f"cannot start {command[0]}: {error.strerror}"
    try:
        out, err = child.communicate(timeout=timeout)
        return child.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=5)
    except subprocess.TimeoutExpired:  # stuck in the kernel (a dead driver): leave it
        pass
    return None, "", f"no answer within {timeout:g} s"


def probe_python(code: str, *, timeout: float) -> Probe:
    """Run `code` in a new interpreter and read the JSON object in its last line of output."""
    status, out, err = run_probe([sys.executable, "-c", code], timeout=timeout)
    lines = out.strip().splitlines()
    if status == 0 and lines:
        try:
            return Probe(found=json.loads(lines[-1]))
        except ValueError:
            return Probe(error=f"unexpected output {lines[-1][:80]!r}")
    if status is None:
        return Probe(error=err)
    said = [line.strip() for line in err.splitlines() if line.strip()]
    ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return Probe(error=(said[-1] if said else ended)[:200])


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _install(package: str, extra: str) -> str:
    """The command that installs `package`: by our extra, if this distribution has that extra."""
    try:
        extras = importlib.metadata.metadata("sparrow-rl").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        extras = []
    return f"pip install 'sparrow-rl[{extra}]'" if extra in extras else f"pip install {package}"


def _lacks(name: str) -> Check:
    """The check of torch, triton or vllm when it is not installed."""
    if not _installed("sparrow_torch"):
        detail = "not installed, and this version of sparrow has no torch backend"
        return Check(name=name, ok=False, detail=detail, remedy="use the JAX backend")
    return Check(name=name, ok=False, detail="not installed", remedy=_install(name, name))


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check(
        name="Python",
        ok=good,
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        remedy="install Python 3.11 or newer",
    )


def num_cores() -> int:
    """Number of cores that this process may use, by affinity and by cgroup quota (rounded up)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(cores, 1)


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def available_memory() -> int | None:
    """Bytes that can be allocated now, within the cgroup limit; None if unknown."""
    words = _words("/proc/meminfo")
    if "MemAvailable:" not in words:
        return None
    free = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit, used = _words("/sys/fs/cgroup/memory.max"), _words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(int(limit[0]) - int(used[0]), 0))
    return free


def _machine(directory: Path) -> list[Check]:
    cores, memory = num_cores(), available_memory()
    checks = [Check(name="CPU cores", ok=True, detail=f"{cores} usable")]
    if memory is None:
        checks.append(Check(name="memory", ok=True, detail="size unknown on this system"))
    else:
        enough = memory >= MIN_MEMORY_GIB * GIB
        detail = f"{memory / GIB:.1f} GiB available"
        detail += "" if enough else f", the demo needs {MIN_MEMORY_GIB:g}"
        checks.append(
            Check(name="memory", ok=enough, detail=detail, remedy="close programs, or add memory")
        )
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    enough = free >= MIN_DISK_GIB * GIB
    detail = f"{free / GIB:.1f} GiB free here"
    detail += "" if enough else f", checkpoints need about {MIN_DISK_GIB:g}"
    checks.append(
        Check(name="disk", ok=enough, detail=detail, remedy="free some space, or use another disk")
    )
    return checks


def _jax(probe: Probe | None) -> Check:
    name = "JAX"
    if probe is None:
        remedy = _install("jax flax optax orbax-checkpoint", "jax")
        return Check(name=name, ok=False, detail="not installed", remedy=remedy)
    if probe.found is None:
        remedy = "try JAX_PLATFORMS=cpu, or reinstall jax"
        return Check(name=name, ok=False, detail=f"does not start: {probe.error}", remedy=remedy)
    found = probe.found
    detail = f"{found['version']}, {found['num']} device(s): {found['platform']} ({found['kind']})"
    return Check(name=name, ok=True, detail=detail)


def _tpu(jax: Probe | None) -> Check:
    found = jax.found if jax and jax.found else {}
    if found.get("platform") == "tpu":
        detail = f"{found['num']} x {found['kind']}: Pallas kernels run"
        return Check(name="TPU", ok=True, detail=detail)
    present = [p for p in ("/dev/accel0", "/dev/vfio/0") if Path(p).exists()]
    if not present:
        return Check(
            name="TPU",
            ok=False,
            detail="no TPU in this machine",
            remedy="use a TPU VM, or the CPU reference path",
        )
    if not _installed("libtpu"):
        remedy = _install("'jax[tpu]'", "tpu")
        return Check(name="TPU", ok=False, detail="device found, no libtpu", remedy=remedy)
    detail = f"device {present[0]} found, but JAX does not use it"
    return Check(name="TPU", ok=False, detail=detail, remedy="free it, and unset JAX_PLATFORMS")


def _gpu(timeout: float) -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check(
            name="CUDA GPU",
            ok=False,
            detail="nvidia-smi not found: no NVIDIA driver",
            remedy="use a machine with an NVIDIA GPU, or the CPU reference path",
        )
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    status, out, err = run_probe(query, timeout=timeout)
    lines = (out.strip() or err.strip()).splitlines()
    if status == 0 and out.strip():
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        return Check(name="CUDA GPU", ok=True, detail=lines[0].strip() + more)
    detail = f"nvidia-smi fails: {lines[0][:120] if lines else 'no GPU listed'}"
    return Check(name="CUDA GPU", ok=False, detail=detail, remedy="reinstall the NVIDIA driver")


def _torch(probe: Probe | None, gpu: Check) -> Check:
    if probe is None:
        return _lacks("torch")
    if probe.found is None:
        detail = f"does not start: {probe.error}"
        return Check(name="torch", ok=False, detail=detail, remedy="reinstall torch")
    version, cuda = probe.found["version"], probe.found["cuda"]
    if gpu.ok and cuda is None:
        return Check(
            name="torch",
            ok=False,
            detail=f"{version} does not see the GPU (CPU build, or driver too old)",
            remedy="install the CUDA build of torch (pytorch.org), or a newer driver",
        )
    where = f"CUDA {cuda}, {probe.found['num']} GPU(s)" if cuda else "CPU"
    return Check(name="torch", ok=True, detail=f"{version}, {where}")


def _triton(probe: Probe | None, gpu: Check) -> Check:
    if probe is None:
        return _lacks("triton")
    if probe.found is None:
        detail = f"does not start: {probe.error}"
        return Check(name="triton", ok=False, detail=detail, remedy="reinstall triton")
    version = probe.found["version"]
    if not gpu.ok:
        remedy = "use a CUDA machine, or the torch reference path"
        detail = f"{version} installed, but its kernels need a CUDA GPU"
        return Check(name="triton", ok=False, detail=detail, remedy=remedy)
    return Check(name="triton", ok=True, detail=version)


def _vllm(gpu: Check) -> Check:
    if not _installed("vllm"):
        return _lacks("vllm")
    version = _version("vllm")
    if not gpu.ok:
        remedy = "use a CUDA machine, or --config.rollout.engine=jax"
        detail = f"{version} installed, but our backend needs a CUDA GPU"
        return Check(name="vllm", ok=False, detail=detail, remedy=remedy)
    return Check(name="vllm", ok=True, detail=version)


_EXTRAS = (
    ("libtpu", "libtpu", "tpu", "JAX on TPU"),
    ("reasoning_gym", "reasoning-gym", "data", "more tasks"),
    ("pyarrow", "pyarrow", "data", "parquet data"),
    ("tensorboard", "tensorboard", "data", "event files"),
    ("matplotlib", "matplotlib", "", "figures of reports"),
)
"""(module, distribution, our extra, purpose)."""


def _extras() -> list[Check]:
    checks = []
    for module, distribution, extra, purpose in _EXTRAS:
        good = _installed(module)
        detail = f"{_version(distribution)} ({purpose})" if good else f"not installed ({purpose})"
        remedy = _install(distribution, extra)
        checks.append(Check(name=distribution, ok=good, detail=detail, remedy=remedy))
    return checks


def _bubblewrap(timeout: float) -> Check:
    name, program = "bubblewrap", shutil.which("bwrap")
    if program is None:
        detail = "bwrap not found (sandbox for code tasks)"
        return Check(name=name, ok=False, detail=detail, remedy="apt install bubblewrap")
    trial = [program, "--ro-bind", "/", "/", "--unshare-all", "true"]
    status, _, err = run_probe(trial, timeout=timeout)
    if status == 0:
        return Check(name=name, ok=True, detail="works (sandbox for code tasks)")
    said = err.strip().splitlines()
    detail = f"installed, but does not start: {said[-1][:120] if said else 'no reason given'}"
    remedy = "allow unprivileged user namespaces on this host"
    return Check(name=name, ok=False, detail=detail, remedy=remedy)


def diagnose(*, directory: Path | str = ".", timeout: float = 60.0) -> list[Check]:
    """All checks, in the order in which they are shown; takes at most about `timeout` + 5 seconds.

    directory: where runs would be written, for the check of the disk.
    """
    codes = {"jax": _JAX, "torch": _TORCH, "triton": _TRITON}
    with ThreadPoolExecutor(max_workers=len(codes) + 2) as pool:
        futures = {
            module: pool.submit(probe_python, code, timeout=timeout)
            for module, code in codes.items()
            if _installed(module)
        }
        gpu_future = pool.submit(_gpu, timeout)
        sandbox_future = pool.submit(_bubblewrap, min(timeout, 10.0))
        probes = {module: future.result() for module, future in futures.items()}
        gpu, sandbox = gpu_future.result(), sandbox_future.result()
    return [
        _python(),
        *_machine(Path(directory).absolute()),
        _jax(probes.get("jax")),
        _tpu(probes.get("jax")),
        gpu,
        _torch(probes.get("torch"), gpu),
        _triton(probes.get("triton"), gpu),
        _vllm(gpu),
        *_extras(),
        sandbox,
    ]


def summary(checks: Sequence[Check]) -> str:
    """Which of our backends and kernels run on this machine, in one or two sentences."""
    good = {check.name for check in checks if check.ok}
    paths = {"JAX reference path (make demo)": {"JAX"}, "Pallas kernels": {"JAX", "TPU"}}
    if _installed("sparrow_torch"):
        paths |= {
            "torch reference path": {"torch"},
            "Triton kernels": {"torch", "triton", "CUDA GPU"},
            "vLLM traces": {"vllm", "torch"},
        }
    can = [name for name, needs in paths.items() if needs <= good]
    cannot = [name for name in paths if name not in can]
    first = f"This machine can run: {', '.join(can) or 'nothing yet'}."
    return first + (f" It cannot run: {', '.join(cannot)} (see above)." if cannot else "")


def print_checks(checks: Sequence[Check]) -> None:
    """Print the line of each check, then the summary."""
    for check in checks:
        print(check.line())
    print("\n" + summary(checks))
