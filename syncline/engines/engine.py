"""The interface of an engine: reserve, launch, poll, kill.

Here: the protocol and `Exit`. Not here: the engines (`local.py`, `ray.py`, `spark.py`, `attach.py`), how processes
reach each other (`network.py`), what a worker does (`workers/entry.py`), and what a failure means for a run
(`coordinator/`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.engines.network import Network
from syncline.planning.machine import Machine


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended: with an exit `code`, or by a `signal`."""

    worker_id: int
    pid: int
    code: int | None
    signal: int | None
    life: int = 0
    """Which process with this worker_id: the first has life 0, its replacement life 1."""
    reason: str = ""
    """What is known instead of a code or a signal, if the process ended on a node that is gone."""

    def describe(self) -> str:
        if self.reason:
            return self.reason
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        return f"ended with exit code {self.code}"


def signal_name(number: int) -> str:
    """A real-time signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Engine(Protocol):
    """Starts and ends worker processes."""

    def reserve(self, workers: int, report: Callable[[str], None]) -> None:
        """Acquire resources for this many workers; `report` shows the user what it waits for. Called first."""

    @property
    def network(self) -> Network:
        """Where the processes are, and where they reach the coordinator."""

    @property
    def machine(self) -> Machine:
        """What the planner needs to know about the machines."""

    def provide(self, files: RunFiles) -> None:
        """The files that workers will need; called before the first launch."""

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        """Start a process that calls `run_worker(spec)`; its output goes to `log`.

        The engine sets `LaunchSpec.host`, the address at which other workers reach the process.
        """

    def poll(self) -> list[Exit]:
        """The workers that have ended since the last call. Does not wait."""

    def problems(self) -> list[str]:
        """What went wrong with processes of the engine's own since the last call, as sentences for the user."""

    def kill(self, worker_id: int | None = None) -> None:
        """Kill all workers now, or one."""

    def close(self) -> None:
        """End everything that this engine started, and wait until it is gone."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to return."""
