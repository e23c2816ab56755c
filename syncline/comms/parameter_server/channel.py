"""A worker's channel to one shard: the connection, and the requests on it that wait for a reply.

Here: `Channel`, and `Connector`, which opens channels. Not here: what is requested (`client.py`), frames and timeouts
(`comms/connection.py`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.comms.connection import ClientConnection
from syncline.comms.parameter_server import messages as m
from syncline.comms.shared_buffer import SharedBuffer
from syncline.errors import PeerFailed, SynclineError


@dataclass(kw_only=True)
class Connector:
    """Opens channels for one worker, and remembers them for its byte counts."""

    addresses: Sequence[str]
    secret: bytes
    rank: int
    size: int
    view: int
    timeout_s: float
    should_stop: Callable[[], bool]
    session: int = field(default_factory=lambda: secrets.randbits(62))
    opened: list[Channel] = field(default_factory=list)
    """All channels so far, closed ones included."""

    def connect(self, index: int, *, is_member: bool = True) -> Channel:
        """A new channel to shard `index`; if it is not that of a member, its end says nothing about a worker."""
        connection = ClientConnection(
            self.addresses[index],
            self.secret,
            m.decode_from_server,
            what=f"Shard {index} of {len(self.addresses)} ({self.addresses[index]})",
            timeout_s=self.timeout_s,
            should_stop=self.should_stop,
        )
        try:
            connection.send(m.Connect(self.rank, self.size, self.session, not is_member, self.view))
        except BaseException:
            connection.close()
            raise
        self.opened.append(Channel(connection))
        return self.opened[-1]


@dataclass
class _Pending:
    """How to handle the reply to a request."""

    into: Sequence[Tensor] | None = ()
    """Tensors for its bulk; None leaves the bulk in the shared buffer."""
    copy_to: list[bytes] | None = None
    """A list for its bulk, if the length is not known before."""
    on_push: Callable[[m.Reply], None] | None = None


class Channel:
    """One connection to a shard, and its pending requests."""

    def __init__(self, connection: ClientConnection[m.FromServer]) -> None:
        self.connection = connection
        self.pending: dict[int, _Pending] = {}
        self.errors: dict[int, SynclineError] = {}
        self.gate = 0
        """The id of the last `Gate` request."""
        self.last_push = 0
        """The id of the last `Push` request."""
        self.version = 0
        """Of the parameters that this worker last read from the shard."""
        self._pushes: set[int] = set()
        self._last: m.Reply | None = None
        self._ids = itertools.count(1)

    @property
    def has_pending_pushes(self) -> bool:
        return bool(self._pushes)

    def expect(
        self,
        into: Sequence[Tensor] | None = (),
        *,
        copy_to: list[bytes] | None = None,
        on_push: Callable[[m.Reply], None] | None = None,
    ) -> int:
        """The id for a request whose reply is handled this way."""
        id_ = next(self._ids)
        self.pending[id_] = _Pending(into, copy_to, on_push)
        if on_push is not None:
            self._pushes.add(id_)
        return id_

    def request(self, message: Callable[[int], m.FromWorker]) -> int:
        """Send a request without bulk, whose reply has none either; returns its id."""
        id_ = self.expect()
        self.connection.send(message(id_))
        return id_

    def receive(self) -> None:
        """Handle the next reply, to whichever request."""
        message, size, in_buffer = self.connection.receive()
        pending = self.pending.pop(message.to, None)
        self._pushes.discard(message.to)
        what = self.connection.what
        if isinstance(message, m.ErrorReply):
            text = f"{what}: {message.message}"
            error = PeerFailed(text) if message.is_peer_failure else SynclineError(text)
            if pending is None or pending.on_push is not None:
                raise error  # no caller waits for this one
            self.errors[message.to] = error
            return
        if pending is None:
            raise PeerFailed(f"{what} replied to request {message.to}, which this worker did not send.")
        if pending.copy_to is not None:
            bulk = torch.empty(size, dtype=torch.uint8)
            self.connection.take([bulk], size, in_buffer)
            pending.copy_to.append(bulk.numpy().tobytes())
        elif pending.into is not None:
            self.connection.take(pending.into, size, in_buffer)
        self._last = message
        if pending.on_push is not None:
            pending.on_push(message)

    def await_reply(self, id_: int) -> m.Reply:
        """The reply to the request sent last."""
        while id_ in self.pending:
            self.receive()
        if id_ in self.errors:
            raise self.errors.pop(id_)
        assert self._last is not None
        assert self._last.to == id_, f"waited for {id_}, but {self._last.to} came last"
        return self._last

    def await_pushes(self) -> None:
        """Wait until the shard has applied all pushes: then their memory may be reused."""
        while self._pushes:
            self.receive()

    def offer_buffer(self, size_bytes: int) -> None:
        """Share memory with the shard, if it is on this host."""
        connection = self.connection
        if connection.shared_buffer is not None and connection.shared_buffer.bytes.numel() == size_bytes:
            return
        had_one, connection.shared_buffer = connection.shared_buffer is not None, None
        buffer = SharedBuffer.create(size_bytes)
        if buffer is None:
            if had_one:  # the server must stop using it
                self.await_reply(self.request(lambda i: m.Offer(i, "", b"", 0)))
            return
        try:
            offer = self.request(lambda i: m.Offer(i, buffer.address, buffer.token, size_bytes))
            if self.await_reply(offer).accepted:
                connection.shared_buffer = buffer
        finally:
            buffer.seal()

    def close(self) -> None:
        self.connection.close()
        self.pending.clear()


def await_replies(channels: Sequence[Channel], ids: Sequence[int]) -> list[m.Reply]:
    """The replies of all shards, one request each. If some failed, raises the first error after all have replied."""
    replies, errors = [], []
    for channel, id_ in zip(channels, ids, strict=True):
        while id_ in channel.pending:
            channel.receive()
        error = channel.errors.pop(id_, None)
        if error is not None:
            errors.append(error)
        else:
            replies.append(channel.await_reply(id_))
    if errors:
        raise errors[0]
    return replies
