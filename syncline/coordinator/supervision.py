"""How a run reacts to what happens to its processes: a pure state machine. Events in, instructions out.

Here: whether the run continues, and how it ends. Not here: who is a member when it continues (`membership.py`), which
process hangs (`heartbeats.py`), which failure is the root cause (`failure_record.py`), acting on instructions
(`coordinator.py`). Time is passed in as a number, so that every interleaving can be tested without waiting.

    running --failure: the membership decides--> running
       |  |`--too many failures--> giving up: the survivors save --all gone--> ended
       |  |`--a failure that would repeat, or no worker left--> failing --all gone, or timeout--> ended
       |   `--Ctrl-C--> stopping --all gone--> ended           (a second Ctrl-C: kill)
       `--all finished and gone--> ended
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.comms.control import Failed, Finished, GroupCreated, Stranded
from syncline.coordinator.failure_record import Failure, FailureRecord
from syncline.coordinator.heartbeats import HeartbeatMonitor
from syncline.coordinator.membership import Decision, KillProcess, Membership, PublishView, StartProcess
from syncline.engines.engine import Exit

MESSAGE_GRACE_S = 2.0
"""A worker's last message and the notice of its exit take different ways; this long the message may be late."""
FAILING_GRACE_S = 5.0
"""How long the other workers have to notice that the run has failed."""
STOPPING_GRACE_S = 60.0
"""How long the workers have to agree on a step, save and exit."""


@dataclass(frozen=True)
class SendStop:
    """Send every worker the request to save and stop."""

    by_user: bool = True


@dataclass(frozen=True)
class SendAbort:
    """Have every process, or every worker, stop waiting for others: the run has failed, or is complete (no cause)."""

    cause: Failure | None
    workers_only: bool = False


@dataclass(frozen=True)
class KillAll:
    """Kill all processes now."""


@dataclass(frozen=True)
class ReleaseServers:
    """The workers are done: parameter servers may exit."""


@dataclass(frozen=True)
class ReportFailure:
    """Report to the user that a process failed and the run continues."""

    cause: Failure
    is_replaced: bool
    hung: str = ""
    """Why the coordinator killed it, if it did."""


@dataclass(frozen=True)
class EndRun:
    """All processes are gone: the run is over."""

    outcome: Literal["finished", "stopped", "failed", "killed"]


Instruction = (
    SendStop | SendAbort | KillAll | ReleaseServers | ReportFailure | EndRun | PublishView | StartProcess | KillProcess
)


@dataclass
class _Process:
    """What is known about the current life of a process."""

    life: int = 0
    finished: Finished | None = None
    failed: Failed | None = None
    exit: Exit | None = None
    exit_at: float = 0.0
    has_failed: bool = False

    @property
    def has_reported(self) -> bool:
        """Whether its last message has arrived."""
        return self.finished is not None or self.failed is not None

    def is_settled(self, now: float) -> bool:
        """Whether it is known how it ended; the last message of a process may arrive after its exit."""
        return self.has_reported or self.has_failed or now - self.exit_at >= MESSAGE_GRACE_S


class Supervision:
    """The state of a run and of all its processes."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.failures = FailureRecord()
        self.heartbeats = HeartbeatMonitor()
        self.summary: Finished | None = None
        """A worker's message at the end of the run. All send the same, after everything was saved."""
        self.phase: Literal["running", "stopping", "giving up", "failing", "ended"] = "running"
        self._processes = {worker_id: _Process() for worker_id in membership.running}
        self._deadline = float("inf")
        self._is_killed = self._has_released = False

    @property
    def gave_up(self) -> bool:
        """Whether the run was ended because of too many failures, with its work saved."""
        return self.phase == "ended" and self.failures.fatal is not None and self.summary is not None

    # Events

    def on_ready(self, worker_id: int, life: int) -> list[Instruction]:
        """A process that was started later is ready to join."""
        return self._carry_out(self.membership.on_ready(worker_id, life)) if _can_change_view(self) else []

    def on_stranded(self, message: Stranded, now: float) -> list[Instruction]:
        """A worker lost its connection to the others although no process failed: let them meet in a new View."""
        if message.life != self._processes[message.worker_id].life or not _can_change_view(self):
            return []
        return self._carry_out(self.membership.on_stranded(message.view, now))

    def on_group_created(self, message: GroupCreated) -> list[Instruction]:
        """A worker's script trains with torch.distributed itself: from now on, the workers restart together."""
        is_old = message.life != self._processes[message.worker_id].life
        if is_old or self.membership.is_restarting(message.worker_id) or self.phase != "running":
            return []
        self.heartbeats.be_patient()
        return self._carry_out(self.membership.on_group_created(message.worker_id, message.view))

    def on_finished(self, message: Finished, now: float) -> list[Instruction]:
        """A worker has completed its part."""
        process = self._processes[message.worker_id]
        together = self.membership.restarts_together
        is_over = self.membership.is_restarting(message.worker_id) or (together and message.life != process.life)
        if process.has_reported or is_over:
            return self._proceed(now)
        process.finished = message
        workers = (self._processes[n] for n in self.membership.running if not self.membership.is_server(n))
        if not message.summary or (together and not all(worker.finished for worker in workers)):
            return self._proceed(now)
        instructions: list[Instruction] = []
        if self.summary is None:
            # The run is complete and saved: workers that were about to join are not needed any more.
            instructions = self._carry_out(self.membership.dismiss_joining())
            if self.membership.view.number > 1:
                # A member of a View that the others have not entered would wait for them. Workers that have finished
                # have nothing left to abort.
                instructions.append(SendAbort(None, workers_only=True))
        if self.summary is None or _samples(message) > _samples(self.summary):
            self.summary = message  # the worker with the most samples measured the speed best
        return [*instructions, *self._proceed(now)]

    def on_failed(self, message: Failed, now: float) -> list[Instruction]:
        """A worker reports an exception."""
        process = self._processes[message.worker_id]
        if process.has_reported or message.life != process.life:
            return []  # a duplicate, or from an earlier life
        if self.membership.is_restarting(message.worker_id):
            return []  # because of the failure that all restart for
        process.failed = message
        self.failures.exceptions.append(message)
        return [*self._on_failure(message.worker_id, message, now), *self._proceed(now)]

    def on_exit(self, exit: Exit, now: float) -> list[Instruction]:
        process = self._processes[exit.worker_id]
        if process.exit is not None or exit.life != process.life:
            return []
        process.exit, process.exit_at = exit, now
        self.heartbeats.on_end(exit.worker_id)
        if self.membership.is_restarting(exit.worker_id) and self.phase == "running":
            return self._carry_out(self.membership.on_failure(exit.worker_id, exit.life, now))
        # A process that exits by itself may have sent its exception, which is still on its way. One that was killed, or
        # lost with its host, has not.
        instructions = self._on_crash(process, now) if exit.code is None else []
        if process.failed is not None:
            instructions += self._replace(exit.worker_id, now)
        return [*instructions, *self._proceed(now)]

    def on_interrupt(self, now: float) -> list[Instruction]:
        """Ctrl-C: the first saves and stops, the second kills."""
        if self.phase == "ended":
            return []
        return self.stop(now) if self.phase == "running" else self._kill_all(now)

    def stop(self, now: float) -> list[Instruction]:
        """Save and stop, if the run is not ending already; a second call does nothing."""
        if self.phase != "running":
            return []
        self.phase, self._deadline = "stopping", now + STOPPING_GRACE_S
        return [SendStop()]

    def resize(self, change: int) -> list[Instruction]:
        if self.phase != "running" or self.summary is not None or not change:
            return []
        return self._carry_out(self.membership.resize(change))

    def on_tick(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for worker_id, why in self.heartbeats.find_hung(now).items():
            if worker_id not in self.failures.hung and self.phase in ("running", "stopping"):
                self.failures.hung[worker_id] = why
                self.heartbeats.on_killed(worker_id)
                instructions.append(KillProcess(worker_id))  # `on_exit` then handles its end like any other
        for process in self._processes.values():
            if process.exit is not None and now - process.exit_at >= MESSAGE_GRACE_S:
                instructions += self._on_crash(process, now)
        if now >= self._deadline and self.phase != "ended":
            instructions += self._kill_all(now)
        return [*instructions, *self._proceed(now)]

    # What a failure leads to

    def _on_crash(self, process: _Process, now: float) -> list[Instruction]:
        """A process ended without a message."""
        assert process.exit is not None
        if process.has_reported or process.has_failed or self._is_killed:
            return []
        was_dismissed = not self.membership.is_running(process.exit.worker_id)
        if not was_dismissed and (self.summary is None or process.exit.signal is not None):
            self.failures.crashes.append(process.exit)
        return self._on_failure(process.exit.worker_id, process.exit, now)

    def _on_failure(self, worker_id: int, cause: Failure, now: float) -> list[Instruction]:
        process = self._processes[worker_id]
        process.has_failed = True
        if self.phase in ("failing", "ended") or self._is_killed or not self.membership.is_running(worker_id):
            return []
        if self.summary is not None:
            # The run is complete and saved. The others may still wait for the failed worker, but not for long.
            self._deadline = min(self._deadline, now + FAILING_GRACE_S)
            return []
        if self.membership.policy == "stop" or self.failures.would_repeat(cause):
            return self._fail(cause, now)
        if isinstance(cause, Failed) and process.exit is None:
            return []  # `on_exit` replaces it: two lives of one process must not overlap
        return self._replace(worker_id, now)

    def _replace(self, worker_id: int, now: float) -> list[Instruction]:
        """Continue without a process that is gone, and with a replacement if the policy asks for one."""
        process = self._processes[worker_id]
        if self.phase in ("failing", "ended") or self._is_killed or self.summary is not None:
            return []
        cause = process.failed or process.exit
        assert cause is not None
        is_running = self.phase == "running"
        ended = {n for n, p in self._processes.items() if p.exit is not None}
        decisions = self.membership.on_failure(worker_id, process.life, now, replace=is_running, ended=ended)
        if self.membership.too_many_failures(now) and is_running:
            return self._give_up(cause, now)
        if not self.membership.has_workers:
            return self._fail(cause, now)
        if not is_running and (not self.membership.survivors or self.membership.is_server(worker_id)):
            return self._fail(cause, now)
        is_replaced = any(isinstance(d, StartProcess) for d in decisions)
        return [
            ReportFailure(cause, is_replaced, self.failures.hung.pop(worker_id, "")),
            *self._carry_out(decisions),
        ]

    def _give_up(self, cause: Failure, now: float) -> list[Instruction]:
        """Too many failures: the survivors save and stop."""
        self.failures.fatal, self.failures.too_many = cause, True
        if not self.membership.survivors:
            return self._fail(cause, now)
        self.phase, self._deadline = "giving up", now + STOPPING_GRACE_S
        return [*self._carry_out(self.membership.keep_survivors()), SendStop(by_user=False)]

    def _fail(self, cause: Failure, now: float) -> list[Instruction]:
        if self.phase in ("failing", "ended"):
            return []
        self.failures.fatal = self.failures.fatal or cause
        self.phase, self._deadline = "failing", now + FAILING_GRACE_S
        return [SendAbort(cause)]

    def _kill_all(self, now: float) -> list[Instruction]:
        self._is_killed = True
        self._deadline = now + FAILING_GRACE_S  # repeated if a process is still there by then
        return [KillAll()]

    # The course of the run

    def _carry_out(self, decisions: list[Decision]) -> list[Instruction]:
        """Turn decisions of the membership into instructions."""
        for decision in decisions:
            if isinstance(decision, StartProcess):
                self._processes[decision.worker_id] = _Process(life=decision.life)
        instructions: list[Instruction] = list(decisions)
        if self.phase == "stopping" and any(isinstance(d, PublishView) for d in decisions):
            instructions.append(SendStop(by_user=False))  # a worker that joins now has not received it
        return instructions

    def _proceed(self, now: float) -> list[Instruction]:
        """End the run when all workers are gone, then the servers."""
        if self.phase == "ended":
            return []
        servers = [p for n, p in self._processes.items() if self.membership.is_server(n)]
        workers = [p for n, p in self._processes.items() if not self.membership.is_server(n)]
        if any(p.exit is None for p in workers) or not all(self._is_killed or p.is_settled(now) for p in workers):
            return []
        if any(p.exit is None for p in servers):
            if self._has_released:
                return []
            self._has_released = True
            self._deadline = min(self._deadline, now + STOPPING_GRACE_S)
            return [ReleaseServers()]
        if not all(self._is_killed or p.is_settled(now) for p in servers):
            return []
        self.phase = "ended"
        log = self.failures
        causes = [*log.crashes, *(e for e in log.exceptions if not (e.consequence and self._is_killed))]
        if log.fatal is not None or (self.summary is None and causes):
            return [EndRun("failed")]
        if self.summary is None:
            return [EndRun("killed")]
        return [EndRun("stopped" if self.summary.stopped_early else "finished")]


def _can_change_view(supervision: Supervision) -> bool:
    return supervision.phase in ("running", "stopping") and supervision.summary is None


def _samples(message: Finished) -> int:
    samples: int = message.summary.get("samples", 0)
    return samples
