"""The server's end of authenticated connections. Nothing here blocks.

Here: `Listener`, which accepts connections and holds them until they have authenticated, and `ServerConnection`, one
of them. torch is imported with the first bulk: the driver hosts a store (`store_host.py`), and does without torch. Not
here: the wire format (`framing.py`), the client's end (`connection.py`), and the loops around them
(`parameter_server/server.py`, `store_host.py`).
"""

from __future__ import annotations

import errno
import hmac
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from syncline.comms.framing import (
    CHALLENGE_BYTES,
    HANDSHAKE_S,
    MAX_BUFFERS,
    PREFIX,
    PROOF_BYTES,
    frame_head,
    new_challenge,
    padded,
    proof,
    set_socket_options,
)

if TYPE_CHECKING:
    from torch import Tensor

    from syncline.comms.shared_buffer import SharedBuffer

Message = TypeVar("Message")
"""What the client sends."""

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_BACKLOG = 1024  # with a full queue, a worker's connection attempt waits for a second or more before it is retried
_ACCEPT_BATCH = 64  # connections accepted before the existing ones are served again
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Disconnected(Exception):
    """This connection is over: the client closed it, or sent what the server does not accept."""


class Frame(NamedTuple, Generic[Message]):
    """A message and its bulk, which stays valid until the next frame of that connection is read."""

    message: Message
    bulk: Tensor


def listen(host: str) -> socket.socket:
    """A listening socket on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


class ServerConnection(Generic[Message]):
    """One connection to a client.

    `read` returns complete frames. `send` queues: what does not fit into the kernel's buffers leaves with later calls
    of `flush`. Tensors are sent without a copy: call `copy_pending` before changing them.
    """

    def __init__(self, connection: socket.socket, secret: bytes, decode: Callable[[memoryview], Message]) -> None:
        connection.setblocking(False)
        set_socket_options(connection)
        self.socket = connection
        self.shared_buffer: SharedBuffer | None = None
        self.is_authenticated = False
        self.deadline: float | None = time.monotonic() + HANDSHAKE_S
        """When an unauthenticated connection is dropped."""
        self._secret, self._decode = secret, decode
        self._challenge = new_challenge()
        # Unsent data, and whether its memory may change before it is sent.
        self._out: deque[tuple[memoryview, bool]] = deque([(memoryview(self._challenge), False)])
        self._small = bytearray(CHALLENGE_BYTES + PROOF_BYTES)
        self._target = memoryview(self._small)
        self._filled = 0
        self._stage = "proof"
        self._bulk: Tensor | None = None
        self._length, self._bulk_size, self._in_buffer = 0, 0, False
        self._message: Message | None = None

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_more_to_send(self) -> bool:
        """Whether to call `flush` when the socket becomes writable."""
        return bool(self._out)

    def authenticate(self) -> bool:
        """Whether the client has proved that it knows the secret. `Disconnected` if its proof is wrong."""
        if not self.is_authenticated and self._fill():
            theirs, answer = bytes(self._target[:CHALLENGE_BYTES]), bytes(self._target[CHALLENGE_BYTES:])
            if not hmac.compare_digest(answer, proof(self._secret, b"worker", self._challenge, theirs)):
                raise Disconnected("does not know the secret")
            self.is_authenticated, self.deadline = True, None
            self._out.append((memoryview(proof(self._secret, b"server", self._challenge, theirs)), False))
            self.flush()
            self._expect("prefix", memoryview(bytearray(PREFIX.size)))
        return self.is_authenticated

    def read(self) -> Frame[Message] | None:
        """The next frame, or None if it is not complete yet."""
        message = self.read_message()
        if message is None:
            return None
        source = self.shared_buffer.bytes if self._in_buffer and self.shared_buffer is not None else self._bulk
        return Frame(message, (_new_bulk(0) if source is None else source)[: self._bulk_size])

    def read_message(self) -> Message | None:
        """The next frame's message without its bulk, or None if it is not complete yet."""
        while self.authenticate() and self._fill():
            if self._advance():
                message, self._message = self._message, None
                assert message is not None
                return message
        return None

    def send(self, message: msgspec.Struct, bulk: Sequence[Tensor] = (), *, may_change: bool = False) -> None:
        """Queue a message; `may_change` says that the bulk's memory changes later (see `copy_pending`)."""
        size = sum(t.nbytes for t in bulk)
        if bulk:
            from syncline.comms.serialize import as_bytes, as_memory
        buffer = self.shared_buffer
        in_buffer = buffer is not None and 0 < size <= buffer.bytes.numel()
        prefix = frame_head(message, size, in_buffer)
        self._out.append((prefix, False))
        if in_buffer:
            assert buffer is not None
            start = 0
            for tensor in bulk:
                if tensor.data_ptr() != buffer.bytes.data_ptr() + start:
                    buffer.bytes[start : start + tensor.nbytes].copy_(as_bytes(tensor))
                start += tensor.nbytes
        else:
            self._out.extend((as_memory(t), may_change) for t in bulk if t.numel())
        self.flush()

    def flush(self) -> None:
        """Send as much as the kernel takes now."""
        while self._out:
            try:
                count = self.socket.sendmsg([memory for memory, _ in itertools.islice(self._out, MAX_BUFFERS)])
            except BlockingIOError:
                return
            except OSError as error:
                raise Disconnected(str(error)) from None
            while self._out and count >= len(self._out[0][0]):
                count -= len(self._out.popleft()[0])
            if count:  # the rest when there is room for much of it, see `ClientConnection._send`
                memory, may_change = self._out[0]
                self._out[0] = memory[count:], may_change
                return

    def copy_pending(self) -> None:
        """Copy unsent data whose memory is about to change."""
        for index, (memory, may_change) in enumerate(self._out):
            if may_change:
                self._out[index] = memoryview(bytes(memory)), False

    def close(self) -> None:
        self.socket.close()
        self.shared_buffer = None

    def _expect(self, stage: str, target: memoryview) -> None:
        self._stage, self._target, self._filled = stage, target, 0

    def _fill(self) -> bool:
        """Whether the data expected next has arrived."""
        while self._filled < len(self._target):
            try:
                count = self.socket.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise Disconnected(str(error)) from None
            if count == 0:
                raise Disconnected("closed by the client")
            self._filled += count
        return True

    def _advance(self) -> bool:
        """The expected data has arrived: decide what to expect next. True if a frame is complete."""
        if self._stage == "prefix":
            length, self._bulk_size, self._in_buffer = PREFIX.unpack(self._target)
            if length > _MAX_MESSAGE_BYTES:
                raise Disconnected(f"announced a message of {length} bytes")
            self._length = length
            self._expect("message", memoryview(bytearray(padded(length))))
            return False
        if self._stage == "message":
            try:
                self._message = self._decode(self._target[: self._length])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise Disconnected(f"sent an invalid message: {error}") from None
            if self._in_buffer:
                if self.shared_buffer is None or self._bulk_size > self.shared_buffer.bytes.numel():
                    raise Disconnected("refers to a shared buffer that it has not offered")
            elif self._bulk_size:
                from syncline.comms.serialize import as_memory

                if self._bulk is None or self._bulk.numel() < self._bulk_size:
                    try:
                        self._bulk = _new_bulk(self._bulk_size)
                    except (RuntimeError, TypeError) as error:  # out of memory, or more than an int64
                        raise Disconnected(f"announced {self._bulk_size} bytes: {error}") from None
                self._expect("bulk", as_memory(self._bulk[: self._bulk_size]))
                return False
        self._expect("prefix", memoryview(bytearray(PREFIX.size)))
        return True


def _new_bulk(size: int) -> Tensor:
    import torch

    return torch.empty(size, dtype=torch.uint8)


class Listener(Generic[Message]):
    """A listening socket, and its connections that have not authenticated yet.

    Such a connection costs a descriptor and a few hundred bytes, for ten seconds at most. There are never more than
    `max_unauthenticated` of them: a new one replaces the oldest, because workers authenticate at once. The selector's
    data is this object for the listening socket, and the `ServerConnection` for each connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        decode: Callable[[memoryview], Message],
        selector: selectors.BaseSelector,
        *,
        max_unauthenticated: int = 256,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._selector = listener, selector
        self._secret, self._decode, self._max = secret, decode, max_unauthenticated
        self._unauthenticated: dict[ServerConnection[Message], None] = {}  # oldest first
        self._is_open = False
        self.maintain()

    def accept(self) -> None:
        """Accept some pending connections. Out of descriptors or memory, it stops until the next `maintain`."""
        for _ in range(_ACCEPT_BATCH):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES and not self._drop_oldest():
                    # Pending connections would make the selector return at once, again and again.
                    self._selector.unregister(self._listener)
                    self._is_open = False
                    return
                continue  # there is room now, or the client gave up
            if len(self._unauthenticated) >= self._max:
                self._drop_oldest()
            try:
                connection = ServerConnection(accepted, self._secret, self._decode)
                connection.flush()
                self._selector.register(connection, selectors.EVENT_READ, connection)
            except (OSError, Disconnected):
                accepted.close()
                continue
            self._unauthenticated[connection] = None

    def admit(self, connection: ServerConnection[Message]) -> bool:
        """Read from an unauthenticated connection. True once it has authenticated: then the caller owns it."""
        try:
            if connection not in self._unauthenticated or not connection.authenticate():
                return False
        except Disconnected:
            self._drop(connection)
            return False
        del self._unauthenticated[connection]
        return True

    def maintain(self) -> None:
        """Drop connections past their deadline, and accept again if `accept` stopped. Call it a few times a second."""
        now = time.monotonic()
        for connection in [p for p in self._unauthenticated if p.deadline is not None and p.deadline < now]:
            self._drop(connection)
        if not self._is_open:
            self._selector.register(self._listener, selectors.EVENT_READ, self)
            self._is_open = True

    def close(self) -> None:
        """Drop unauthenticated connections. The caller closes the listening socket."""
        for connection in list(self._unauthenticated):
            self._drop(connection)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._unauthenticated), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: ServerConnection[Message]) -> None:
        del self._unauthenticated[connection]
        self._selector.unregister(connection)
        connection.close()
