"""`Traffic`: what a method's workers send each other, for predicting how long that takes.

Here: the declaration, as data: who sends how much to whom, how often, and who waits for whom. A method makes it in
`Method.traffic`, beside the other facts that it declares. Not here: what it costs on a network (`planning/cost/`), and
sending anything (`comms/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.strategies.how import Exact, How

__all__ = ["Pattern", "Traffic", "Waits"]

Pattern = Literal["all-reduce", "all-gather", "peers", "servers", "broadcast"]
"""How bytes travel.

all-reduce   every member contributes a buffer, and all get the sum
all-gather   every member gets every other's buffer
peers        a member sends its buffer to `receivers` others, and gets as many
servers      a member pushes a buffer to the servers, and pulls `received_bytes` from them
broadcast    one member's buffer goes to all others
"""
Waits = Literal["all", "peers", "bound", "nobody"]
"""Whom a worker waits for: all members, those it exchanges with, the slowest beyond a bound, or nobody."""

_EXACT = Exact()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of exchange of a method; a method may have several."""

    pattern: Pattern
    sent_bytes: float
    """What a member sends in one exchange, as `Method.bytes_per_step` counts it."""
    received_bytes: float = 0.0
    """From servers."""
    every: float = 1.0
    """Steps from one exchange to the next."""
    waits: Waits = "all"
    bound: int = 0
    """For `bound`: by how many steps a worker may be ahead of the slowest."""
    members: int | None = None
    """How many take part in one such exchange; None: all workers. Groups of members exchange at the same time."""
    place: Literal["everywhere", "inside-host", "across-hosts"] = "everywhere"
    """Which links it uses: those inside a host, those between hosts, or whatever lies between two workers."""
    senders: float = 1.0
    """The part of the workers that send; the others wait for the result, or have nothing to send."""
    receivers: float = 1.0
    """For `peers`: to how many others a member sends the buffer; `sent_bytes` counts it once for each."""
    shards: int = 1
    """For `servers`: how many there are."""
    encoding: How = _EXACT
    """How the buffer is encoded, which takes time."""
    is_hidden: bool = False
    """Whether it happens while the worker computes, so that it costs time only if it takes longer than that."""
    scored_models: int = 0
    """How many models a worker scores on its part of the held-out data after an exchange."""

    @property
    def bytes_per_step(self) -> float:
        """What a worker sends in a step, as a mean over steps and workers."""
        return self.sent_bytes * self.senders / self.every
