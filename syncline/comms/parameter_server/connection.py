"""Connections between workers and those who serve them: who may speak, frames, limits.

Here: the handshake; `Caller` and `Link`, a worker's end, which waits; `Peer`, a server's end, which never does; `Door`,
where strangers stay until they have proved to be none. Not here: what is said (`messages.py`, `comms/store.py`) and
what follows from it (`client.py`, `server.py`).

Handshake: before anything else is read, each end proves that it knows the run's secret by an HMAC over two random
challenges, one of each end, so that what was recorded proves nothing the next time. Only the beginning is proved: what
follows is neither encrypted nor signed, so it is for networks whose wires are trusted.

Frame: a prefix (length of the message, length of the bulk, whether the bulk lies in the mailbox), the message, and the
bulk unless it lies in the mailbox. Bulk goes from and to the memory of tensors without a copy in between. Prefix and
message are filled up to multiples of 64 bytes: where the bulk began at odd places, the kernel's copies were half as
fast.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import secrets
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from syncline.comms.parameter_server.mailbox import Mailbox
from syncline.comms.parameter_server.messages import FromServer, decode_from_server, encode
from syncline.errors import PeerLost

__all__ = ["Caller", "Door", "Frame", "Link", "Peer", "PeerGone", "as_memory", "listen"]

Message = TypeVar("Message")
"""What the other end says."""

_CHALLENGE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_ALIGNMENT = 64
_PREFIX = struct.Struct("<IQ?51x")  # 64 bytes
_LONGEST_MESSAGE = 64 * 1024 * 1024
_SLICE_S = 0.2  # how often a wait looks whether it should be given up
_HANDSHAKE_S = 10.0
_MOST_BUFFERS = 64  # in one system call; the kernel takes 1024
_BACKLOG = 1024  # a queue that is full makes an honest worker wait for a second at least, until it knocks again
_AT_ONCE = 64  # taken from the queue before those who came earlier are attended to
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class PeerGone(Exception):
    """The other end of a `Peer` has closed, or has no business here."""


class Frame(NamedTuple, Generic[Message]):
    """A message and its bulk, which stays as it is until the next frame of that connection is read."""

    message: Message
    bulk: Tensor


def as_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()  # NumPy's types do not say that it has a buffer
    return memoryview(array)


def listen(host: str) -> socket.socket:
    """A listening socket on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


class Caller(Generic[Message]):
    """The end that asks. Every wait ends with an answer, with `PeerLost`, or because of `should_stop`.

    For one thread. `what` names the other end in errors.
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
        self.mailbox: Mailbox | None = None
        self.timeout_s = timeout_s
        self._should_stop = should_stop
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout_s, _HANDSHAKE_S))
        except OSError as error:
            raise PeerLost(f"{what} cannot be reached: {error}. Is its server running?") from None
        try:
            _tune(self._socket)
            # The kernel's own limits: with Python's, every few free bytes in its buffers would wake this process.
            self._socket.settimeout(None)
            slice_ = struct.pack("ll", 0, int(_SLICE_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            self._poll_room = select.poll()
            self._poll_room.register(self._socket, select.POLLOUT)
            self._prove(secret)
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: msgspec.Struct, bulk: Sequence[Tensor] = ()) -> None:
        """Bulk is any number of contiguous tensors, one behind the other; all is handed over on return."""
        size = sum(t.nbytes for t in bulk)
        self.bytes_sent += size
        box = self.mailbox
        in_mailbox = box is not None and 0 < size <= box.bytes.numel()
        buffers = [_head(message, size, in_mailbox)]
        if in_mailbox:
            assert box is not None
            start = 0
            for tensor in bulk:
                box.bytes[start : start + tensor.nbytes].copy_(tensor.detach().view(-1).view(torch.uint8))
                start += tensor.nbytes
        else:
            buffers += [as_memory(t) for t in bulk if t.numel()]
        self._send(buffers)

    def receive(self) -> tuple[Message, int, bool]:
        """The next message, how much bulk it has, and whether that lies in the mailbox. Then `take` the bulk."""
        length, size, in_mailbox = _PREFIX.unpack(self._read(_PREFIX.size))
        self.bytes_received += size
        return self._decode(self._read(_padded(length))[:length]), size, in_mailbox

    def take(self, into: Sequence[Tensor], size: int, in_mailbox: bool) -> None:
        """Write the bulk of the message that was just received into these tensors, one behind the other."""
        room = sum(t.nbytes for t in into)
        assert room == size, f"{size} bytes came, but {room} were expected"
        start = 0
        for tensor in into:
            if in_mailbox:
                assert self.mailbox is not None
                tensor.view(-1).view(torch.uint8).copy_(self.mailbox.bytes[start : start + tensor.nbytes])
                start += tensor.nbytes
            elif tensor.numel():
                self._read_into(as_memory(tensor))

    def is_readable(self, timeout_s: float) -> bool:
        """Whether something comes within the time; never waits beyond it."""
        return bool(self._poll.poll(max(0.0, timeout_s) * 1000))

    def interrupt(self) -> None:
        """From another thread: whoever waits here gets `PeerLost`, now and later."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection and the mailbox."""
        self._socket.close()
        if self.mailbox is not None:
            self.mailbox.seal()
            self.mailbox = None

    def _prove(self, secret: bytes) -> None:
        theirs = bytes(self._read(_CHALLENGE_BYTES))
        ours = secrets.token_bytes(_CHALLENGE_BYTES)
        self._send([memoryview(ours + _proof(secret, b"worker", theirs, ours))])
        try:
            answer = bytes(self._read(_PROOF_BYTES))
        except PeerLost:
            raise PeerLost(
                f"{self.what} closed the connection during the handshake. It belongs to another run, or its secret is "
                "not the one this worker was given."
            ) from None
        if not hmac.compare_digest(answer, _proof(secret, b"server", theirs, ours)):
            raise PeerLost(f"{self.what} does not know this run's secret; something else listens at its address.")

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
            except BlockingIOError:  # the slice is over
                self._check(deadline)
                continue
            except OSError as error:
                raise PeerLost(f"The connection to {self.what} broke: {error}.") from None
            if count == 0:
                raise PeerLost(f"{self.what} closed the connection: its server has ended.")
            done += count
            deadline = time.monotonic() + self.timeout_s

    def _send(self, buffers: list[memoryview]) -> None:
        # Not a send that waits: while it does, it holds what the other end's acknowledgements need. And never one that
        # was not told that there is room: it would find a little, and send small pieces from then on. Either makes bulk
        # take half as long again.
        deadline = time.monotonic() + self.timeout_s
        while buffers:
            if not self._poll_room.poll(_SLICE_S * 1000):
                self._check(deadline)
                continue
            try:
                count = self._socket.sendmsg(buffers[:_MOST_BUFFERS], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLost(f"The connection to {self.what} broke: {error}. Its server may have ended.") from None
            deadline = time.monotonic() + self.timeout_s
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]

    def _check(self, deadline: float) -> None:
        if self._should_stop():
            raise PeerLost(f"The run was aborted while this worker waited for {self.what}.")
        if time.monotonic() > deadline:
            raise PeerLost(f"{self.what} gave no sign of life within {self.timeout_s:g} s.")


class Link(Caller[FromServer]):
    """A worker's connection to one shard."""

    def __init__(
        self, address: str, secret: bytes, *, what: str, timeout_s: float, should_stop: Callable[[], bool]
    ) -> None:
        super().__init__(address, secret, decode_from_server, what=what, timeout_s=timeout_s, should_stop=should_stop)


class Peer(Generic[Message]):
    """A server's end of one connection; nothing here waits.

    `read` brings frames as they are complete. `send` queues; what does not fit into the kernel's buffers at once leaves
    with later calls of `flush`. Parameters are sent from where they lie: call `keep_promises` before changing them.
    """

    def __init__(self, connection: socket.socket, secret: bytes, decode: Callable[[memoryview], Message]) -> None:
        connection.setblocking(False)
        _tune(connection)
        self.socket = connection
        self.mailbox: Mailbox | None = None
        self.is_known = False
        self.deadline: float | None = time.monotonic() + _HANDSHAKE_S
        """Until when it must have proved that it belongs here."""
        self._secret, self._decode = secret, decode
        self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        # What is to be sent, and whether it shows memory that may change before it has left.
        self._out: deque[tuple[memoryview, bool]] = deque([(memoryview(self._challenge), False)])
        self._small = bytearray(_CHALLENGE_BYTES + _PROOF_BYTES)
        self._target = memoryview(self._small)
        self._filled = 0
        self._stage = "proof"
        self._bulk = torch.empty(0, dtype=torch.uint8)
        self._length, self._bulk_size, self._in_mailbox = 0, 0, False
        self._message: Message | None = None

    def fileno(self) -> int:
        """For a selector."""
        return self.socket.fileno()

    @property
    def has_more_to_send(self) -> bool:
        """Whether `flush` should be called when the socket can be written to."""
        return bool(self._out)

    def prove(self) -> bool:
        """Whether it has proved by now that it knows the secret. `PeerGone` if it does not. Reads nothing beyond."""
        if not self.is_known and self._fill():
            theirs, proof = bytes(self._target[:_CHALLENGE_BYTES]), bytes(self._target[_CHALLENGE_BYTES:])
            if not hmac.compare_digest(proof, _proof(self._secret, b"worker", self._challenge, theirs)):
                raise PeerGone("does not know the secret")
            self.is_known, self.deadline = True, None
            self._out.append((memoryview(_proof(self._secret, b"server", self._challenge, theirs)), False))
            self.flush()
            self._expect("prefix", memoryview(bytearray(_PREFIX.size)))
        return self.is_known

    def read(self) -> Frame[Message] | None:
        """The next complete frame, or None if there is none yet. `PeerGone` if there will be none."""
        while self.prove() and self._fill():
            if self._advance():
                message, self._message = self._message, None
                assert message is not None
                source = self.mailbox.bytes if self._in_mailbox and self.mailbox is not None else self._bulk
                return Frame(message, source[: self._bulk_size])
        return None

    def send(self, message: msgspec.Struct, bulk: Sequence[Tensor] = (), *, may_change: bool = False) -> None:
        """Queue a message; `may_change` says that the bulk is memory which changes later (see `keep_promises`)."""
        size = sum(t.nbytes for t in bulk)
        box = self.mailbox
        in_mailbox = box is not None and 0 < size <= box.bytes.numel()
        prefix = _head(message, size, in_mailbox)
        self._out.append((prefix, False))
        if in_mailbox:
            assert box is not None
            start = 0
            for tensor in bulk:
                if tensor.data_ptr() != box.bytes.data_ptr() + start:
                    box.bytes[start : start + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
                start += tensor.nbytes
        else:
            self._out.extend((as_memory(t), may_change) for t in bulk if t.numel())
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes now. `PeerGone` if the other end is."""
        while self._out:
            try:
                count = self.socket.sendmsg([memory for memory, _ in itertools.islice(self._out, _MOST_BUFFERS)])
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(str(error)) from None
            while self._out and count >= len(self._out[0][0]):
                count -= len(self._out.popleft()[0])
            if count:  # the rest when there is room for much of it, see `Link._send`
                memory, may_change = self._out[0]
                self._out[0] = memory[count:], may_change
                return

    def keep_promises(self) -> None:
        """Copy what is still to be sent of memory that is about to change."""
        for index, (memory, may_change) in enumerate(self._out):
            if may_change:
                self._out[index] = memoryview(bytes(memory)), False

    def close(self) -> None:
        """Let go of the connection and the mailbox."""
        self.socket.close()
        self.mailbox = None

    def _expect(self, stage: str, target: memoryview) -> None:
        self._stage, self._target, self._filled = stage, target, 0

    def _fill(self) -> bool:
        """Whether all that is awaited is there."""
        while self._filled < len(self._target):
            try:
                count = self.socket.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise PeerGone(str(error)) from None
            if count == 0:
                raise PeerGone("closed")
            self._filled += count
        return True

    def _advance(self) -> bool:
        """What was awaited is there: find out what comes next. True if a frame is complete."""
        if self._stage == "prefix":
            length, self._bulk_size, self._in_mailbox = _PREFIX.unpack(self._target)
            if length > _LONGEST_MESSAGE:
                raise PeerGone(f"announced a message of {length} bytes")
            self._length = length
            self._expect("message", memoryview(bytearray(_padded(length))))
            return False
        if self._stage == "message":
            try:
                self._message = self._decode(self._target[: self._length])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise PeerGone(f"sent a message that makes no sense: {error}") from None
            if self._in_mailbox:
                if self.mailbox is None or self._bulk_size > self.mailbox.bytes.numel():
                    raise PeerGone("names a mailbox that is not there")
            elif self._bulk_size:
                if self._bulk.numel() < self._bulk_size:
                    try:
                        self._bulk = torch.empty(self._bulk_size, dtype=torch.uint8)
                    except (RuntimeError, TypeError) as error:  # more than there is, more than can be counted
                        raise PeerGone(f"announced {self._bulk_size} bytes: {error}") from None
                self._expect("bulk", as_memory(self._bulk[: self._bulk_size]))
                return False
        self._expect("prefix", memoryview(bytearray(_PREFIX.size)))
        return True


class Door(Generic[Message]):
    """A listening socket, and those who came through it and have not proved yet that they belong here.

    A stranger costs a descriptor and a few hundred bytes, for ten seconds at most. There are never more than `room` of
    them: who has been here longest makes room for the next, because an honest worker proves itself at once. The door is
    registered with the selector as the data of the listener, and each `Peer` as the data of its own connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        decode: Callable[[memoryview], Message],
        selector: selectors.BaseSelector,
        *,
        room: int = 256,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._selector = listener, selector
        self._secret, self._decode, self._room = secret, decode, room
        self._strangers: dict[Peer[Message], None] = {}  # in the order of coming
        self._is_open = False
        self.tend()

    def accept(self) -> None:
        """Take some of those who wait outside. Out of descriptors or memory, it takes nobody until the next `tend`."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM and not self._drop_oldest():
                    # Whoever waits outside makes the selector return at once, again and again.
                    self._selector.unregister(self._listener)
                    self._is_open = False
                    return
                continue  # there is room now, or it was gone before it was taken
            if len(self._strangers) >= self._room:
                self._drop_oldest()
            try:
                peer = Peer(connection, self._secret, self._decode)
                peer.flush()
                self._selector.register(peer, selectors.EVENT_READ, peer)
            except (OSError, PeerGone):
                connection.close()
                continue
            self._strangers[peer] = None

    def admit(self, peer: Peer[Message]) -> bool:
        """Hear what a stranger has to say. True if it is none: from now on the caller looks after it."""
        try:
            if peer not in self._strangers or not peer.prove():
                return False
        except PeerGone:
            self._drop(peer)
            return False
        del self._strangers[peer]
        return True

    def tend(self) -> None:
        """Send away who takes too long, and open again. To be called several times a second."""
        now = time.monotonic()
        for peer in [p for p in self._strangers if p.deadline is not None and p.deadline < now]:
            self._drop(peer)
        if not self._is_open:
            self._selector.register(self._listener, selectors.EVENT_READ, self)
            self._is_open = True

    def close(self) -> None:
        """Send the strangers away. The listener is the caller's."""
        for peer in list(self._strangers):
            self._drop(peer)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, peer: Peer[Message]) -> None:
        del self._strangers[peer]
        self._selector.unregister(peer)
        peer.close()


def _tune(connection: socket.socket) -> None:
    """Small messages leave at once, and a host that is gone without a word is noticed within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not every system has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _head(message: msgspec.Struct, size: int, in_mailbox: bool) -> memoryview:
    """Prefix and message of a frame with `size` bytes of bulk."""
    encoded = encode(message)
    return memoryview(_PREFIX.pack(len(encoded), size, in_mailbox) + encoded.ljust(_padded(len(encoded)), b"\0"))


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _proof(secret: bytes, role: bytes, server_challenge: bytes, worker_challenge: bytes) -> bytes:
    return hmac.digest(secret, role + server_challenge + worker_challenge, "sha256")
