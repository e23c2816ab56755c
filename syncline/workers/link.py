"""A worker's connection to the coordinator, on its own thread, so that the training loop never waits for it.

Here: joining, sending telemetry a few times a second, receiving requests to stop and new Views, and noticing that the
driver is gone. Not here: the messages and sockets (`comms/control.py`), what the coordinator decides (`coordinator/`),
and what a worker without a driver does (`session.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable

from syncline.comms.collective import Collective
from syncline.comms.control import (
    Abort,
    ControlClient,
    Events,
    FromWorker,
    Hello,
    LaunchSpec,
    Meet,
    NewView,
    Release,
    ServerAddresses,
    ServersRequest,
    Stop,
    StoreAddress,
    StoreRequest,
    ToWorker,
    ViewOf,
    Welcome,
)  # fmt: skip
from syncline.errors import PeerFailed, SynclineError
from syncline.telemetry.events import to_dict
from syncline.telemetry.recorder import Recorder

_BEAT_S = 0.2
_JOIN_TIMEOUT_S = 60.0
_EVERY_MEETING = (2**62, 0)
_REMOTE_S = 2.0
"""After a request to stop, how long a worker on another host than the driver waits for it before it counts as gone."""


class Link:
    """Joins on construction; then a thread owns the socket until `close`."""

    def __init__(self, spec: LaunchSpec, pid: int) -> None:
        self.worker_id, self.life = spec.worker_id, spec.life
        """Its number and life in the run; its rank among the members of a View is another thing."""
        self.host = spec.host
        """The address at which the others reach this process."""
        self.stop_requested = False
        self.on_stop: Callable[[str], None] | None = None
        """Called when the run stops or has failed, with the name of the signal that asked for it, if any."""
        self.orphan_patience_s = math.inf
        """How long the loop may wait for other workers when the driver is gone; then one of them must have failed."""
        self.is_released = False
        self.abort_code: str | None = None
        """The code of the error with which the run has failed on another worker, if it has one."""
        """Whether the workers have finished, so that a parameter server may end."""
        self._client = ControlClient(spec)
        self._client.send(Hello(self.worker_id, pid))
        self.welcome, early = self._join(spec)
        self.files = spec.files or self.welcome.files
        """The files of the run, as this process sees them."""
        self._terminated_at: float | None = None
        self._driver = None if spec.is_remote else _DriverProcess(self.welcome.driver_pid)
        self._view = self.welcome.view
        self._newest: float = 0 if self._view is None else self._view.number
        self._view_changed = threading.Condition()
        self.recorder = Recorder(self.worker_id)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._stores: queue.Queue[StoreAddress] = queue.Queue()
        self._servers: queue.Queue[ServerAddresses] = queue.Queue()
        self.last_meeting = (0, -1)
        """The View and the number of the last meeting call."""
        self._aborted = threading.Event()
        self._collective: Collective | None = None
        self._entered = 0  # the View that the collective belongs to
        self._closing = threading.Event()
        self._has_peer_failed = False
        self._stalled = (-1, 0.0)  # without a driver: the last step, and since when the loop waits in it
        for message in early:
            self._take(message)
        self._thread = threading.Thread(target=self._run, name="syncline-link", daemon=True)
        self._thread.start()

    def guard(self, collective: Collective, view: int) -> None:
        """Abort `collective` as soon as there is a View after `view`, so that no wait in it lasts forever."""
        with self._view_changed:
            self._collective, self._entered = collective, view
            is_over = self.is_outdated(view)
        if is_over:
            collective.abort()

    def is_outdated(self, view: int) -> bool:
        """Whether there is a View after this one, or the run has failed. Called in every step."""
        return self._newest > view

    def next_view(self, after: int, timeout_s: float) -> ViewOf | None:
        """The newest View after `after`; None if there is none within the time, or the run has failed."""
        with self._view_changed:
            self._view_changed.wait_for(lambda: self.is_outdated(after), timeout_s)
            view = self._view
        return view if view is not None and view.number > after and not self._aborted.is_set() else None

    def request_store(self) -> StoreAddress:
        """Request the address of the torch.distributed store from the coordinator."""
        self.send(StoreRequest(self.worker_id))
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._stores.get(timeout=_BEAT_S)
            if self.is_driver_gone:
                raise PeerFailed("The driver is gone.", code="driver-gone")
        raise SynclineError(f"The coordinator sent no torch.distributed store within {_JOIN_TIMEOUT_S:g} s.")

    def request_servers(self, view: int) -> list[str]:
        """Request the addresses of the parameter servers; the coordinator answers when all of them are ready."""
        while not self._servers.empty():
            self._servers.get_nowait()  # the answer to an abandoned request
        self.send(ServersRequest(self.worker_id))
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._servers.get(timeout=_BEAT_S).addresses
            if self.is_outdated(view) or self.is_driver_gone:
                raise PeerFailed("The membership has changed, and the parameter servers may have changed with it.")
        raise SynclineError(f"The parameter servers were not ready within {_JOIN_TIMEOUT_S:g} s.")

    @property
    def is_aborted(self) -> bool:
        """Whether the run has failed on another worker."""
        return self._aborted.is_set()

    def send(self, message: FromWorker) -> None:
        """Send immediately, after the pending telemetry: this process may be killed at any moment."""
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    @property
    def is_driver_gone(self) -> bool:
        """Whether the driver's process has ended: there will be no new View."""
        if self._driver is not None:
            return self._driver.has_ended
        return self._terminated_at is not None and time.monotonic() - self._terminated_at > _REMOTE_S

    @property
    def is_orphaned(self) -> bool:
        """Whether the driver is gone, and a worker failed since."""
        return self._newest == math.inf and not self._aborted.is_set()

    def on_terminate(self) -> None:
        """Handle SIGTERM: request a stop. If the driver has died, it cannot forward calls: meet without one."""
        self.stop_requested = True
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
        if self._driver is None or self._driver.has_ended:
            self.last_meeting = _EVERY_MEETING

    def on_peer_failed(self) -> None:
        """Another worker has failed: abort the waits for it, as soon as it is certain that the driver is gone."""
        self._has_peer_failed = True
        # In the thread: this is a signal handler, and may interrupt whatever holds the locks that aborting needs.
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send pending messages and disconnect."""
        self._closing.set()
        self._thread.join()
        os.close(self._wake)
        if self._driver is not None:
            self._driver.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._client.receive(_BEAT_S, self._wake)
            with contextlib.suppress(BlockingIOError):  # nothing to send
                os.eventfd_read(self._wake)
            self._take(message)
            self._send_waiting()
            self._watch_driver()
        self._send_waiting()
        self._client.close(waits=not self.is_driver_gone)

    def _watch_driver(self) -> None:
        """Stop when the driver is gone; the process that started this one would say so, unless it is stopped."""
        if not self.is_driver_gone or self._newest == math.inf:
            return
        self.on_terminate()
        now, step = time.monotonic(), self.recorder.last_step
        if not self.recorder.waits or step != self._stalled[0]:
            self._stalled = step, now
        if self._has_peer_failed or now - self._stalled[1] > self.orphan_patience_s:
            self._change_view(None, is_failed=False)

    def _join(self, spec: LaunchSpec) -> tuple[Welcome, list[ToWorker]]:
        """The coordinator's answer, and the broadcasts that arrived before it."""
        early: list[ToWorker] = []
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            answer = self._client.receive(left)
            if isinstance(answer, Welcome):
                return answer, early
            if answer is not None:
                early.append(answer)
        raise SynclineError(f"The coordinator at {spec.address} did not answer within {_JOIN_TIMEOUT_S:g} s.")

    def _take(self, message: ToWorker | None) -> None:
        if isinstance(message, Stop):
            self.stop_requested = True
            self._notify(message.signal)
        elif isinstance(message, StoreAddress):
            self._stores.put(message)
        elif isinstance(message, ServerAddresses):
            self._servers.put(message)
        elif isinstance(message, Meet):
            self.last_meeting = max(self.last_meeting, (message.view, message.number))
        elif isinstance(message, Release):
            self.is_released = True
        elif isinstance(message, (Abort, NewView)):
            if isinstance(message, Abort):
                self.abort_code = message.code
            self._change_view(message.view if isinstance(message, NewView) else None)
            if isinstance(message, Abort):
                self._notify("")

    def _notify(self, signal_name: str) -> None:
        if self.on_stop is not None:
            self.on_stop(signal_name)

    def _change_view(self, view: ViewOf | None, *, is_failed: bool = True) -> None:
        """Record a new View, or None if there will be none, and abort the waits of the previous View.

        `is_failed`: there will be none because the run has failed.
        """
        with self._view_changed:
            if view is None:
                if is_failed:
                    self._aborted.set()
                self._newest = math.inf
            elif view.number > self._newest:
                self._view, self._newest = view, view.number
            self._view_changed.notify_all()
            over = self._collective if self.is_outdated(self._entered) else None
        if over is not None:
            over.abort()

    def _send_waiting(self) -> None:
        # Sent even without events: it is also the heartbeat.
        events = [to_dict(e) for e in self.recorder.drain()]
        self._client.send(Events(self.worker_id, self.recorder.last_step, events, self.life, self.recorder.waits))
        with contextlib.suppress(queue.Empty):
            while True:
                self._client.send(self._outbox.get_nowait())


class _DriverProcess:
    """The driver, by a descriptor: its id could be used again, and a zombie still has one."""

    def __init__(self, pid: int) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    @property
    def has_ended(self) -> bool:
        if self._descriptor is None:
            return True
        poll = select.poll()  # a new one each time: several threads call this
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
