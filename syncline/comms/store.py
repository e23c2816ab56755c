"""The rendezvous store of torch.distributed: keys, values, and waiting for them.

Here: hosting it (coordinator) and connecting to it (workers). torch's own TCPStore accepts commands from any process
that reaches its port, so this one replaces it: it authenticates clients (`framing.py`), and runs in a thread of the
coordinator's process, where it survives any worker. Not here: the process groups made with it (`process_group.py`).

The host keeps each wait, and replies when the last key is set or at the timeout; so every wait ends.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import msgspec
from torch._C._distributed_c10d import Store  # where it is known to be a type
from torch.distributed import DistNetworkError, DistStoreError

from syncline.comms.connection import ClientConnection
from syncline.comms.listener import Disconnected, Listener, ServerConnection, listen
from syncline.errors import PeerFailed

_TICK_S = 0.1  # how often the host drops connections that have not authenticated
_END_S = 10.0  # how long the host's thread may take to close its connections
_GRACE_S = 10.0  # how much longer than the host a worker waits for a reply
_LONGEST_WAIT_S = 7 * 24 * 3600.0


class _Set(msgspec.Struct, frozen=True, tag=True, array_like=True):
    key: str
    value: bytes


class _Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    key: str
    amount: int


class _CompareSet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    key: str
    expected: bytes
    desired: bytes


class _Delete(msgspec.Struct, frozen=True, tag=True, array_like=True):
    key: str


class _Check(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer's number says whether all keys are set."""

    keys: list[str]


class _Await(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer comes when all keys are set, with their values."""

    keys: list[str]
    timeout_ms: int


class _Count(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The number of keys."""


class _Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int = 0
    values: list[bytes] = []


class _Missing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Timed out; these keys are not set."""

    keys: list[str]


class _Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


_Request: TypeAlias = _Set | _Add | _CompareSet | _Delete | _Check | _Await | _Count
_Reply: TypeAlias = _Answer | _Missing | _Refused
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


def host_store(host: str, secret: bytes = b"") -> tuple[HostedStore, int]:
    """A new store that listens on `host`, and its port. It lives as long as a reference to it."""
    store = HostedStore(host, secret)
    return store, store.port


def connect_store(
    host: str,
    port: int,
    prefix: str,
    timeout_s: float,
    secret: bytes = b"",
    should_stop: Callable[[], bool] = lambda: False,
) -> RunStore:
    """The coordinator's store, with a key prefix for each view. Waits end after `timeout_s` or at `should_stop()`.

    Keep a reference while a process group uses it: torch keeps only the C++ half of a store alive.
    """
    return RunStore(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secret, prefix, timeout_s, should_stop)


class HostedStore:
    """The store itself: a thread, which ends at `close` or when this object is garbage-collected."""

    def __init__(self, host: str, secret: bytes) -> None:
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        closing, ours = socket.socketpair()
        self._thread = threading.Thread(
            target=_run_host, args=(listener, closing, _own(secret)), name="syncline-store", daemon=True
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


class RunStore(Store):
    """A worker's end, with torch's interface and torch's exceptions, which it checks for. Thread-safe."""

    timeout: timedelta
    """The default timeout; torch's C++ half keeps it."""

    def __init__(
        self, address: str, secret: bytes, prefix: str, timeout_s: float, should_stop: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._how = (address, secret, prefix, timeout_s, should_stop)
        self._prefix = f"{prefix}/"
        self._lock = threading.Lock()
        self._clones: list[RunStore] = []
        with _torch_exceptions():
            self._connection: ClientConnection[_Reply] = ClientConnection(
                address,
                _own(secret),
                _decode_reply,
                what=f"Store {address}",
                timeout_s=timeout_s,
                should_stop=should_stop,
            )
        weakref.finalize(self, self._connection.close)

    def set(self, key: str, value: str | bytes) -> None:
        """Set or overwrite a value."""
        self._ask(_Set(self._prefix + key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """The value, as soon as it is set."""
        return self._wait([key], self.timeout).values[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 if it is not set, and return the sum."""
        return self._ask(_Add(self._prefix + key, value)).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set if the value is the expected one, or unset and expected to be empty; returns the resulting value."""
        request = _CompareSet(self._prefix + key, _as_bytes(expected_value), _as_bytes(desired_value))
        return self._ask(request).values[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask(_Check([self._prefix + key for key in keys])).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are set."""
        self._wait(keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(_Delete(self._prefix + key)).number)

    def num_keys(self) -> int:
        return self._ask(_Count()).number

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ half calls

    def clone(self) -> RunStore:
        """The same store, through another connection."""
        clone = RunStore(*self._how)
        self._clones.append(clone)  # torch keeps only its C++ half alive
        return clone

    def close(self) -> None:
        for clone in self._clones:
            clone.close()
        self._connection.close()

    def _wait(self, keys: list[str], timeout: timedelta) -> _Answer:
        seconds = min(max(0.0, timeout.total_seconds()), _LONGEST_WAIT_S)
        return self._ask(_Await([self._prefix + key for key in keys], int(seconds * 1000)), seconds)

    def _ask(self, request: _Request, waits_s: float = 0.0) -> _Answer:
        with self._lock, _torch_exceptions():
            self._connection.timeout_s = waits_s + _GRACE_S
            try:
                self._connection.send(request)
                answer, _, _ = self._connection.receive()
            except BaseException:
                self._connection.close()  # a late reply to this request must not be taken for the next one's
                raise
        match answer:
            case _Missing():
                names = ", ".join(answer.keys)
                raise DistStoreError(
                    f"Timed out after {waits_s:g} s: no worker has set {names} in the store. One is late or failed."
                )
            case _Refused():
                raise DistStoreError(answer.reason)
        return answer


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
        self.connections: set[ServerConnection[_Request]] = set()
        self.waiting: dict[ServerConnection[_Request], _KeyWait] = {}

    def handle_events(self, connection: ServerConnection[_Request], events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            while events & selectors.EVENT_READ and (frame := connection.read()) is not None:
                self._handle(connection, frame.message)
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
            self._send(connection, _Missing([k for k in waiting.keys if k not in self.values]))

    def _handle(self, connection: ServerConnection[_Request], request: _Request) -> None:
        if connection in self.waiting:
            raise Disconnected("sent a request before the reply to its last one")
        if isinstance(request, _Await):
            seconds = min(request.timeout_ms / 1000, _LONGEST_WAIT_S)
            self.waiting[connection] = _KeyWait(request.keys, time.monotonic() + seconds)
        else:
            try:
                connection.send(self._execute(request))
            except (ValueError, OverflowError) as error:
                connection.send(_Refused(f"The store rejects {request}: {error}."))
        self._answer_waiting()

    def _execute(self, request: _Set | _Add | _CompareSet | _Delete | _Check | _Count) -> _Answer:
        values = self.values
        match request:
            case _Set():
                values[request.key] = request.value
                return _Answer()
            case _Add():
                total = int(values.get(request.key, b"0")) + request.amount
                if not -(2**63) <= total < 2**63:
                    raise OverflowError("the sum has more than 64 bits")
                values[request.key] = b"%d" % total
                return _Answer(total)
            case _CompareSet():
                if values.get(request.key, b"") == request.expected:
                    values[request.key] = request.desired
                return _Answer(0, [values.get(request.key, request.expected)])
            case _Delete():
                return _Answer(int(values.pop(request.key, None) is not None))
            case _Check():
                return _Answer(int(all(key in values for key in request.keys)))
            case _Count():
                return _Answer(len(values))

    def _answer_waiting(self) -> None:
        for connection, waiting in list(self.waiting.items()):
            if all(key in self.values for key in waiting.keys):
                del self.waiting[connection]
                self._send(connection, _Answer(0, [self.values[key] for key in waiting.keys]))

    def _send(self, connection: ServerConnection[_Request], message: _Reply) -> None:
        """Send to a connection other than the one being handled: if it is closed, drop it and continue."""
        try:
            connection.send(message)
        except Disconnected:
            self._drop(connection)
        self._watch(connection)

    def _watch(self, connection: ServerConnection[_Request]) -> None:
        if connection in self.connections:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more_to_send else 0)
            self.selector.modify(connection, wanted, connection)

    def _drop(self, connection: ServerConnection[_Request]) -> None:
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


@contextlib.contextmanager
def _torch_exceptions() -> Iterator[None]:
    """torch handles only its own exceptions."""
    try:
        yield
    except PeerFailed as error:
        raise DistNetworkError(str(error)) from error


def _own(secret: bytes) -> bytes:
    """A secret for the store alone: its handshake cannot be replayed to a parameter server."""
    return hmac.digest(secret, b"syncline store", "sha256")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
