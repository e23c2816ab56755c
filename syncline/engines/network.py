"""How the processes of a run reach each other: the hosts and their addresses.

Here: `Network`, which an engine provides. Not here: what is sent (`comms/`), which host a process runs on and why (the
engine), and emulated networks (`lab/namespaces.py`).

An address is one that other processes can connect to, and that the process itself can listen on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A host for processes."""

    name: str
    """As the plan calls it. Processes on hosts of different names share no memory."""
    address: str
    namespace: int | None = None
    """A descriptor of the network namespace that its processes enter, if the host is emulated on this machine."""


@dataclass(frozen=True)
class Network:
    """Where the processes of a run are."""

    driver: str
    """The address of the coordinator."""
    hosts: tuple[Host, ...]
    together: int = 1
    """So many processes that follow each other are on the same host: the workers of a replica, which share memory."""

    def host_of(self, worker_id: int) -> Host:
        """The host of this process. Processes are assigned to hosts in turn; a replacement runs on the same host.

        >>> Network("10.0.0.1", (Host("a", "10.0.0.2"), Host("b", "10.0.0.3"))).host_of(2).name
        'a'
        >>> Network("10.0.0.1", (Host("a", "10.0.0.2"), Host("b", "10.0.0.3")), together=2).host_of(2).name
        'b'
        """
        return self.hosts[worker_id // self.together % len(self.hosts)]


LOOPBACK = Network("127.0.0.1", (Host("", "127.0.0.1"),))
"""This machine alone; the planner knows its name."""
