"""Messages between the supervisor and its server processes, and the socket that carries them.

A socket pair of the type SEQPACKET keeps the boundaries of messages. Nothing is unpickled: both ends decode the types
below. Not here: what they do with them (`rollout.py`, `process.py`).
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from syncline.serving.server.catalog import Catalog

__all__ = [
    "Apply",
    "ChangeRequest",
    "CollectMetrics",
    "Done",
    "Lines",
    "Message",
    "MetricsRequest",
    "Port",
    "Prepare",
    "Prepared",
    "ProcessReady",
    "Text",
]

_MOST_BYTES = 4 * 2**20


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: load what this catalog needs, and keep serving what you serve."""

    catalog: Catalog


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: serve this catalog from now on."""

    catalog: Catalog


class CollectMetrics(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: send your metrics."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: the change that you asked for is made everywhere, or not, for this reason."""

    number: int
    error: str | None = None


class Text(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: the metrics of all processes, which you asked for."""

    number: int
    text: str


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    """Process: serving this generation of the catalog."""

    generation: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Process: this generation is loaded, or cannot be."""

    generation: int
    error: str | None = None


class ChangeRequest(msgspec.Struct, frozen=True, tag=True):
    """Process: a client, or a canary that does worse, asks for a change."""

    number: int
    action: str
    """`load`, `unload` or `roll-back`."""
    model: str
    version: str = ""
    reason: str = ""


class Lines(msgspec.Struct, frozen=True, tag=True):
    """Process: my metrics."""

    number: int
    lines: list[str]


class MetricsRequest(msgspec.Struct, frozen=True, tag=True):
    """Process: a client asks for the metrics of all processes."""

    number: int


Message = (
    Prepare | Apply | CollectMetrics | Done | Text | ProcessReady | Prepared | ChangeRequest | Lines | MetricsRequest
)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


class Port:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)

    @classmethod
    def pair(cls) -> tuple[Port, Port]:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    def send(self, message: Message) -> bool:
        """False if the other end is gone."""
        try:
            self.socket.send(msgspec.msgpack.encode(message))
        except (BrokenPipeError, ConnectionError):
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None if the other end is gone."""
        try:
            data = self.socket.recv(_MOST_BYTES)
        except ConnectionError:
            return None
        found: Message | None = _decoder.decode(data) if data else None
        return found

    def close(self) -> None:
        self.socket.close()
