"""The client's end of an authenticated connection: it sends requests and blocks until replies arrive.

Here: `ClientConnection`. Not here: the wire format (`framing.py`), the server's end (`listener.py`), the messages
(`parameter_server/messages.py`, `store.py`).
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
from torch import Tensor

from syncline.comms.framing import (
    CHALLENGE_BYTES,
    HANDSHAKE_S,
    MAX_BUFFERS,
    POLL_S,
    PREFIX,
    PROOF_BYTES,
    frame_head,
    new_challenge,
    padded,
    proof,
    set_socket_options,
)
from syncline.comms.serialize import as_bytes, as_memory
from syncline.comms.shared_buffer import SharedBuffer
from syncline.errors import PeerFailed

Message = TypeVar("Message")
"""What the server sends."""


class ClientConnection(Generic[Message]):
    """A connection to a server. Every wait ends with a reply, or with `PeerFailed`: at the timeout or `should_stop()`.

    For one thread. `what` names the server in errors.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        decode: Callable[[bytearray], Message],
        *,
        what: str,
        timeout_s: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.what = what
        self._decode = decode
        self.bytes_sent = 0
        self.bytes_received = 0
        self.shared_buffer: SharedBuffer | None = None
        self.timeout_s = timeout_s
        self._should_stop = should_stop
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout_s, HANDSHAKE_S))
        except OSError as error:
            raise PeerFailed(
                f"{what} cannot be reached: {error}. Check that its process runs.",
                code="unreachable",
                server=what,
            ) from None
        try:
            set_socket_options(self._socket)
            # The kernel's own timeout: with Python's, every few free bytes in its buffers would wake this process.
            self._socket.settimeout(None)
            interval = struct.pack("ll", 0, int(POLL_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            self._poll_room = select.poll()
            self._poll_room.register(self._socket, select.POLLOUT)
            self._authenticate(secret)
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: msgspec.Struct, bulk: Sequence[Tensor] = ()) -> None:
        """Bulk is any number of contiguous tensors, one after the other; they may be overwritten on return."""
        size = sum(t.nbytes for t in bulk)
        self.bytes_sent += size
        buffer = self.shared_buffer
        in_buffer = buffer is not None and 0 < size <= buffer.bytes.numel()
        buffers = [frame_head(message, size, in_buffer)]
        if in_buffer:
            assert buffer is not None
            start = 0
            for tensor in bulk:
                buffer.bytes[start : start + tensor.nbytes].copy_(as_bytes(tensor))
                start += tensor.nbytes
        else:
            buffers += [as_memory(t) for t in bulk if t.numel()]
        self._send(buffers)

    def receive(self) -> tuple[Message, int, bool]:
        """The next message, the size of its bulk, and whether that lies in the shared buffer. Then `take` the bulk."""
        length, size, in_buffer = PREFIX.unpack(self._read(PREFIX.size))
        self.bytes_received += size
        return self._decode(self._read(padded(length))[:length]), size, in_buffer

    def take(self, into: Sequence[Tensor], size: int, in_buffer: bool) -> None:
        """Copy the bulk of the message received last into these tensors, one after the other."""
        room = sum(t.nbytes for t in into)
        assert room == size, f"{size} bytes arrived, but {room} were expected"
        start = 0
        for tensor in into:
            if in_buffer:
                assert self.shared_buffer is not None
                as_bytes(tensor).copy_(self.shared_buffer.bytes[start : start + tensor.nbytes])
                start += tensor.nbytes
            elif tensor.numel():
                self._read_into(as_memory(tensor))

    def is_readable(self, timeout_s: float) -> bool:
        """Whether data arrives within the time."""
        return bool(self._poll.poll(max(0.0, timeout_s) * 1000))

    def interrupt(self) -> None:
        """From another thread: calls in progress and later ones raise `PeerFailed`."""
        with contextlib.suppress(OSError):  # the server has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        if self.shared_buffer is not None:
            self.shared_buffer.seal()
            self.shared_buffer = None

    def _authenticate(self, secret: bytes) -> None:
        theirs = bytes(self._read(CHALLENGE_BYTES))
        ours = new_challenge()
        self._send([memoryview(ours + proof(secret, b"worker", theirs, ours))])
        try:
            answer = bytes(self._read(PROOF_BYTES))
        except PeerFailed:
            raise PeerFailed(
                f"{self.what} closed the connection during the handshake: it does not accept this worker's secret. "
                "Its process may belong to another run.",
                code="secret-rejected",
                server=self.what,
            ) from None
        if not hmac.compare_digest(answer, proof(secret, b"server", theirs, ours)):
            raise PeerFailed(
                f"{self.what} does not know this run's secret: another program listens at its address.",
                code="impostor",
                server=self.what,
            )

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, memory: memoryview) -> None:
        done, total = 0, len(memory)
        deadline = time.monotonic() + self.timeout_s
        while done < total:
            try:
                count = self._socket.recv_into(memory[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # after POLL_S
                self._check(deadline)
                continue
            except OSError as error:
                raise PeerFailed(f"The connection to {self.what} broke: {error}.") from None
            if count == 0:
                raise PeerFailed(f"{self.what} closed the connection: its process has ended.")
            done += count
            deadline = time.monotonic() + self.timeout_s

    def _send(self, buffers: list[memoryview]) -> None:
        # Never a blocking send: it holds the socket's lock, which the kernel needs for the server's acknowledgements.
        # And never a send before poll has reported room: it would find a little, and split the rest into small packets.
        # Either makes bulk transfers take half as long again.
        deadline = time.monotonic() + self.timeout_s
        while buffers:
            if not self._poll_room.poll(POLL_S * 1000):
                self._check(deadline)
                continue
            try:
                count = self._socket.sendmsg(buffers[:MAX_BUFFERS], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerFailed(f"The connection to {self.what} broke: {error}. Its process may have ended.") from None
            deadline = time.monotonic() + self.timeout_s
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]

    def _check(self, deadline: float) -> None:
        if self._should_stop():
            raise PeerFailed(
                f"The run was aborted while this worker waited for {self.what}.", code="aborted", server=self.what
            )
        if time.monotonic() > deadline:
            raise PeerFailed(
                f"{self.what} did not respond within {self.timeout_s:g} s.",
                code="timeout",
                server=self.what,
                timeout_s=self.timeout_s,
            )
