"""A process group of torch.distributed whose calls can be interrupted.

Here: `TorchGroup`: connecting the ranks, and ending a call when another worker has failed. Not here: what is exchanged
(`process_group.py`), and the store through which the ranks find each other (`store.py`).

gloo cannot be interrupted: it waits for the other end of a connection, or until the timeout, and a host that vanishes
closes no connection. So each group knows which connections gloo has opened for it, and `abort` shuts them down. That is
not always enough: gloo forgets what it is about to send at the moment when a connection ends, and then waits for it
forever. A call that has not ended soon after the abort is abandoned, together with its group.

Groups are made directly, and torch's default group stays free. A process has only one of those, even if the attempt to
create it hangs; and torch names groups by counting them, failed attempts included, so that ranks with different
histories would not find each other.

gloo does not authenticate connections, so its port is open only while the ranks connect: some milliseconds, or up to
`_CONNECT_S` if one of them fails meanwhile. A stranger that finds it in that time costs a descriptor for as long as the
group lives. One that speaks gloo's protocol could pose as a rank: only a trusted network prevents that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name

from syncline.comms.open_sockets import connections, drop_new_connections, listeners
from syncline.errors import PeerFailed

_CONNECT_S = 10.0
"""How long the ranks may take to connect once all have arrived; gloo applies it to each of its attempts."""
_POLL_S = 0.1
"""How often a call in progress checks whether to give up."""
_GRACE_S = 0.25
"""How long gloo has to notice that its connections were shut down."""
_abandoned: list[object] = []
"""Groups with a call that did not end. Destroying one would wait for that call."""


class TorchGroup:
    """A new gloo or NCCL group, for use by one thread; `abort` may come from any.

    `should_stop` says when to give up, also before a thread could call `abort`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float,
        host: str | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.group: Any = None
        self.is_aborted = False
        self._store, self._device, self._should_stop = store, device, should_stop
        self._opened: frozenset[int] = frozenset()  # connections, by inode number
        self._abandon_at: float | None = None
        self._is_abandoned = False
        self.call(lambda: self._connect(rank, size, timeout_s, host))

    def is_over(self) -> bool:
        return self.is_aborted or self._should_stop()

    def call(self, call: Callable[[], Any]) -> None:
        """Make a call of torch.distributed, and wait for the work that it returns, if any."""
        if self.is_aborted:
            raise PeerFailed("The exchange was aborted because another worker failed.", code="aborted")
        try:
            work = call()
            if work is not None:
                self._await(work)
        except (RuntimeError, ValueError) as error:  # gloo reports a failed peer as a plain RuntimeError
            # Where torch did not register the group itself, its own logging of that error raises another one.
            failure = error.__context__ if isinstance(error, ValueError) else error
            if not isinstance(failure, RuntimeError):
                raise
            self.abort()  # other ranks may wait for this one, and not know of the failure
            raise PeerFailed(f"The exchange failed: {failure}") from failure

    def call_in_thread(self, call: Callable[[], object]) -> None:
        """Make a call that blocks inside gloo on a thread of its own, so that it can be abandoned."""
        if self._device.type == "cuda":
            call()
            return
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                call()
                outcome.put(None)
            except BaseException as error:
                outcome.put(error)

        threading.Thread(target=run, name="gloo-call", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                error = outcome.get(timeout=_POLL_S)
                break
            self._abandon_if_over()
        if error is not None:
            raise error

    def abort(self) -> None:
        """Make calls in progress and later ones raise, here and at the ranks that are connected to this one."""
        self.is_aborted = True
        for number, connection in connections() if self._opened else ():
            if number in self._opened:
                # As if the other end had closed it. Shutting down writes, too, makes it more likely that gloo hangs.
                with contextlib.suppress(OSError):  # the other end, or gloo, has closed it already
                    connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if self._is_abandoned:
            _abandoned.append((self.group, self._store))
        self.group = None  # frees the connections
        self.is_aborted = True

    def _connect(self, rank: int, size: int, timeout_s: float, host: str | None) -> None:
        store, timeout = self._store, timedelta(seconds=timeout_s)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, rank, size, options)
            return
        if host is not None and (interface := interface_of(host)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # for this group, and for those split from it
        # Some ranks may still be busy elsewhere, perhaps for long; unlike gloo's, a wait at the store can be ended.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{r}" for r in range(size)], timeout)
        before, made = _open_connections(), list[Any]()
        limit = timedelta(seconds=min(_CONNECT_S, timeout_s))
        self.call_in_thread(lambda: made.append(new_gloo_group(store, rank, size, limit)))
        self._opened = _open_connections() - before
        self.group = made[0]
        self.group._set_default_timeout(timeout)

    def _await(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()  # in the stream's order; NCCL has its own timeout
            return
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error, if there was one
                    return
                self._abandon_if_over()

    def _abandon_if_over(self) -> None:
        """Abort a call in progress once there is no peer left to wait for, and raise if it still has not ended."""
        if not self.is_over():
            return
        now = time.monotonic()
        if self._abandon_at is None:
            self.abort()
            self._abandon_at = now + _GRACE_S
        elif now > self._abandon_at:
            self._is_abandoned = True
            raise PeerFailed("The exchange was abandoned because another worker failed.", code="aborted")


def _open_connections() -> frozenset[int]:
    return frozenset(number for number, _ in connections())


def new_gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group whose ranks are all connected to each other, and to which no one else can connect any more."""
    before = {number for number, _ in listeners()}
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._devices = _gloo_devices()
    options._threads, options._timeout = 2 * len(options._devices), timeout
    ours = {number for number, _ in listeners()} - before
    group = dist.ProcessGroupGloo(store, rank, size, options)
    # This rank has all its connections now, so it needs no listener. gloo would keep what strangers connect, and end
    # the process when it has no descriptor left.
    for number, listener in listeners():
        if number in ours:
            drop_new_connections(listener)
    return group


def _gloo_devices() -> list[Any]:
    """One for each interface, as torch itself would have it, except that all ranks connect at once.

    Torch's setting TORCH_GLOO_LAZY_INIT would have ranks connect when they first exchange something. `abort` would not
    know those connections, and the listeners had to stay open.
    """
    make: Any = dist.ProcessGroupGloo.create_device
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [make(interface=name, lazy_init=False) for name in names]
    return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]


def interface_of(address: str) -> str | None:
    """The network interface of this host with this IPv4 address; None if there is none.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    ask_for_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(anything, ask_for_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
