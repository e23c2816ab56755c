"""The rendezvous store of torch.distributed, as workers use it: keys, values, and waiting for them.

Here: connecting to it. Not here: hosting it (`store_host.py`), and the process groups made with it
(`process_group.py`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store  # where it is known to be a type
from torch.distributed import DistNetworkError, DistStoreError

from syncline.comms.connection import ClientConnection
from syncline.comms.store_host import (
    LONGEST_WAIT_S,
    AddTo,
    Answer,
    Await,
    CheckKeys,
    CompareSet,
    Count,
    Delete,
    HostedStore,
    Missing,
    Refused,
    Reply,
    Request,
    Set,
    decode_reply,
    host_store,
    own_secret,
)  # fmt: skip
from syncline.errors import PeerFailed

__all__ = ["HostedStore", "RunStore", "connect_store", "host_store"]

_GRACE_S = 10.0  # how much longer than the host a worker waits for a reply


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
            self._connection: ClientConnection[Reply] = ClientConnection(
                address,
                own_secret(secret),
                decode_reply,
                what=f"Store {address}",
                timeout_s=timeout_s,
                should_stop=should_stop,
            )
        weakref.finalize(self, self._connection.close)

    def set(self, key: str, value: str | bytes) -> None:
        """Set or overwrite a value."""
        self._ask(Set(self._prefix + key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """The value, as soon as it is set."""
        return self._wait([key], self.timeout).values[0]

    def add(self, key: str, value: int) -> int:
        """AddTo to a number, which is 0 if it is not set, and return the sum."""
        return self._ask(AddTo(self._prefix + key, value)).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set if the value is the expected one, or unset and expected to be empty; returns the resulting value."""
        request = CompareSet(self._prefix + key, _as_bytes(expected_value), _as_bytes(desired_value))
        return self._ask(request).values[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask(CheckKeys([self._prefix + key for key in keys])).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are set."""
        self._wait(keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(self._prefix + key)).number)

    def num_keys(self) -> int:
        return self._ask(Count()).number

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

    def _wait(self, keys: list[str], timeout: timedelta) -> Answer:
        seconds = min(max(0.0, timeout.total_seconds()), LONGEST_WAIT_S)
        return self._ask(Await([self._prefix + key for key in keys], int(seconds * 1000)), seconds)

    def _ask(self, request: Request, waits_s: float = 0.0) -> Answer:
        with self._lock, _torch_exceptions():
            self._connection.timeout_s = waits_s + _GRACE_S
            try:
                self._connection.send(request)
                answer, _, _ = self._connection.receive()
            except BaseException:
                self._connection.close()  # a late reply to this request must not be taken for the next one's
                raise
        match answer:
            case Missing():
                names = ", ".join(answer.keys)
                raise DistStoreError(
                    f"Timed out after {waits_s:g} s: no worker has set {names} in the store. One is late or failed."
                )
            case Refused():
                raise DistStoreError(answer.reason)
        return answer


@contextlib.contextmanager
def _torch_exceptions() -> Iterator[None]:
    """torch handles only its own exceptions."""
    try:
        yield
    except PeerFailed as error:
        raise DistNetworkError(str(error)) from error


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
