"""The processes of a run that is going on, as the kernel knows them.

Here: finding them under /proc, and sending one a signal without ever hitting another that took over its number. Not
here: whom to choose (`kills.py`).

    driver --> zygote --> workers and servers, each known by the log it writes to --> perhaps loaders of its own
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "processes_of", "send", "zygote_of"]

_PROC = Path("/proc")
_ZYGOTE = b"syncline.engines.zygote"


class Process(NamedTuple):
    """A worker or a server of parameters: its number in the run, and its process."""

    number: int
    pid: int


def zygote_of(driver: int) -> int | None:
    """The process that `driver` has its workers forked from, if it has one now."""
    return next((pid for pid in _children(driver) if _ZYGOTE in _read(pid, "cmdline") and _is_alive(pid)), None)


def processes_of(run_dir: Path, zygote: int) -> list[Process]:
    """The workers and servers of a run that are alive, in the order of their numbers."""
    logs = str((run_dir / "logs").resolve())
    found = []
    for pid in _children(zygote):
        with contextlib.suppress(OSError):
            folder, _, name = os.readlink(_PROC / str(pid) / "fd" / "1").rpartition("/")
            log = re.fullmatch(r"worker-(\d+)\.log", name)
            if folder == logs and log is not None and _is_alive(pid):
                found.append(Process(int(log[1]), pid))
    return sorted(found)


def send(pid: int, number: signal.Signals, *, parent: int) -> bool:
    """Send a signal to this child of `parent`; False if it is none, or is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Only now that this descriptor stands for the process can its number not pass to another one.
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
        with contextlib.suppress(OSError):  # that thread is gone
            found += map(int, tasks.read_text().split())
    return found


def _is_alive(pid: int) -> bool:
    """Whether it runs; what has ended and only waits for being noticed does not."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
