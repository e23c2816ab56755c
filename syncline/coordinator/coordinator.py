"""The coordinator: accepts workers, forwards their events, and acts on what `supervision.py` decides.

Here: sockets, files, the clock. It runs in the driver's process, so that it survives the failure of any worker. Workers
send it nothing that they would have to wait for during a step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from syncline.comms.control import (
    Abort,
    ControlServer,
    Events,
    Failed,
    Finished,
    FromWorker,
    GroupCreated,
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
from syncline.comms.segment import ControlLayout, Segment
from syncline.comms.store_host import HostedStore, host_store
from syncline.coordinator.exit_diagnosis import ExitDiagnosis
from syncline.coordinator.failure_record import Failure
from syncline.coordinator.membership import KillProcess, Membership, PublishView, StartProcess, View
from syncline.coordinator.requests import RequestBox
from syncline.coordinator.run_guard import RunGuard
from syncline.coordinator.stragglers import StragglerDetector
from syncline.coordinator.supervision import (
    EndRun,
    Instruction,
    KillAll,
    ReleaseServers,
    ReportFailure,
    SendAbort,
    SendStop,
    Supervision,
)
from syncline.data.ledger import Began, decode
from syncline.data.ledger_file import LedgerFile
from syncline.engines.engine import Engine, Exit
from syncline.errors import SynclineError
from syncline.planning.plan import Plan
from syncline.telemetry.events import (
    Event,
    GroupTrains,
    Progress,
    WarningMessage,
    WorkerFailure,
    WorkerOutput,
    from_dict,
)
from syncline.telemetry.run_dir import RunDir

_TICK_MS = 50


class Coordinator:
    """Runs one plan on one engine."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        engine: Engine,
        *,
        task_path: Path,
        checkpoint_path: Path | None,
        guard: RunGuard,
        session: str,
        emit: Callable[[Event], None],
    ) -> None:
        """`session` identifies this lifetime of the driver."""
        self._plan, self._run_dir, self._engine, self._emit = plan, run_dir, engine, emit
        self._guard = guard
        self._files = RunFiles(
            task_path=str(task_path.resolve()),
            run_dir=str(run_dir.path.resolve()),
            checkpoint_path=str(checkpoint_path.resolve()) if checkpoint_path else None,
        )
        engine.provide(self._files)
        self.membership = Membership(
            plan.size,
            plan.servers,
            policy=plan.on_worker_failure,
            least=2 if plan.held_out else 1,
            max_failures=plan.max_failures,
        )
        self.supervision = Supervision(self.membership)
        self.supervision.heartbeats.is_script = plan.kind != "train"  # rounds may take any time
        self._stragglers = StragglerDetector()
        self.last_step = self._epoch = 0
        self.stopped_by: str | None = None
        """The first signal that asked the run to stop, such as SIGTERM."""
        self._should_stop = False
        self._server = ControlServer(engine.network.driver)
        self._can_share_memory = engine.machine.no_shared_memory_because is None
        self._control: Segment | None = None
        self._view = self._open(self.membership.view)
        self._store: tuple[HostedStore, int] | None = None
        self._secret, self._session = secrets.token_hex(32), session
        self._views_with_groups: set[int] = set()  # Views in which the script has created a group of its own
        self._servers: dict[int, str] = {}
        self._waiting_for_servers: list[int] = []
        self._output = LogFollower(run_dir.log(0))
        self._began = Began(plan.run_id, f"process {os.getpid()} on {socket.gethostname()}", f"{session}.driver")
        self._ledger = LedgerFile(run_dir.ledger, self._began)
        self._has_warned_of_ledger = False
        self._requests = RequestBox(run_dir.path)
        self.diagnosis = ExitDiagnosis(run_dir)

    def run(self) -> EndRun:
        """Start the workers and run the event loop until the end."""
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._engine.fileno(), zmq.POLLIN)
        with _interrupts() as interrupts:
            for worker_id in range(self._plan.processes):
                self._launch(worker_id, 0)
            while True:
                poller.poll(_TICK_MS)
                instructions: list[Instruction] = []
                while (message := self._server.receive()) is not None:
                    instructions += self._on_message(message)
                for exit in self._engine.poll():
                    if exit.reason:
                        # Its node agent is gone, but it may still be there: it must not take part any more.
                        self._server.send(exit.worker_id, Abort(exit.reason))
                    instructions += self.supervision.on_exit(exit, time.monotonic())
                for problem in self._engine.problems():
                    self._emit(WarningMessage(message=problem))
                while interrupts:
                    number = interrupts.pop(0)
                    self.stopped_by = self.stopped_by or signal.Signals(number).name
                    instructions += self.supervision.on_interrupt(time.monotonic())
                for request in self._requests.poll():
                    instructions += self.supervision.resize(request.add)
                    instructions += self.supervision.resize(-request.remove)
                    instructions += self.supervision.stop(time.monotonic()) if request.stop else []
                instructions += self.supervision.stop(time.monotonic()) if self._should_stop else []
                instructions += self.supervision.on_tick(time.monotonic())
                self._forward_output()
                self._write_ledger()
                self._check_run_dir()
                for instruction in instructions:
                    self._act(instruction)
                    if isinstance(instruction, EndRun):
                        self._forward_output(is_final=True)
                        return instruction

    def stop(self) -> None:
        """Have the run save its work and stop."""
        self._should_stop = True

    def close(self) -> None:
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
            self.diagnosis.on_hello(message.worker_id, message.pid)
            is_late = self.membership.life_of(message.worker_id) > 0 or message.worker_id >= self._plan.processes
            self._server.send(message.worker_id, self._welcome(None if is_late else self._view))
            if self.supervision.phase == "stopping" and not is_late:  # the others know since before it connected
                self._server.send(message.worker_id, Stop(self.stopped_by or ""))
        elif isinstance(message, Ready):
            return self.supervision.on_ready(message.worker_id, message.life)
        elif isinstance(message, Stranded):
            return self.supervision.on_stranded(message, now)
        elif isinstance(message, Events):
            self.last_step = max(self.last_step, message.step)
            self.supervision.heartbeats.on_heartbeat(message, now)
            for data in message.events:
                try:
                    event = from_dict(data)
                except msgspec.ValidationError:
                    continue  # from another version; a number missing on the screen is no reason to fail
                self._emit(event)
                if isinstance(event, Progress):
                    self._epoch = max(self._epoch, event.epoch_with_batches)
                if isinstance(event, Progress) and (slow := self._stragglers.on_progress(event)) is not None:
                    self._emit(slow)
        elif isinstance(message, LedgerLine):
            self._take_ledger_line(message)
        elif isinstance(message, StoreRequest):
            self._server.send(message.worker_id, StoreAddress(self._engine.network.driver, self._store_port()))
        elif isinstance(message, MeetingCall):
            for worker_id in self._view.members:
                self._server.send(worker_id, Meet(message.view, message.number))
        elif isinstance(message, GroupCreated):
            self._on_group_created(message)
            return self.supervision.on_group_created(message)
        elif isinstance(message, ServerReady):
            self._servers[message.worker_id] = message.address
            self._send_server_addresses()
            return self.supervision.on_ready(message.worker_id, message.life)
        elif isinstance(message, ServersRequest):
            self._waiting_for_servers.append(message.worker_id)
            self._send_server_addresses()
        elif isinstance(message, Finished):
            return self.supervision.on_finished(message, now)
        elif isinstance(message, Failed):
            return self.supervision.on_failed(message, now)
        return []

    def _on_group_created(self, message: GroupCreated) -> None:
        """Report once for each View that the script has begun to train."""
        if message.view == self._view.number and message.view not in self._views_with_groups:
            self._views_with_groups.add(message.view)
            restarts = len(self._views_with_groups) - 1
            self._emit(GroupTrains(members=list(self._view.members), restarts=restarts))

    def _take_ledger_line(self, message: LedgerLine) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # an invalid line is skipped
            self._ledger.add(decode(message.line), time.monotonic())

    def _write_ledger(self) -> None:
        try:
            self._ledger.write(time.monotonic())
        except OSError as error:
            if not self._has_warned_of_ledger:
                self._has_warned_of_ledger = True
                self._emit(WarningMessage(message=f"Cannot write ledger.jsonl: {error.strerror}. Training continues."))

    def _check_run_dir(self) -> None:
        """Restore a run directory that was removed; end the run if that is impossible or another driver has it."""
        try:
            was_restored = self._guard.check(time.monotonic())
        except SynclineError:
            self._engine.kill()  # first, so that no worker saves into a directory that is not ours
            with contextlib.suppress(OSError):
                self._ledger.follow(self._began)  # in the other driver's ledger, for the audit
            raise
        if was_restored:
            self._ledger.follow()
            self._requests.open()
            message = f"The run directory {self._run_dir.path} was removed or moved. It was written again, without the "
            self._emit(WarningMessage(message=f"{message}checkpoints so far; the next one follows."))

    def _act(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendStop):
            if instruction.by_user:
                what = "ending the script" if self.membership.restarts_together else "saving after the current step"
                message = f"Stopping: {what}. Press Ctrl-C again to stop at once without saving."
                self._emit(WarningMessage(message=message))
            self._send_all(Stop(self.stopped_by or ""))
        elif isinstance(instruction, SendAbort):
            cause = instruction.cause
            abort = Abort(self._why_aborted(cause), cause.code if isinstance(cause, Failed) else None)
            self._send_all(abort, workers_only=instruction.workers_only)
        elif isinstance(instruction, KillAll):
            self._engine.kill()
        elif isinstance(instruction, KillProcess):
            self.diagnosis.before_kill(instruction.worker_id)
            self._engine.kill(instruction.worker_id)
        elif isinstance(instruction, ReportFailure):
            self._report_failure(instruction)
        elif isinstance(instruction, StartProcess):
            self._launch(instruction.worker_id, instruction.life)
        elif isinstance(instruction, PublishView):
            self._view = self._open(instruction.view)
            self._stragglers.on_members(self._view.members)
            self._send_all(NewView(self._view))
        elif isinstance(instruction, ReleaseServers):
            self._send_all(Release())

    def _why_aborted(self, cause: Failure | None) -> str:
        if cause is None:
            return "the run is complete"
        how = f"raised {cause.kind}" if isinstance(cause, Failed) else cause.describe()
        return f"{self._plan.name_of(cause.worker_id)} {how}"

    def _launch(self, worker_id: int, life: int) -> None:
        self._servers.pop(worker_id, None)
        self.supervision.heartbeats.on_start(worker_id, life, time.monotonic())
        self._engine.launch(self._server.launch_spec(worker_id, life), self._run_dir.log(worker_id))

    def _open(self, view: View) -> ViewOf:
        """A View with the control segment of its members; that of the previous View can no longer be attached."""
        if self._control is not None:
            self._control.close_descriptor()
            self._control = None
        if len(view.members) > 1 and self._plan.collective != "process-group" and self._can_share_memory:
            self._control = Segment.create(ControlLayout(len(view.members)).total_bytes, "syncline-control")
        return ViewOf(view.number, list(view.members), self._control.address if self._control else None)

    def _report_failure(self, failure: ReportFailure) -> None:
        cause = failure.cause
        if isinstance(cause, Exit):
            how, step, detail = self.diagnosis.describe(cause, failure.hung), self.last_step, ""
        else:
            how, step, detail = f"raised {cause.kind}", cause.step, cause.traceback or cause.message
        self._emit(
            WorkerFailure(
                worker_id=cause.worker_id,
                name=self._plan.name_of(cause.worker_id),
                cause=how,
                step=step,
                workers=len(self.membership.view.members),
                is_replaced=failure.is_replaced,
                restarts_all=self.membership.restarts_together,
                detail=detail,
            )
        )

    def _send_all(self, message: Stop | Abort | NewView | Release, *, workers_only: bool = False) -> None:
        for worker_id in self.membership.running:
            if not (workers_only and self.membership.is_server(worker_id)):
                self._server.send(worker_id, message)

    def _send_server_addresses(self) -> None:
        """Answer the workers that wait for them, once all servers are ready."""
        if len(self._servers) < self._plan.servers:
            return
        addresses = [self._servers[worker_id] for worker_id in sorted(self._servers)]
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
            epoch=self._epoch,
            restarts_together=self.membership.restarts_together,
        )

    def _store_port(self) -> int:
        """Host the store of torch.distributed on first use."""
        if self._store is None:
            self._store = host_store(self._engine.network.driver, bytes.fromhex(self._secret))
        return self._store[1]

    def _forward_output(self, *, is_final: bool = False) -> None:
        """Show what worker 0 prints; the others mostly print the same, and have their logs."""
        for line in self._output.lines(is_final=is_final):
            self._emit(WorkerOutput(worker_id=0, text=line))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that grows with each SIGINT or SIGTERM, instead of a KeyboardInterrupt at an arbitrary point."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return
    previous = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: _leave_terminal())
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """The terminal has hung up: the run continues without it. Writing to it would fail from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(descriptor):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


class LogFollower:
    """Lines appended to a file from now on; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self, *, is_final: bool = False) -> Iterator[str]:
        """The complete lines since the last call; if `is_final`, also a last line without a newline."""
        try:
            if self._path.stat().st_size > self._offset:
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read()
                self._offset += len(data)
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace").rstrip("\r")
        except OSError:  # not there yet, or the run directory was removed
            return
        if is_final and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""
