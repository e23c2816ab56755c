"""How the processes of a run reach each other: which hosts there are, and at which addresses.

Here: `Network`, which an engine has and the coordinator listens by. Not here: what is sent (`comms/`), which of its
processes a host gets and why (the engine), and making a network to try things on (`testing/namespaces.py`).

An address is one that the others can connect to, and that the process itself can listen at.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOOPBACK", "Host", "Network"]


@dataclass(frozen=True)
class Host:
    """A place for processes."""

    name: str
    """As the plan calls it. Processes on hosts of different names share no memory."""
    address: str
    namespace: int | None = None
    """A descriptor of the network namespace that its processes enter, where a host is only a part of this machine."""


@dataclass(frozen=True)
class Network:
    """Where the processes of a run are."""

    driver: str
    """The address of the coordinator."""
    hosts: tuple[Host, ...]

    def host_of(self, number: int) -> Host:
        """Where the process with this number is: they are dealt out in turn, and a replacement goes to the same place.

        >>> Network("10.0.0.1", (Host("a", "10.0.0.2"), Host("b", "10.0.0.3"))).host_of(2).name
        'a'
        """
        return self.hosts[number % len(self.hosts)]


LOOPBACK = Network("127.0.0.1", (Host("", "127.0.0.1"),))
"""One machine that speaks to itself only; its name is known to the planner."""
