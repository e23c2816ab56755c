"""Hosting the rendezvous store of torch.distributed: keys, values, and waiting for them.

Here: `HostedStore`, which runs in a thread of the coordinator's process, where it survives any worker, and the messages
that its clients send. torch's own TCPStore accepts commands from any process that reaches its port, so this one
replaces it: it authenticates clients (`framing.py`). This module does not import torch, so that the driver can host a
store without it. Not here: a worker's end (`store.py`).

The host keeps each wait, and replies when the last key is set or at the timeout; so every wait ends.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from syncline.comms.listener import Disconnected, Listener, ServerConnection, listen

_TICK_S = 0.1  # how often the host drops connections that have not authenticated
_END_S = 10.0  # how long the host's thread may take to close its connections
LONGEST_WAIT_S = 7 * 24 * 3600.0


class Set(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Set or overwrite a value."""

    key: str
    value: bytes


class AddTo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add to a number; the answer has the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Set a value if it is the expected one; the answer has the value after that."""

    key: str
    expected: bytes
    desired: bytes


class Delete(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer's number says whether the key was there."""

    key: str


class CheckKeys(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer's number says whether all keys are set."""

    keys: list[str]


class Await(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer comes when all keys are set, with their values."""

    keys: list[str]
    timeout_ms: int


class Count(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The number of keys in the store."""


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to a request."""

    number: int = 0
    values: list[bytes] = []


class Missing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Timed out; these keys are not set."""

    keys: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The store cannot do this."""

    reason: str


Request: TypeAlias = Set | AddTo | CompareSet | Delete | CheckKeys | Await | Count
Reply: TypeAlias = Answer | Missing | Refused
_decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def host_store(host: str, secret: bytes = b"") -> tuple[HostedStore, int]:
    """A new store that listens on `host`, and its port. It lives as long as a reference to it."""
    store = HostedStore(host, secret)
    return store, store.port


class HostedStore:
    """The store itself: a thread, which ends at `close` or when this object is garbage-collected."""

    def __init__(self, host: str, secret: bytes) -> None:
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        closing, ours = socket.socketpair()
        self._thread = threading.Thread(
            target=_run_host, args=(listener, closing, own_secret(secret)), name="syncline-store", daemon=True
        )
        self._thread.start()
        # Also at the exit of the interpreter: there, a daemon thread that is still running is ended wherever it is, and
        # inside torch's code that ends the whole process with SIGABRT.
        self._stop = weakref.finalize(self, _end_host, ours, self._thread)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._stop()


def _end_host(closing: socket.socket, thread: threading.Thread) -> None:
    closing.close()
    thread.join(_END_S)


@dataclass
class _KeyWait:
    """A request that is answered when its keys are set."""

    keys: list[str]
    deadline: float


class _Values:
    """The thread's state: values, connections, and the connections that wait."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.values: dict[str, bytes] = {}
        self.connections: set[ServerConnection[Request]] = set()
        self.waiting: dict[ServerConnection[Request], _KeyWait] = {}

    def handle_events(self, connection: ServerConnection[Request], events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            while events & selectors.EVENT_READ and (request := connection.read_message()) is not None:
                self._handle(connection, request)
        except Disconnected:
            self._drop(connection)
        self._watch(connection)

    def idle_s(self) -> float:
        """How long to wait for requests before the next timeout or check is due."""
        first = min((w.deadline for w in self.waiting.values()), default=float("inf"))
        return max(0.0, min(_TICK_S, first - time.monotonic()))

    def expire(self) -> None:
        """Reply to waits that have timed out."""
        now = time.monotonic()
        for connection in [p for p, w in self.waiting.items() if w.deadline <= now]:
            waiting = self.waiting.pop(connection)
            self._send(connection, Missing([k for k in waiting.keys if k not in self.values]))

    def _handle(self, connection: ServerConnection[Request], request: Request) -> None:
        if connection in self.waiting:
            raise Disconnected("sent a request before the reply to its last one")
        if isinstance(request, Await):
            seconds = min(request.timeout_ms / 1000, LONGEST_WAIT_S)
            self.waiting[connection] = _KeyWait(request.keys, time.monotonic() + seconds)
        else:
            try:
                connection.send(self._execute(request))
            except (ValueError, OverflowError) as error:
                connection.send(Refused(f"The store rejects {request}: {error}."))
        self._answer_waiting()

    def _execute(self, request: Set | AddTo | CompareSet | Delete | CheckKeys | Count) -> Answer:
        values = self.values
        match request:
            case Set():
                values[request.key] = request.value
                return Answer()
            case AddTo():
                total = int(values.get(request.key, b"0")) + request.amount
                if not -(2**63) <= total < 2**63:
                    raise OverflowError("the sum has more than 64 bits")
                values[request.key] = b"%d" % total
                return Answer(total)
            case CompareSet():
                if values.get(request.key, b"") == request.expected:
                    values[request.key] = request.desired
                return Answer(0, [values.get(request.key, request.expected)])
            case Delete():
                return Answer(int(values.pop(request.key, None) is not None))
            case CheckKeys():
                return Answer(int(all(key in values for key in request.keys)))
            case Count():
                return Answer(len(values))

    def _answer_waiting(self) -> None:
        for connection, waiting in list(self.waiting.items()):
            if all(key in self.values for key in waiting.keys):
                del self.waiting[connection]
                self._send(connection, Answer(0, [self.values[key] for key in waiting.keys]))

    def _send(self, connection: ServerConnection[Request], message: Reply) -> None:
        """Send to a connection other than the one being handled: if it is closed, drop it and continue."""
        try:
            connection.send(message)
        except Disconnected:
            self._drop(connection)
        self._watch(connection)

    def _watch(self, connection: ServerConnection[Request]) -> None:
        if connection in self.connections:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more_to_send else 0)
            self.selector.modify(connection, wanted, connection)

    def _drop(self, connection: ServerConnection[Request]) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self.waiting.pop(connection, None)
            self.selector.unregister(connection)
            connection.close()


def _run_host(listener: socket.socket, closing: socket.socket, secret: bytes) -> None:
    """The thread: until the other end of `closing` is closed."""
    with listener, closing, selectors.DefaultSelector() as selector:
        listener_ = Listener(listener, secret, _decode_request, selector)
        state = _Values(selector)
        selector.register(closing, selectors.EVENT_READ, closing)
        is_over = False
        while not is_over:
            for key, events in selector.select(state.idle_s()):
                if key.data is closing:
                    is_over = True
                elif key.data is listener_:
                    listener_.accept()
                else:
                    if key.data not in state.connections and listener_.admit(key.data):
                        state.connections.add(key.data)
                    if key.data in state.connections:
                        state.handle_events(key.data, events)
            listener_.maintain()
            state.expire()
        listener_.close()
        for connection in state.connections:
            connection.close()


def own_secret(secret: bytes) -> bytes:
    """A secret for the store alone: its handshake cannot be replayed to a parameter server."""
    return hmac.digest(secret, b"syncline store", "sha256")
