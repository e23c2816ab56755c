"""Processes that must not outlive the one that started them, and what the kernel knows about a process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path

PEER_FAILED = signal.SIGRTMIN + 8
"""Sent to workers whose driver is gone: another worker has failed, and no coordinator is left to announce that."""

_PR_SET_PDEATHSIG = 1
_EXIT_CODE = 49
"""The position of exit_code in /proc/PID/stat, counted from the state; see proc(5)."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_starter() -> None:
    """The same in a process of multiprocessing, also if the one that has started it is gone by now."""
    die_with_parent()
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid != os.getppid():
        os._exit(1)


def continue_without_parent() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent ends. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), t (traced), Z (a zombie); empty if gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def zombie_status(pid: int) -> int | None:
    """How a process ended that its parent has not waited for yet: its exit code, or minus its signal.

    None if there is no such zombie.
    """
    fields = _stat(pid)
    if len(fields) <= _EXIT_CODE or fields[0] != "Z":
        return None
    try:
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    except ValueError:
        return None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
