"""Peak memory of all processes that a bench has started, seen from outside: works for any framework.

The proportional set size (PSS) divides shared pages among the processes that share them, so that the sum over processes
counts each page once. Here: sampling in a thread. Not here: starting processes (`bench/processes.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import SynclineError
from syncline.lab.bench.processes import MARK

_EVERY_S = 0.2


@dataclass
class Peak:
    """The largest sum seen so far."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Sample until the end of the context. Only this process's own descendants with a bench's mark count."""
    peak, over = Peak(), threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY_S):
            peak.bytes = max(peak.bytes, sum(map(pss_of, _marked_by_me())))

    thread = threading.Thread(target=sample, name="memory sampler", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
    if peak.bytes == 0:
        raise SynclineError("The command exited before its memory could be sampled, or /proc does not say it.")


def pss_of(pid: int) -> int:
    """In bytes; 0 for a process that has exited."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _marked_by_me() -> list[int]:
    """Processes with the mark of a command whose first process is a child of this one."""
    marks: set[bytes] = set()
    marked: list[tuple[int, bytes]] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # exited by now, or another user's
        mark = next((v for v in environment if v.startswith(f"{MARK}=".encode())), None)
        if mark is not None:
            marked.append((int(entry), mark))
            if parent == os.getpid():
                marks.add(mark)
    return [pid for pid, mark in marked if mark in marks]
