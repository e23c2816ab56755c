"""The store through which the ranks of torch.distributed find each other: keys, values, and waiting for them.

Here: hosting it (coordinator) and connecting to it (workers). torch's own store takes orders from anybody who can reach
its port, so this one stands in its place: behind the handshake of `parameter_server/connection.py`, in a thread of the
coordinator's process, where no worker's death takes it away. Not here: the groups made with it (`process_group.py`).

A wait is kept at the store, which answers when the last key is there or the time is over; so every wait ends.
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

from syncline.comms.parameter_server.connection import Caller, Door, Peer, PeerGone, listen
from syncline.errors import PeerLost

__all__ = ["HostedStore", "RunStore", "connect_store", "host_store"]

_TICK_S = 0.1  # how often the host looks after strangers
_GRACE_S = 10.0  # how much longer than the host a worker waits for an answer
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
    """The answer's number says whether all keys are there."""

    keys: list[str]


class _Await(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer comes when all keys are there, with their values."""

    keys: list[str]
    timeout_ms: int


class _Count(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many keys there are."""


class _Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int = 0
    values: list[bytes] = []


class _Missing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The time is over, and these keys are not there."""

    keys: list[str]


class _Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


_Request: TypeAlias = _Set | _Add | _CompareSet | _Delete | _Check | _Await | _Count
_Reply: TypeAlias = _Answer | _Missing | _Refused
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


def host_store(host: str, secret: bytes = b"") -> tuple[HostedStore, int]:
    """A new store on `host` only, for those who know the secret, and its port. It lives as long as it is held."""
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
    """The coordinator's store, under a prefix of its own for each View. Waits end after `timeout_s` or `should_stop()`.

    Hold on to it for as long as a process group uses it: torch keeps only its own half of a store alive.
    """
    return RunStore(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secret, prefix, timeout_s, should_stop)


class HostedStore:
    """The keeper of the values: a thread, which ends with `close` or when nobody holds this object any more."""

    def __init__(self, host: str, secret: bytes) -> None:
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        bell, ours = socket.socketpair()
        self._thread = threading.Thread(
            target=_keep, args=(listener, bell, _own(secret)), name="syncline-store", daemon=True
        )
        self._thread.start()
        self._ring = weakref.finalize(self, ours.close)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._ring()
        self._thread.join()


class RunStore(Store):
    """A worker's end, as torch wants it. Errors are torch's too: it looks for them. Threads take turns."""

    timeout: timedelta
    """How long to wait unless told otherwise; torch's own half keeps it."""

    def __init__(
        self, address: str, secret: bytes, prefix: str, timeout_s: float, should_stop: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._how = (address, secret, prefix, timeout_s, should_stop)
        self._prefix = f"{prefix}/"
        self._lock = threading.Lock()
        self._clones: list[RunStore] = []
        with _as_torch_says_it():
            self._caller: Caller[_Reply] = Caller(
                address,
                _own(secret),
                _decode_reply,
                what=f"Store {address}",
                timeout_s=timeout_s,
                should_stop=should_stop,
            )
        weakref.finalize(self, self._caller.close)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, over the one that may be there."""
        self._ask(_Set(self._prefix + key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one."""
        return self._wait([key], self.timeout).values[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 if it is not there, and tell the sum."""
        return self._ask(_Add(self._prefix + key, value)).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value is the expected one, or not there and expected to be empty; tell the value there is."""
        request = _CompareSet(self._prefix + key, _as_bytes(expected_value), _as_bytes(desired_value))
        return self._ask(request).values[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(_Check([self._prefix + key for key in keys])).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        self._wait(keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Whether there was one."""
        return bool(self._ask(_Delete(self._prefix + key)).number)

    def num_keys(self) -> int:
        """Of all prefixes."""
        return self._ask(_Count()).number

    deleteKey, getNumKeys = delete_key, num_keys  # by these names torch's own half asks for them

    def clone(self) -> RunStore:
        """The same store through a connection of its own."""
        clone = RunStore(*self._how)
        self._clones.append(clone)  # torch keeps only its own half of it alive
        return clone

    def close(self) -> None:
        """Disconnect."""
        for clone in self._clones:
            clone.close()
        self._caller.close()

    def _wait(self, keys: list[str], timeout: timedelta) -> _Answer:
        seconds = min(max(0.0, timeout.total_seconds()), _LONGEST_WAIT_S)
        return self._ask(_Await([self._prefix + key for key in keys], int(seconds * 1000)), seconds)

    def _ask(self, request: _Request, waits_s: float = 0.0) -> _Answer:
        with self._lock, _as_torch_says_it():
            self._caller.timeout_s = waits_s + _GRACE_S
            try:
                self._caller.send(request)
                answer, _, _ = self._caller.receive()
            except BaseException:
                self._caller.close()  # the answer to this request may not be taken for that to the next
                raise
        match answer:
            case _Missing():
                names = ", ".join(answer.keys)
                raise DistStoreError(
                    f"After {waits_s:g} s, nobody had written to the store: {names}. Another worker is late or gone."
                )
            case _Refused():
                raise DistStoreError(answer.reason)
        return answer


@dataclass
class _Waiting:
    """A request that is answered when its keys are there."""

    keys: list[str]
    deadline: float


class _Keeper:
    """What the thread knows: the values, who is connected, who waits."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.values: dict[str, bytes] = {}
        self.peers: set[Peer[_Request]] = set()
        self.waiting: dict[Peer[_Request], _Waiting] = {}

    def attend(self, peer: Peer[_Request], events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            while events & selectors.EVENT_READ and (frame := peer.read()) is not None:
                self._handle(peer, frame.message)
        except PeerGone:
            self._drop(peer)
        self._watch(peer)

    def patience_s(self) -> float:
        """How long nothing may happen until there is something to do."""
        first = min((w.deadline for w in self.waiting.values()), default=float("inf"))
        return max(0.0, min(_TICK_S, first - time.monotonic()))

    def give_up(self) -> None:
        """Tell those whose time is over what was missing."""
        now = time.monotonic()
        for peer in [p for p, w in self.waiting.items() if w.deadline <= now]:
            waiting = self.waiting.pop(peer)
            self._send(peer, _Missing([k for k in waiting.keys if k not in self.values]))

    def _handle(self, peer: Peer[_Request], request: _Request) -> None:
        if peer in self.waiting:
            raise PeerGone("asks again before it was answered")
        if isinstance(request, _Await):
            seconds = min(request.timeout_ms / 1000, _LONGEST_WAIT_S)
            self.waiting[peer] = _Waiting(request.keys, time.monotonic() + seconds)
        else:
            try:
                peer.send(self._obey(request))
            except (ValueError, OverflowError) as error:
                peer.send(_Refused(f"The store cannot do {request}: {error}."))
        self._answer_waiting()

    def _obey(self, request: _Set | _Add | _CompareSet | _Delete | _Check | _Count) -> _Answer:
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
        for peer, waiting in list(self.waiting.items()):
            if all(key in self.values for key in waiting.keys):
                del self.waiting[peer]
                self._send(peer, _Answer(0, [self.values[key] for key in waiting.keys]))

    def _send(self, peer: Peer[_Request], message: _Reply) -> None:
        """To whoever may be gone by now without harm to the request in hand."""
        try:
            peer.send(message)
        except PeerGone:
            self._drop(peer)
        self._watch(peer)

    def _watch(self, peer: Peer[_Request]) -> None:
        if peer in self.peers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_more_to_send else 0)
            self.selector.modify(peer, wanted, peer)

    def _drop(self, peer: Peer[_Request]) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.waiting.pop(peer, None)
            self.selector.unregister(peer)
            peer.close()


def _keep(listener: socket.socket, bell: socket.socket, secret: bytes) -> None:
    """The thread: until the other end of `bell` is closed."""
    with listener, bell, selectors.DefaultSelector() as selector:
        door = Door(listener, secret, _decode_request, selector)
        keeper = _Keeper(selector)
        selector.register(bell, selectors.EVENT_READ, bell)
        is_over = False
        while not is_over:
            for key, events in selector.select(keeper.patience_s()):
                if key.data is bell:
                    is_over = True
                elif key.data is door:
                    door.accept()
                else:
                    if key.data not in keeper.peers and door.admit(key.data):
                        keeper.peers.add(key.data)
                    if key.data in keeper.peers:
                        keeper.attend(key.data, events)
            door.tend()
            keeper.give_up()
        door.close()
        for peer in keeper.peers:
            peer.close()


@contextlib.contextmanager
def _as_torch_says_it() -> Iterator[None]:
    """torch knows what to make of its own errors only."""
    try:
        yield
    except PeerLost as error:
        raise DistNetworkError(str(error)) from error


def _own(secret: bytes) -> bytes:
    """A secret for the store alone: what somebody proves to it is no proof to a server of parameters."""
    return hmac.digest(secret, b"syncline store", "sha256")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
