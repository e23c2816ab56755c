"""What an engine does: gather places, launch, poll, stop.

Here: the protocol and `Exit`. Not here: the engines (`local.py`, `ray.py`, `spark.py`, `attach.py`), how processes
reach each other (`network.py`), what a worker does once it runs (`workers/entry.py`), and what a death means for a run
(`coordinator/`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from syncline.comms.control import RunFiles, Ticket
from syncline.engines.network import Network
from syncline.plan.machine import Machine

__all__ = ["Engine", "Exit"]


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended: with a `code`, or by a `signal`."""

    rank: int
    pid: int
    code: int | None
    signal: int | None
    life: int = 0
    """Which of the processes that had this rank in turn."""
    reason: str = ""
    """What is known instead of a code and a signal, where the process ended out of sight."""

    def in_words(self) -> str:
        """For people."""
        if self.reason:
            return self.reason
        if self.signal is not None:
            return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.code}"


class Engine(Protocol):
    """Processes for workers."""

    def gather(self, workers: int, tell: Callable[[str], None]) -> None:
        """Have places ready for so many workers; `tell` the user what is waited for. Before anything else."""

    @property
    def network(self) -> Network:
        """Where the processes are, and where they find the coordinator."""

    @property
    def machine(self) -> Machine:
        """What a plan needs to know of the places."""

    def provide(self, files: RunFiles) -> None:
        """These are the files that workers will need; before the first is launched."""

    def launch(self, ticket: Ticket, log: Path) -> None:
        """Start a process that calls `run_worker(ticket)`; what it prints goes to `log`.

        The engine writes into the ticket at which address the others reach the process: `Ticket.host`.
        """

    def poll(self) -> list[Exit]:
        """The workers that have ended since the last call. Does not wait."""

    def kill(self, rank: int | None = None) -> None:
        """End all workers now, or the one of this rank."""

    def close(self) -> None:
        """End everything this engine started, and wait until it is gone."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to tell."""
