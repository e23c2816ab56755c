"""The coordinator: welcomes workers, passes on their events, and acts on what `supervision.py` decides.

Here: sockets, files, the clock. It lives with the driver and not in a worker, so that no worker's death takes it away;
and no worker asks it anything during a step.
"""

from __future__ import annotations

import contextlib
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
    LedgerLine,
    Meet,
    MeetingCall,
    NewView,
    Ready,
    Release,
    RunFiles,
    ServerAddresses,
    ServerReady,
    ServersRequest,
    Stop,
    StoreAddress,
    StoreRequest,
    Stranded,
    ViewOf,
    Welcome,
)  # fmt: skip
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment
from syncline.coordinator.evidence import Evidence
from syncline.coordinator.membership import KillOne, Launch, Membership, Publish, View
from syncline.coordinator.output import LogFollower
from syncline.coordinator.pace import Pace
from syncline.coordinator.requests import RequestBox
from syncline.coordinator.supervision import (
    End,
    Instruction,
    Kill,
    Lost,
    ReleaseServers,
    Supervision,
    TellAbort,
    TellStop,
)
from syncline.data.ledger import decode
from syncline.data.ledger_file import LedgerFile
from syncline.engines.engine import Engine, Exit
from syncline.plan.plan import Plan
from syncline.telemetry.events import Event, Progress, Warned, WorkerLost, WorkerOutput, from_dict
from syncline.telemetry.run_dir import RunDir

__all__ = ["Coordinator"]

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
        self._files = RunFiles(
            payload_path=str(payload_path.resolve()),
            run_dir=str(run_dir.path.resolve()),
            checkpoint_path=str(checkpoint_path.resolve()) if checkpoint_path else None,
        )
        engine.provide(self._files)
        self.membership = Membership(
            plan.size,
            plan.servers,
            policy=plan.on_loss,
            least=2 if plan.held_out else 1,
            most_losses=plan.most_losses,
        )
        self.supervision = Supervision(self.membership)
        self._pace = Pace()
        self.last_step = 0
        self._server = ControlServer(engine.network.driver)
        self._can_share_memory = engine.machine.no_shared_memory_because is None
        self._control: Segment | None = None
        self._view = self._open(self.membership.view)
        self._store: tuple[Any, int] | None = None
        self._secret, self._session = secrets.token_hex(32), secrets.token_hex(4)
        self._servers: dict[int, str] = {}
        self._waiting_for_servers: list[int] = []
        self._output = LogFollower(run_dir.log(0))
        self._ledger = LedgerFile(run_dir.ledger)
        self._has_told_of_ledger = False
        self._requests = RequestBox(run_dir.path)
        self.evidence = Evidence(run_dir)

    def run(self) -> End:
        """Launch the workers and see them through to the end."""
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._engine.fileno(), zmq.POLLIN)
        with _interrupts() as interrupts:
            for rank in range(self._plan.processes):
                self._launch(rank, 0)
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
                for wish in self._requests.poll():
                    instructions += self.supervision.add(wish.add) if wish.add else []
                    instructions += self.supervision.remove(wish.remove) if wish.remove else []
                    instructions += self.supervision.stop(time.monotonic()) if wish.stop else []
                instructions += self.supervision.on_tick(time.monotonic())
                self._pass_on_output()
                self._write_ledger()
                for instruction in instructions:
                    self._act(instruction)
                    if isinstance(instruction, End):
                        self._pass_on_output(to_the_end=True)
                        return instruction

    def close(self) -> None:
        """Release sockets and memory."""
        self._server.close()
        self._ledger.close()
        self._requests.close()
        if self._control is not None:
            self._control.close_descriptor()
        if self._store is not None:
            self._store[0].close()
        self._control = self._store = None

    def _on_message(self, message: FromWorker) -> list[Instruction]:
        now = time.monotonic()
        if isinstance(message, Hello):
            self.evidence.on_hello(message.rank, message.pid)
            is_late = self.membership.life_of(message.rank) > 0 or message.rank >= self._plan.processes
            self._server.send(message.rank, self._welcome(None if is_late else self._view))
        elif isinstance(message, Ready):
            return self.supervision.on_ready(message.rank, message.life, now)
        elif isinstance(message, Stranded):
            return self.supervision.on_stranded(message, now)
        elif isinstance(message, Events):
            self.last_step = max(self.last_step, message.step)
            self.supervision.on_sign(message, now)
            for data in message.events:
                try:
                    event = from_dict(data)
                except msgspec.ValidationError:
                    continue  # from another version; a run does not end for want of a number on the screen
                self._emit(event)
                if isinstance(event, Progress) and (slow := self._pace.on_progress(event)) is not None:
                    self._emit(slow)
        elif isinstance(message, LedgerLine):
            self._take_ledger_line(message)
        elif isinstance(message, StoreRequest):
            self._server.send(message.rank, StoreAddress(self._engine.network.driver, self._store_port()))
        elif isinstance(message, MeetingCall):
            for rank in self._view.members:
                self._server.send(rank, Meet(message.view, message.number))
        elif isinstance(message, ServerReady):
            self._servers[message.rank] = message.address
            self._tell_of_servers()
            return self.supervision.on_ready(message.rank, message.life, now)
        elif isinstance(message, ServersRequest):
            self._waiting_for_servers.append(message.rank)
            self._tell_of_servers()
        elif isinstance(message, Finished):
            return self.supervision.on_finished(message, now)
        elif isinstance(message, Failed):
            return self.supervision.on_failed(message, now)
        return []

    def _take_ledger_line(self, message: LedgerLine) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # makes no sense
            self._ledger.add(decode(message.line), time.monotonic())

    def _write_ledger(self) -> None:
        try:
            self._ledger.write(time.monotonic())
        except OSError as error:
            if not self._has_told_of_ledger:
                self._has_told_of_ledger = True
                self._emit(Warned(message=f"ledger.jsonl could not be written: {error.strerror}. Training goes on."))

    def _act(self, instruction: Instruction) -> None:
        if isinstance(instruction, TellStop):
            if instruction.is_users_wish:
                self._emit(
                    Warned(message="Stopping: the work is saved after the current step. Ctrl-C again ends at once.")
                )
            self._tell_all(Stop())
        elif isinstance(instruction, TellAbort):
            self._tell_all(Abort(instruction.reason), workers_only=instruction.workers_only)
        elif isinstance(instruction, Kill):
            self._engine.kill()
        elif isinstance(instruction, KillOne):
            self.evidence.before_kill(instruction.number)
            self._engine.kill(instruction.number)
        elif isinstance(instruction, Lost):
            self._tell_of_loss(instruction)
        elif isinstance(instruction, Launch):
            self._launch(instruction.number, instruction.life)
        elif isinstance(instruction, Publish):
            self._view = self._open(instruction.view)
            self._pace.on_members(self._view.members)
            self._tell_all(NewView(self._view))
        elif isinstance(instruction, ReleaseServers):
            self._tell_all(Release())

    def _launch(self, number: int, life: int) -> None:
        self._servers.pop(number, None)
        self.supervision.on_start(number, time.monotonic())
        self._engine.launch(self._server.ticket(number, life), self._run_dir.log(number))

    def _open(self, view: View) -> ViewOf:
        """A View with what its members need; those of before can attach to the old memory no more."""
        if self._control is not None:
            self._control.close_descriptor()
            self._control = None
        if len(view.members) > 1 and self._plan.collective != "process-group" and self._can_share_memory:
            self._control = Segment.create(ControlLayout(len(view.members)).total_bytes, "syncline-control")
        return ViewOf(view.number, list(view.members), self._control.address if self._control else None)

    def _tell_of_loss(self, lost: Lost) -> None:
        if isinstance(lost.cause, Exit):
            how, step, detail = self.evidence.how_it_ended(lost.cause, lost.hung), self.last_step, ""
        else:
            how, step = f"raised {lost.cause.kind}", lost.cause.step
            detail = lost.cause.traceback or lost.cause.message
        left = len(self.membership.view.members)
        self._emit(
            WorkerLost(
                rank=lost.cause.rank,
                name=self._plan.name_of(lost.cause.rank),
                cause=how,
                step=step,
                workers=left,
                is_replaced=lost.replaced,
                detail=detail,
            )
        )

    def _tell_all(self, message: Stop | Abort | NewView | Release, *, workers_only: bool = False) -> None:
        for number in self.membership.here:
            if not (workers_only and self.membership.is_server(number)):
                self._server.send(number, message)

    def _tell_of_servers(self) -> None:
        """To those who asked, as soon as all servers are there."""
        if len(self._servers) < self._plan.servers:
            return
        addresses = [self._servers[rank] for rank in sorted(self._servers)]
        while self._waiting_for_servers:
            self._server.send(self._waiting_for_servers.pop(), ServerAddresses(addresses))

    def _welcome(self, view: ViewOf | None) -> Welcome:
        return Welcome(
            plan=self._plan.to_dict(),
            files=self._files,
            view=view,
            driver_pid=os.getpid(),
            python_path=[os.path.abspath(p) if p else os.getcwd() for p in sys.path],
            working_dir=os.getcwd(),
            secret=self._secret,
            session=self._session,
        )

    def _store_port(self) -> int:
        """Host the store of torch.distributed once somebody needs it: the driver is spared loading torch until then."""
        if self._store is None:
            from syncline.comms.store import host_store

            self._store = host_store(self._engine.network.driver, bytes.fromhex(self._secret))
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
