"""A worker's line to the coordinator, kept by a thread of its own so that the training loop never waits for it.

Here: joining, sending telemetry a few times a second, receiving a wish to stop or the news that a peer is gone. Not
here: the messages and sockets (`comms/control.py`), what the coordinator decides.
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
    Ticket,
    ToWorker,
    ViewOf,
    Welcome,
)  # fmt: skip
from syncline.errors import PeerLost, SynclineError
from syncline.telemetry.events import to_dict
from syncline.telemetry.recorder import Recorder

__all__ = ["Link"]

_BEAT_S = 0.2
_JOIN_TIMEOUT_S = 60.0
_EVERY_MEETING = (2**62, 0)


class Link:
    """Joins on construction; after `start`, a thread owns the socket until `close`."""

    def __init__(self, ticket: Ticket, pid: int) -> None:
        self.rank, self.life = ticket.rank, ticket.life
        """Its number and life in the run; its rank among the members of a View is another thing."""
        self.host = ticket.host
        """The address at which the others reach this process."""
        self.stop_wanted = False
        self.is_released = False
        """Whether the workers are done, and a server of parameters may end."""
        self._client = ControlClient(ticket)
        self._client.send(Hello(self.rank, pid))
        self.welcome, early = self._join(ticket)
        self.files = ticket.files or self.welcome.files
        """Where this process finds the files of the run."""
        self._view = self.welcome.view
        self._newest: float = 0 if self._view is None else self._view.number
        self._view_changed = threading.Condition()
        self.recorder = Recorder(self.rank)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._stores: queue.Queue[StoreAddress] = queue.Queue()
        self._servers: queue.Queue[ServerAddresses] = queue.Queue()
        self.last_meeting = (0, -1)
        """The View and the number of the last meeting that was called."""
        self._aborted = threading.Event()
        self._collective: Collective | None = None
        self._entered = 0  # the number of the View in which the collective is
        self._closing = threading.Event()
        for message in early:
            self._take(message)
        self._thread = threading.Thread(target=self._run, name="syncline-link", daemon=True)
        self._thread.start()

    def guard(self, collective: Collective, view: int) -> None:
        """From now on, the news of a View after this one ends the collective's waits."""
        with self._view_changed:
            self._collective, self._entered = collective, view
            is_over = self.is_outdated(view)
        if is_over:
            collective.abort()

    def is_outdated(self, view: int) -> bool:
        """Whether there is a View after this one, or will be none. Asked in every step."""
        return self._newest > view

    def say_ready(self) -> None:
        """This process was started later, and can take part now."""
        self.send(Ready(self.rank, self.life))

    def next_view(self, after: int, timeout_s: float) -> ViewOf | None:
        """The newest View after this one; None if there is none within the time, or never will be."""
        with self._view_changed:
            self._view_changed.wait_for(lambda: self.is_outdated(after), timeout_s)
            view = self._view
        return view if view is not None and view.number > after and not self._aborted.is_set() else None

    def request_store(self) -> StoreAddress:
        """Ask the coordinator for the store of torch.distributed."""
        self.send(StoreRequest(self.rank))
        try:
            return self._stores.get(timeout=_JOIN_TIMEOUT_S)
        except queue.Empty:
            raise SynclineError(f"The coordinator gave no store within {_JOIN_TIMEOUT_S:g} s.") from None

    def request_servers(self, view: int) -> list[str]:
        """Ask the coordinator where the parameter servers are, as soon as all of them are."""
        while not self._servers.empty():
            self._servers.get_nowait()  # the answer to a question that was given up
        self.send(ServersRequest(self.rank))
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._servers.get(timeout=_BEAT_S).addresses
            if self.is_outdated(view):
                raise PeerLost("There is another View; the servers may be others.")
        raise SynclineError(f"The parameter servers were not ready within {_JOIN_TIMEOUT_S:g} s.")

    def say_stranded(self, view: int) -> None:
        """The others of this View cannot be reached any more."""
        self.send(Stranded(self.rank, self.life, view))

    def call_meeting(self, view: int, number: int) -> None:
        """Let all workers know of meeting `number` of a View."""
        self.send(MeetingCall(self.rank, view, number))

    @property
    def is_aborted(self) -> bool:
        """Whether the run has failed elsewhere."""
        return self._aborted.is_set()

    def send(self, message: FromWorker) -> None:
        """Send at once, after the telemetry that is waiting: this process may be killed in a moment."""
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def on_terminate(self) -> None:
        """Somebody wants this process to end. If it is because the driver is gone, nobody passes on calls any more."""
        self.stop_wanted = True
        if not os.path.exists(f"/proc/{self.welcome.driver_pid}"):
            self.last_meeting = _EVERY_MEETING

    def close(self) -> None:
        """Send what is waiting, and leave."""
        self._closing.set()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._client.receive(_BEAT_S, self._wake)
            with contextlib.suppress(BlockingIOError):  # nobody has anything to send
                os.eventfd_read(self._wake)
            self._take(message)
            self._send_waiting()
        self._send_waiting()
        self._client.close()

    def _join(self, ticket: Ticket) -> tuple[Welcome, list[ToWorker]]:
        """The coordinator's answer, and what it had told all workers before it."""
        early: list[ToWorker] = []
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            answer = self._client.receive(left)
            if isinstance(answer, Welcome):
                return answer, early
            if answer is not None:
                early.append(answer)
        raise SynclineError(f"The coordinator at {ticket.address} did not answer within {_JOIN_TIMEOUT_S:g} s.")

    def _take(self, message: ToWorker | None) -> None:
        if isinstance(message, Stop):
            self.stop_wanted = True
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
        """Another View, or None: the run has failed. Whoever waits for somebody who is gone is told."""
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
        # Sent even if there are no events: it is also the sign of life.
        events = [to_dict(e) for e in self.recorder.drain()]
        self._client.send(Events(self.rank, self.recorder.last_step, events, self.life, self.recorder.waits))
        with contextlib.suppress(queue.Empty):
            while True:
                self._client.send(self._outbox.get_nowait())
