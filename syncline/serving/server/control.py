"""Messages between the supervisor and its server processes, and the socket that carries them.

A socket pair of the type SEQPACKET keeps the boundaries of messages. One that is larger than the socket takes at once,
such as the metrics of hundreds of models, travels as a file in memory. Nothing is unpickled: both ends decode the types
below. Not here: what they do with them (`rollout.py`, `process.py`).
"""

from __future__ import annotations

import os
import select
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

_MOST_BYTES = 64 * 1024
"""The largest message that travels in the socket itself, whose buffer may be small."""
_IN_FILE = b"\xc1"
"""Stands for a message in a file: the one byte that MessagePack never begins with."""
_PATIENCE_MS = 10_000


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

    @classmethod
    def pair(cls) -> tuple[Port, Port]:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    def send(self, message: Message) -> bool:
        """False if the other end is gone, or has read nothing for a long time."""
        data = msgspec.msgpack.encode(message)
        try:
            if len(data) <= _MOST_BYTES:
                self._send(data, [])
            else:
                with os.fdopen(os.memfd_create("message"), "wb") as file:
                    file.write(data)
                    file.flush()
                    self._send(_IN_FILE, [file.fileno()])
        except (BrokenPipeError, ConnectionError, TimeoutError):
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None if the other end is gone."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _MOST_BYTES, 1)
        except ConnectionError:
            return None
        for file in files:
            with os.fdopen(file, "rb") as whole:
                whole.seek(0)
                data = whole.read()
        found: Message | None = _decoder.decode(data) if data else None
        return found

    def _send(self, data: bytes, files: list[int]) -> None:
        """Wait if the buffer is full, also on a socket that does not block."""
        while True:
            try:
                socket.send_fds(self.socket, [data], files)
                return
            except BlockingIOError:
                writable = select.poll()
                writable.register(self.socket, select.POLLOUT)
                if not writable.poll(_PATIENCE_MS):
                    raise TimeoutError from None

    def close(self) -> None:
        self.socket.close()
