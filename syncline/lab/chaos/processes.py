"""The processes of a live run.

Here: finding them in /proc, and signaling one without ever hitting an unrelated process that reuses its pid. Not here:
which one to kill (`kills.py`).

    driver --> zygote --> workers and servers, each identified by its log file --> its data loaders, if any
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_ZYGOTE = b"syncline.engines.zygote"


class RunProcess(NamedTuple):
    """A worker or a parameter server."""

    worker_id: int
    """Workers are numbered first, then the parameter servers."""
    pid: int


def zygote_of(driver: int) -> int | None:
    """The process from which `driver` forks its workers, if there is one now."""
    return next((pid for pid in _children(driver) if _ZYGOTE in _read(pid, "cmdline") and _is_alive(pid)), None)


def processes_of(run_dir: Path, zygote: int) -> list[RunProcess]:
    """The live workers and servers of a run, by worker_id."""
    logs = str((run_dir / "logs").resolve())
    found = []
    for pid in _children(zygote):
        with contextlib.suppress(OSError):
            folder, _, name = os.readlink(_PROC / str(pid) / "fd" / "1").rpartition("/")
            log = re.fullmatch(r"worker-(\d+)\.log", name)
            if folder == logs and log is not None and _is_alive(pid):
                found.append(RunProcess(int(log[1]), pid))
    return sorted(found)


def send(pid: int, number: signal.Signals, *, parent: int) -> bool:
    """Send a signal to this child of `parent`; False if it is no child or has exited."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The checks come after pidfd_open: from then on the pid cannot be reused behind our back.
        if pid not in _children(parent) or not _is_alive(pid):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has exited
            found += map(int, tasks.read_text().split())
    return found


def _is_alive(pid: int) -> bool:
    """Zombies do not count as alive."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
