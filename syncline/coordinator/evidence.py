"""What can be found out about the end of a process beyond its exit status, from what the kernel tells everybody.

Here: `Evidence`: whether the out-of-memory killer was at work, and what a silent process was doing when it was given
up. Not here: whether a process is silent (`watch.py`), and the sentences around it (`cause.py`, `view/losses.py`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from syncline.engines.engine import Exit
from syncline.telemetry.run_dir import RunDir

__all__ = ["Evidence", "out_of_memory_kills"]

_STATES = {
    "T": "its process is stopped, as by SIGSTOP",
    "t": "its process is stopped by a debugger",
    "D": "its process hangs in the kernel, as when a disk or a network drive does not answer",
    "R": "its process runs; either its code keeps Python's lock, or the network to it is cut",
    "S": "its process runs; either its code keeps Python's lock, or the network to it is cut",
}
"""What a silent process is doing, by the letter that the kernel has for it."""


class Evidence:
    """Collected while a run goes on: some of it is gone with the process."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._kills_before = out_of_memory_kills()
        self._pids: dict[int, int] = {}
        self._states: dict[int, str] = {}

    def on_hello(self, number: int, pid: int) -> None:
        """The present life of a process has this id."""
        self._pids[number] = pid
        self._states.pop(number, None)

    def before_kill(self, number: int) -> None:
        """A process is about to be ended by us: look at it while it is there."""
        self._states[number] = self._state_of(number)

    def how_it_ended(self, exit: Exit, hung: str = "") -> str:
        """For people; `hung` is why it was ended by us, if it was."""
        if not hung:
            return exit.in_words() + self._of_memory(exit)
        found = _STATES.get(self._states.get(exit.rank, ""), "") if "no sign of life" in hung else ""
        return f"{hung}{f' ({found})' if found else ''} and was ended"

    def was_out_of_memory(self, exit: Exit) -> bool:
        """Whether it is likely that the kernel ended this process for want of memory."""
        return exit.signal == signal.SIGKILL and bool(self._kills())

    def _of_memory(self, exit: Exit) -> str:
        if exit.signal != signal.SIGKILL:
            return ""
        kills = self._kills()
        if kills is None:
            return " (no out-of-memory record can be read here)"
        if not kills:
            return " (no out-of-memory record)"
        ended = f"{kills} process{'es' * (kills > 1)}"
        return f" (out of memory: the kernel has ended {ended} of this control group since the run began)"

    def _kills(self) -> int | None:
        """Since the run began: what was killed before it is no evidence of anything."""
        kills = out_of_memory_kills()
        return None if kills is None else kills - (self._kills_before or 0)

    def _state_of(self, number: int) -> str:
        process = Path("/proc", str(self._pids.get(number, "")))
        try:
            # Who writes to the worker's log is the worker: on another host, this id may be anybody's.
            if os.readlink(process / "fd" / "1") != str(self._run_dir.log(number).resolve()):
                return ""
            return (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


def out_of_memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of this control group the kernel has ended for want of memory; None if nobody can tell.

    Both versions of control groups count them, in different files. Inside a container its own group may be at the root.
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
