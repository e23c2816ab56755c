"""The coordinator: welcomes workers, passes on their events, and acts on what `supervision.py` decides.

Here: sockets, files, the clock. It lives with the driver and not in a worker, so that no worker's death takes it away;
and no worker asks it anything during a step.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from syncline.comms.control import (
    Abort,
    ControlServer,
    Events,
    Failed,
    Finished,
    FromWorker,
    Hello,
    Meet,
    MeetingCall,
    ServerAddresses,
    ServerReady,
    ServersRequest,
    Stop,
    StoreAddress,
    StoreRequest,
    Welcome,
)  # fmt: skip
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment
from syncline.coordinator.output import LogFollower
from syncline.coordinator.supervision import End, Instruction, Kill, Supervision, TellAbort, TellStop
from syncline.engines.engine import Engine
from syncline.plan.plan import Plan
from syncline.telemetry.events import Event, Warned, WorkerOutput, from_dict
from syncline.telemetry.run_dir import RunDir

__all__ = ["Coordinator"]

_LOOPBACK = "127.0.0.1"
_TICK_MS = 50


class Coordinator:
    """Runs one plan on one engine."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        engine: Engine,
        *,
        payload_path: Path,
        checkpoint_path: Path | None,
        emit: Callable[[Event], None],
    ) -> None:
        self._plan, self._run_dir, self._engine, self._emit = plan, run_dir, engine, emit
        self._payload_path, self._checkpoint_path = payload_path, checkpoint_path
        self.supervision = Supervision(plan.processes)
        self.last_step = 0
        self._server = ControlServer(_LOOPBACK)
        self._control: Segment | None = None
        if plan.collective == "shared-memory":
            self._control = Segment.create(ControlLayout(plan.size).total_bytes, "syncline-control")
        self._store: tuple[Any, int] | None = None
        self._secret = secrets.token_hex(32)
        self._servers: dict[int, str] = {}
        self._waiting_for_servers: list[int] = []
        self._output = LogFollower(run_dir.log(0))

    def run(self) -> End:
        """Launch the workers and see them through to the end."""
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._engine.fileno(), zmq.POLLIN)
        with _interrupts() as interrupts:
            for rank in range(self._plan.processes):
                self._engine.launch(self._server.ticket(rank), self._run_dir.log(rank))
            while True:
                poller.poll(_TICK_MS)
                instructions: list[Instruction] = []
                while (message := self._server.receive()) is not None:
                    instructions += self._on_message(message)
                for exit in self._engine.poll():
                    instructions += self.supervision.on_exit(exit, time.monotonic())
                while interrupts:
                    interrupts.pop()
                    instructions += self.supervision.on_interrupt(time.monotonic())
                instructions += self.supervision.on_tick(time.monotonic())
                self._pass_on_output()
                for instruction in instructions:
                    self._act(instruction)
                    if isinstance(instruction, End):
                        self._pass_on_output(to_the_end=True)
                        return instruction

    def close(self) -> None:
        """Release sockets and memory."""
        self._server.close()
        if self._control is not None:
            self._control.close_descriptor()
        self._control = self._store = None

    def _on_message(self, message: FromWorker) -> list[Instruction]:
        now = time.monotonic()
        if isinstance(message, Hello):
            self._server.send(message.rank, self._welcome())
        elif isinstance(message, Events):
            self.last_step = max(self.last_step, message.step)
            for data in message.events:
                try:
                    event = from_dict(data)
                except msgspec.ValidationError:
                    continue  # from another version; a run does not end for want of a number on the screen
                self._emit(event)
        elif isinstance(message, StoreRequest):
            self._server.send(message.rank, StoreAddress(_LOOPBACK, self._store_port()))
        elif isinstance(message, MeetingCall):
            for rank in range(self._plan.size):
                self._server.send(rank, Meet(message.number))
        elif isinstance(message, ServerReady):
            self._servers[message.rank] = message.address
            self._tell_of_servers()
        elif isinstance(message, ServersRequest):
            self._waiting_for_servers.append(message.rank)
            self._tell_of_servers()
        elif isinstance(message, Finished):
            return self.supervision.on_finished(message, now)
        elif isinstance(message, Failed):
            return self.supervision.on_failed(message, now)
        return []

    def _act(self, instruction: Instruction) -> None:
        if isinstance(instruction, TellStop):
            self._emit(Warned(message="Stopping: the work is saved after the current step. Ctrl-C again ends at once."))
            self._tell_all(Stop())
        elif isinstance(instruction, TellAbort):
            self._tell_all(Abort(instruction.reason))
        elif isinstance(instruction, Kill):
            self._engine.kill()

    def _tell_all(self, message: Stop | Abort) -> None:
        for rank in range(self._plan.processes):
            self._server.send(rank, message)

    def _tell_of_servers(self) -> None:
        """To those who asked, as soon as all servers are there."""
        if len(self._servers) < self._plan.servers:
            return
        addresses = [self._servers[rank] for rank in sorted(self._servers)]
        while self._waiting_for_servers:
            self._server.send(self._waiting_for_servers.pop(), ServerAddresses(addresses))

    def _welcome(self) -> Welcome:
        return Welcome(
            plan=self._plan.to_dict(),
            payload_path=str(self._payload_path),
            run_dir=str(self._run_dir.path.resolve()),
            checkpoint_path=str(self._checkpoint_path.resolve()) if self._checkpoint_path else None,
            control_segment=self._control.address if self._control else None,
            python_path=[os.path.abspath(p) if p else os.getcwd() for p in sys.path],
            working_dir=os.getcwd(),
            secret=self._secret,
        )

    def _store_port(self) -> int:
        """Host the store of torch.distributed once somebody needs it: the driver is spared loading torch until then."""
        if self._store is None:
            from syncline.comms.store import host_store

            self._store = host_store(_LOOPBACK)
        return self._store[1]

    def _pass_on_output(self, *, to_the_end: bool = False) -> None:
        """What the first worker prints; the others mostly print the same, and have their logs."""
        for line in self._output.lines(to_the_end=to_the_end):
            self._emit(WorkerOutput(rank=0, text=line))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that grows with each Ctrl-C or polite kill, instead of an exception in the middle of something."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can take signals
        return
    previous = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
