"""A worker's line to the coordinator, kept by a thread of its own so that the training loop never waits for it.

Here: joining, sending telemetry a few times a second, receiving a wish to stop or the news that a peer is gone. Not
here: the messages and sockets (`comms/control.py`), what the coordinator decides.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from syncline.comms.collective import Collective
from syncline.comms.control import (
    Abort,
    ControlClient,
    Events,
    FromWorker,
    Hello,
    Meet,
    MeetingCall,
    ServerAddresses,
    ServersRequest,
    Stop,
    StoreAddress,
    StoreRequest,
    Ticket,
    Welcome,
)  # fmt: skip
from syncline.errors import SynclineError
from syncline.telemetry.events import to_dict
from syncline.telemetry.recorder import Recorder

__all__ = ["Link"]

_BEAT_S = 0.1
_JOIN_TIMEOUT_S = 60.0


class Link:
    """Joins on construction; after `start`, a thread owns the socket until `close`."""

    def __init__(self, ticket: Ticket, pid: int) -> None:
        self.rank = ticket.rank
        self.stop_wanted = False
        self._client = ControlClient(ticket)
        self._client.send(Hello(self.rank, pid))
        answer = self._client.receive(_JOIN_TIMEOUT_S)
        if not isinstance(answer, Welcome):
            raise SynclineError(f"The coordinator at {ticket.address} did not answer within {_JOIN_TIMEOUT_S:g} s.")
        self.welcome = answer
        self.recorder = Recorder(self.rank)
        self._outbox: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._stores: queue.Queue[StoreAddress] = queue.Queue()
        self._servers: queue.Queue[ServerAddresses] = queue.Queue()
        self.last_meeting = -1
        """The number of the last meeting that was called."""
        self._aborted = threading.Event()
        self._collective: Collective | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-link", daemon=True)
        self._thread.start()

    def guard(self, collective: Collective) -> None:
        """From now on, the news that a peer is gone ends this collective's waits."""
        self._collective = collective
        if self._aborted.is_set():
            collective.abort()

    def request_store(self) -> StoreAddress:
        """Ask the coordinator for the store of torch.distributed."""
        self._outbox.put(StoreRequest(self.rank))
        try:
            return self._stores.get(timeout=_JOIN_TIMEOUT_S)
        except queue.Empty:
            raise SynclineError(f"The coordinator gave no store within {_JOIN_TIMEOUT_S:g} s.") from None

    def request_servers(self) -> list[str]:
        """Ask the coordinator where the parameter servers are, as soon as all of them are."""
        self._outbox.put(ServersRequest(self.rank))
        try:
            return self._servers.get(timeout=_JOIN_TIMEOUT_S).addresses
        except queue.Empty:
            raise SynclineError(f"The parameter servers were not ready within {_JOIN_TIMEOUT_S:g} s.") from None

    def call_meeting(self, number: int) -> None:
        """Let all workers know of meeting `number`."""
        self._outbox.put(MeetingCall(self.rank, number))

    @property
    def is_aborted(self) -> bool:
        """Whether the run has failed elsewhere."""
        return self._aborted.is_set()

    def send(self, message: FromWorker) -> None:
        """Send when the thread comes round to it, after the telemetry that is waiting."""
        self._outbox.put(message)

    def close(self) -> None:
        """Send what is waiting, and leave."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._client.receive(_BEAT_S)
            if isinstance(message, Stop):
                self.stop_wanted = True
            elif isinstance(message, StoreAddress):
                self._stores.put(message)
            elif isinstance(message, ServerAddresses):
                self._servers.put(message)
            elif isinstance(message, Meet):
                self.last_meeting = max(self.last_meeting, message.number)
            elif isinstance(message, Abort):
                self._aborted.set()
                if self._collective is not None:
                    self._collective.abort()
            self._send_waiting()
        self._send_waiting()
        self._client.close()

    def _send_waiting(self) -> None:
        # Sent even if there are no events: it is also the sign of life.
        events = [to_dict(e) for e in self.recorder.drain()]
        self._client.send(Events(self.rank, self.recorder.last_step, events))
        with contextlib.suppress(queue.Empty):
            while True:
                self._client.send(self._outbox.get_nowait())
