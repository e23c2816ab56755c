"""A buffer that one client and one server on the same host share, so that bulk need not go through a socket.

Here: creating it and attaching to it. Not here: when each end may write (`parameter_server/client.py`: the worker does
not touch it between a request with bulk and its reply; the server only in that time).

Both ends find out by trying whether they are on one host. The client writes a random token after the data; a server
that finds the token at the address shares the client's memory, whatever host and container names say.
"""

from __future__ import annotations

import hmac
import os
import secrets

import torch

from syncline.comms.segment import Segment, memory_available, why_not_supported

_NAME = "syncline-buffer"
_TOKEN_BYTES = 16


class SharedBuffer:
    """`bytes` is the memory, as a uint8 tensor that both ends see."""

    def __init__(self, segment: Segment, size_bytes: int) -> None:
        self._segment = segment
        self.address = segment.address
        self.bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)[:size_bytes]
        self.token = bytes(segment.memory[size_bytes : size_bytes + _TOKEN_BYTES])

    @classmethod
    def create(cls, size_bytes: int) -> SharedBuffer | None:
        """A new buffer; None if this machine cannot share that much memory."""
        # The kernel reserves all of it at once, and kills a process instead of refusing when memory runs out.
        if why_not_supported() is not None or size_bytes > memory_available() // 2:
            return None
        try:
            segment = Segment.create(size_bytes + _TOKEN_BYTES, _NAME)
        except OSError:
            return None
        segment.memory[size_bytes : size_bytes + _TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        return cls(segment, size_bytes)

    @classmethod
    def attach(cls, address: str, token: bytes, size_bytes: int) -> SharedBuffer | None:
        """The buffer that another process created; None if it is not reachable from here."""
        try:
            # On another host this path may be any file: check before opening.
            if not os.readlink(address.partition("#")[0]).startswith(f"/memfd:{_NAME}"):
                return None
            segment = Segment.attach(address)
        except (OSError, ValueError):
            return None
        if segment.size_bytes != size_bytes + _TOKEN_BYTES:
            return None
        buffer = cls(segment, size_bytes)
        return buffer if hmac.compare_digest(buffer.token, token) else None

    def seal(self) -> None:
        """No other process can attach from now on."""
        self._segment.close_descriptor()
