"""What both ends of a connection share: the handshake's proof, frames, socket options, tensors as bytes.

Here: the wire format. Not here: the client's end, which blocks (`connection.py`), the server's end, which never does
(`listener.py`), and the messages (`parameter_server/messages.py`, `store.py`).

Handshake: before anything else is read, each end proves that it knows the run's secret, by an HMAC over two random
challenges, one from each end, so that a recorded handshake is useless later. Only the start of a connection is
authenticated: the traffic after it is neither encrypted nor signed. Use it on trusted networks only.

Frame: a prefix (message length, bulk length, whether the bulk lies in the shared buffer), the message, and the bulk
unless it lies in the shared buffer. Bulk moves between tensors and the socket without a copy. Prefix and message are
padded to multiples of 64 bytes: with unaligned bulk, the kernel's copies were half as fast.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

import msgspec

CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
PREFIX = struct.Struct("<IQ?51x")  # 64 bytes
HANDSHAKE_S = 10.0
MAX_BUFFERS = 64
"""Buffers in one system call; the kernel's limit is 1024."""
POLL_S = 0.2
"""How often a blocking wait checks whether to give up."""

_ALIGNMENT = 64
_encode = msgspec.msgpack.Encoder().encode


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def proof(secret: bytes, role: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """What an end in `role` (`b"worker"` or `b"server"`) sends to prove that it knows the secret."""
    return hmac.digest(secret, role + server_challenge + client_challenge, "sha256")


def frame_head(message: msgspec.Struct, bulk_bytes: int, in_buffer: bool) -> memoryview:
    """Prefix and message of a frame."""
    encoded = _encode(message)
    return memoryview(PREFIX.pack(len(encoded), bulk_bytes, in_buffer) + encoded.ljust(padded(len(encoded)), b"\0"))


def padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def set_socket_options(connection: socket.socket) -> None:
    """Send small messages at once, and notice a vanished host within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not every system has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
