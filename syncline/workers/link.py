"""A worker's connection to the coordinator, on its own thread, so that the training loop never waits for it.

Here: joining, sending telemetry a few times a second, receiving requests to stop and new Views. Not here: the messages
and sockets (`comms/control.py`), and what the coordinator decides (`coordinator/`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time

from syncline.comms.collective import Collective
from syncline.comms.control import (
    Abort,
    ControlClient,
    Events,
    FromWorker,
    Hello,
    LaunchSpec,
    Meet,
    MeetingCall,
    NewView,
    Ready,
    Release,
    ServerAddresses,
    ServersRequest,
    Stop,
    StoreAddress,
    StoreRequest,
    Stranded,
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


class Link:
    """Joins on construction; then a thread owns the socket until `close`."""

    def __init__(self, spec: LaunchSpec, pid: int) -> None:
        self.worker_id, self.life = spec.worker_id, spec.life
        """Its number and life in the run; its rank among the members of a View is another thing."""
        self.host = spec.host
        """The address at which the others reach this process."""
        self.stop_requested = False
        self.is_released = False
        """Whether the workers have finished, so that a parameter server may end."""
        self._client = ControlClient(spec)
        self._client.send(Hello(self.worker_id, pid))
        self.welcome, early = self._join(spec)
        self.files = spec.files or self.welcome.files
        """The files of the run, as this process sees them."""
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

    def say_ready(self) -> None:
        """Notify the coordinator that this late joiner can take part."""
        self.send(Ready(self.worker_id, self.life))

    def next_view(self, after: int, timeout_s: float) -> ViewOf | None:
        """The newest View after `after`; None if there is none within the time, or the run has failed."""
        with self._view_changed:
            self._view_changed.wait_for(lambda: self.is_outdated(after), timeout_s)
            view = self._view
        return view if view is not None and view.number > after and not self._aborted.is_set() else None

    def request_store(self) -> StoreAddress:
        """Request the address of the torch.distributed store from the coordinator."""
        self.send(StoreRequest(self.worker_id))
        try:
            return self._stores.get(timeout=_JOIN_TIMEOUT_S)
        except queue.Empty:
            raise SynclineError(
                f"The coordinator sent no torch.distributed store within {_JOIN_TIMEOUT_S:g} s."
            ) from None

    def request_servers(self, view: int) -> list[str]:
        """Request the addresses of the parameter servers; the coordinator answers when all of them are ready."""
        while not self._servers.empty():
            self._servers.get_nowait()  # the answer to an abandoned request
        self.send(ServersRequest(self.worker_id))
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._servers.get(timeout=_BEAT_S).addresses
            if self.is_outdated(view):
                raise PeerFailed("The membership has changed, and the parameter servers may have changed with it.")
        raise SynclineError(f"The parameter servers were not ready within {_JOIN_TIMEOUT_S:g} s.")

    def say_stranded(self, view: int) -> None:
        """Notify the coordinator that the other members of this View are unreachable."""
        self.send(Stranded(self.worker_id, self.life, view))

    def call_meeting(self, view: int, number: int) -> None:
        """Call meeting `number` of a View; the coordinator notifies all workers."""
        self.send(MeetingCall(self.worker_id, view, number))

    @property
    def is_aborted(self) -> bool:
        """Whether the run has failed on another worker."""
        return self._aborted.is_set()

    def send(self, message: FromWorker) -> None:
        """Send immediately, after the pending telemetry: this process may be killed at any moment."""
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def on_terminate(self) -> None:
        """Handle SIGTERM: request a stop. If the driver has died, it cannot forward calls: meet without one."""
        self.stop_requested = True
        if not os.path.exists(f"/proc/{self.welcome.driver_pid}"):
            self.last_meeting = _EVERY_MEETING

    def close(self) -> None:
        """Send pending messages and disconnect."""
        self._closing.set()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._client.receive(_BEAT_S, self._wake)
            with contextlib.suppress(BlockingIOError):  # nothing to send
                os.eventfd_read(self._wake)
            self._take(message)
            self._send_waiting()
        self._send_waiting()
        self._client.close()

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
        elif isinstance(message, StoreAddress):
            self._stores.put(message)
        elif isinstance(message, ServerAddresses):
            self._servers.put(message)
        elif isinstance(message, Meet):
            self.last_meeting = max(self.last_meeting, (message.view, message.number))
        elif isinstance(message, Release):
            self.is_released = True
        elif isinstance(message, (Abort, NewView)):
            self._change_view(message.view if isinstance(message, NewView) else None)

    def _change_view(self, view: ViewOf | None) -> None:
        """Record a new View, or None if the run has failed, and abort the waits of the previous View."""
        with self._view_changed:
            if view is None:
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
