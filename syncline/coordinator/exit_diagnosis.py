"""What the kernel knows about the end of a process beyond its exit status.

Here: `ExitDiagnosis`: whether the out-of-memory killer was active, and what a hung process was doing when it was
killed. Not here: whether a process hangs (`heartbeats.py`), and the messages (`root_cause.py`, `observe/incidents.py`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from syncline.engines.engine import Exit
from syncline.errors import plural
from syncline.telemetry.run_dir import RunDir

_STATES = {
    "T": "its process is stopped, as by SIGSTOP",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel, as by a disk or network drive that does not respond",
    "R": "its process is running; its code holds the GIL, or its network is down",
    "S": "its process is running; its code holds the GIL, or its network is down",
}
"""What a hung process is doing, by the kernel's state letter."""


class ExitDiagnosis:
    """Collects evidence during a run: some of it disappears with the process."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._kills_before = out_of_memory_kills()
        self._pids: dict[int, int] = {}
        self._states: dict[int, str] = {}

    def on_hello(self, worker_id: int, pid: int) -> None:
        """The current life of this worker has this pid."""
        self._pids[worker_id] = pid
        self._states.pop(worker_id, None)

    def before_kill(self, worker_id: int) -> None:
        """Record what a process does before it is killed for hanging."""
        self._states[worker_id] = self._state_of(worker_id)

    def describe(self, exit: Exit, hung: str = "") -> str:
        """How it ended, for people; `hung` is the reason if the coordinator killed it."""
        if not hung:
            return exit.describe() + self._about_memory(exit)
        found = _STATES.get(self._states.get(exit.worker_id, ""), "") if "no heartbeat for" in hung else ""
        return f"{hung}{f' ({found})' if found else ''} and was killed"

    def was_out_of_memory(self, exit: Exit) -> bool:
        """Whether the kernel's out-of-memory killer likely ended this process."""
        return exit.signal == signal.SIGKILL and bool(self._kills())

    def _about_memory(self, exit: Exit) -> str:
        if exit.signal != signal.SIGKILL:
            return ""
        kills = self._kills()
        if kills is None:
            return " (out-of-memory kills are not readable here)"
        if not kills:
            return " (not by the out-of-memory killer)"
        return f" (out of memory: {plural(kills, 'kill')} by the kernel in this cgroup since the run began)"

    def _kills(self) -> int | None:
        """Since the run began: earlier kills say nothing about it."""
        kills = out_of_memory_kills()
        return None if kills is None else kills - (self._kills_before or 0)

    def _state_of(self, worker_id: int) -> str:
        process = Path("/proc", str(self._pids.get(worker_id, "")))
        try:
            # The worker runs on this host only if this pid writes its log: elsewhere, the pid is another process.
            if os.readlink(process / "fd" / "1") != str(self._run_dir.log(worker_id).resolve()):
                return ""
            return (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


def out_of_memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of this cgroup the out-of-memory killer has killed; None if that cannot be read.

    cgroup v1 and v2 count them in different files. Inside a container its own group may be at the root.
    """
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    files = []
    for _, controllers, path in groups:
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            files += [root / "memory" / place / "memory.oom_control" for place in (inside, "")]
        elif not controllers:
            files += [root / place / "memory.events" for place in (inside, "")]
    for file in files:
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None
