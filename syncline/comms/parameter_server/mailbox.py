"""Memory between one worker and one server on the same host: what is put there need not go through a socket.

Here: making, offering and reaching it. Not here: when who may write (`client.py`: a worker does not touch it between a
request with bulk and the reply to it; the server only within that time).

Whether both are on one host is not asked but tried. The worker writes a token that nobody can guess behind the data; a
server that finds the token at the address shares the worker's memory, whatever host and container names say.
"""

from __future__ import annotations

import hmac
import os
import secrets

import torch

from syncline.comms.segment import Segment, memory_available, why_not_supported

__all__ = ["Mailbox"]

_NAME = "syncline-mailbox"
_TOKEN_BYTES = 16


class Mailbox:
    """`bytes` is the memory, as a tensor of uint8 that both ends see."""

    def __init__(self, segment: Segment, size_bytes: int) -> None:
        self._segment = segment
        self.address = segment.address
        self.bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)[:size_bytes]
        self.token = bytes(segment.memory[size_bytes : size_bytes + _TOKEN_BYTES])

    @classmethod
    def create(cls, size_bytes: int) -> Mailbox | None:
        """A new one for a server to attach to; None if this machine has no memory to share."""
        # All of it is taken at once, and a machine that is out of memory kills somebody instead of refusing.
        if why_not_supported() is not None or size_bytes > memory_available() // 2:
            return None
        try:
            segment = Segment.create(size_bytes + _TOKEN_BYTES, _NAME)
        except OSError:
            return None
        segment.memory[size_bytes : size_bytes + _TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        return cls(segment, size_bytes)

    @classmethod
    def attach(cls, address: str, token: bytes, size_bytes: int) -> Mailbox | None:
        """The one that another process made; None if it cannot be reached from here."""
        try:
            # On another host this path may be anything: look before opening.
            if not os.readlink(address.partition("#")[0]).startswith(f"/memfd:{_NAME}"):
                return None
            segment = Segment.attach(address)
        except (OSError, ValueError):
            return None
        if segment.size_bytes != size_bytes + _TOKEN_BYTES:
            return None
        mailbox = cls(segment, size_bytes)
        return mailbox if hmac.compare_digest(mailbox.token, token) else None

    def seal(self) -> None:
        """Nobody else can attach from now on."""
        self._segment.close_descriptor()
