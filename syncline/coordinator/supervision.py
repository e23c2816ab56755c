"""What to do about what happens to workers: a pure state machine. Events in, instructions out.

Here: whether the run goes on, and how it ends. Not here: who takes part when it goes on (`membership.py`), acting on
the decisions (`coordinator.py`), how a process is started or ended (`engines/`). Time comes in as a number, so that
every interleaving can be tested without waiting.

    running --lost: the membership decides--> running
       |  |`--lost too often, or it would happen again--> giving up: the others save --all gone--> ended
       |  |`--nobody is to go on--> failing --all gone, or the limit--> ended
       |   `--Ctrl-C--> stopping --all gone--> ended           (a second Ctrl-C: kill)
       `--all finished and gone--> ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from syncline import errors
from syncline.comms.control import Events, Failed, Finished, Stranded
from syncline.coordinator.membership import Decision, KillOne, Launch, Membership, Publish
from syncline.coordinator.watch import Watch
from syncline.engines.engine import Exit

__all__ = ["End", "Instruction", "Kill", "Lost", "ReleaseServers", "Supervision", "TellAbort", "TellStop"]

MESSAGE_GRACE_S = 2.0
"""A worker's last message and the news of its end come on different ways; this long the message may be late."""
FAILING_GRACE_S = 5.0
"""How long the others have to notice that the run has failed."""
STOPPING_GRACE_S = 60.0
"""How long the workers have to agree on a step, save and end."""


@dataclass(frozen=True)
class TellStop:
    """Ask every worker to save and stop."""

    is_users_wish: bool = True


@dataclass(frozen=True)
class TellAbort:
    """Tell every process, or every worker, that there is nothing to wait for any more."""

    reason: str
    workers_only: bool = False


@dataclass(frozen=True)
class Kill:
    """End all processes now."""


@dataclass(frozen=True)
class ReleaseServers:
    """The workers are done: servers of parameters may end."""


@dataclass(frozen=True)
class Lost:
    """Tell the user that a process was lost, and that the run goes on."""

    cause: Failed | Exit
    replaced: bool
    hung: str = ""
    """Why it was ended by us, if it was."""


@dataclass(frozen=True)
class End:
    """Nobody is left: the run is over."""

    outcome: Literal["finished", "stopped", "failed", "killed"]


Instruction = TellStop | TellAbort | Kill | ReleaseServers | Lost | End | Publish | Launch | KillOne


@dataclass
class _Process:
    """What is known of the present life of a process."""

    life: int = 0
    finished: Finished | None = None
    failed: Failed | None = None
    exit: Exit | None = None
    exit_at: float = 0.0
    is_lost: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether it is known how this process ended."""
        return self.finished is not None or self.failed is not None


@dataclass
class Supervision:
    """The state of all processes of a run."""

    membership: Membership
    failures: list[Failed] = field(default_factory=list)
    crashes: list[Exit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processes = {number: _Process() for number in self.membership.here}
        self._phase: Literal["running", "stopping", "giving up", "failing", "ended"] = "running"
        self._deadline = float("inf")
        self._is_killed = self._has_released = False
        self._interrupts = 0
        self._summary: Finished | None = None
        self._fatal: Failed | Exit | None = None
        self._watch = Watch()
        self._hung: dict[int, str] = {}
        self.lost_too_many = False
        """Whether the run was ended because it kept losing processes."""

    @property
    def has_ended(self) -> bool:
        """Whether `End` was given out."""
        return self._phase == "ended"

    @property
    def summary(self) -> Finished | None:
        """What a worker said at the end of the run. All know the same; before that, everything was saved."""
        return self._summary

    @property
    def gave_up(self) -> bool:
        """Whether the run was ended, its work saved, because it kept failing."""
        return self._phase == "ended" and self._fatal is not None and self._summary is not None

    def why_given_up(self, number: int) -> str:
        """Why a process was ended by us, in words; empty if it ended otherwise, or the run went on without it."""
        return self._hung.get(number, "")

    def on_start(self, number: int, now: float) -> None:
        """A process was started."""
        self._watch.on_start(number, now)

    def on_sign(self, message: Events, now: float) -> None:
        """A process lives."""
        if message.life == self._processes[message.rank].life:
            self._watch.on_sign(message.rank, message.step, message.waits, now)

    def on_ready(self, number: int, life: int, now: float) -> list[Instruction]:
        """A process that was started later is ready to take part."""
        del now
        if self._phase not in ("running", "stopping") or self._summary is not None:
            return []
        return self._told(self.membership.on_ready(number, life))

    def on_stranded(self, message: Stranded, now: float) -> list[Instruction]:
        """A worker has lost its line to the others, and nobody is known to be lost: let them meet anew."""
        process = self._processes[message.rank]
        if message.life != process.life or self._phase not in ("running", "stopping") or self._summary is not None:
            return []
        return self._told(self.membership.on_stranded(message.view, now))

    def on_finished(self, message: Finished, now: float) -> list[Instruction]:
        """A worker has done its part."""
        process = self._processes[message.rank]
        if not process.is_settled:
            process.finished = message
            is_first = self._summary is None
            if message.summary and (self._summary is None or _samples(message) > _samples(self._summary)):
                self._summary = message  # who was there longest knows best how fast it went
            if message.summary and is_first:
                return [*self._dismiss_late(), *self._proceed(now)]
        return self._proceed(now)

    def on_failed(self, message: Failed, now: float) -> list[Instruction]:
        """A worker says that it cannot go on."""
        process = self._processes[message.rank]
        if process.is_settled or message.life != process.life:
            return []  # said before, or by an earlier life
        process.failed = message
        self.failures.append(message)
        return [*self._lose(message.rank, message, now), *self._proceed(now)]

    def on_exit(self, exit: Exit, now: float) -> list[Instruction]:
        """A process has ended."""
        process = self._processes[exit.rank]
        if process.exit is not None or exit.life != process.life:
            return []
        process.exit, process.exit_at = exit, now
        self._watch.on_end(exit.rank)
        # Who ends by itself may have said why, and that is on its way; who was killed, or lost with its place, has not.
        instructions = self._crash(process, now) if exit.code is None else []
        if process.failed is not None:
            instructions += self._replace(exit.rank, now)
        return [*instructions, *self._proceed(now)]

    def on_interrupt(self, now: float) -> list[Instruction]:
        """The user wants the run to end: first time cleanly, second time at once."""
        self._interrupts += 1
        if self._phase == "ended":
            return []
        if self._interrupts == 1 and self._phase == "running":
            return self.stop(now)
        return self._kill(now)

    def stop(self, now: float) -> list[Instruction]:
        """End cleanly, if the run is not ending already; to wish it twice does no harm."""
        if self._phase != "running":
            return []
        self._phase, self._deadline = "stopping", now + STOPPING_GRACE_S
        return [TellStop()]

    def on_tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        instructions: list[Instruction] = []
        for number, why in self._watch.hung(now).items():
            if number not in self._hung and self._phase in ("running", "stopping"):
                self._hung[number] = why
                self._watch.on_given_up(number)
                instructions.append(KillOne(number))  # its end is then heard of like any other
        for process in self._processes.values():
            if process.exit is not None and now - process.exit_at >= MESSAGE_GRACE_S:
                instructions += self._crash(process, now)
        if now >= self._deadline and self._phase != "ended":
            instructions += self._kill(now)
        return [*instructions, *self._proceed(now)]

    def add(self, count: int) -> list[Instruction]:
        """Take more workers in."""
        if self._phase != "running" or self._summary is not None:
            return []
        return self._told(self.membership.add(count))

    def remove(self, count: int) -> list[Instruction]:
        """Let workers go."""
        if self._phase != "running" or self._summary is not None:
            return []
        return self._told(self.membership.remove(count))

    def first_cause(self) -> Failed | Exit | None:
        """What ended the run; a failure that is only a consequence of another one counts last."""
        if self._fatal is not None and not (isinstance(self._fatal, Failed) and self._fatal.consequence):
            return self._fatal
        causes = [f for f in self.failures if not f.consequence]
        if causes:
            return causes[-1]
        if self.crashes:  # those that were not our own doing
            return self.crashes[-1]
        return self._fatal or (self.failures[-1] if self.failures else None)

    # What a loss means

    def _crash(self, process: _Process, now: float) -> list[Instruction]:
        """A process ended without a word, unless it was we who ended it."""
        assert process.exit is not None
        if process.is_settled or process.is_lost or self._is_killed:
            return []
        is_ours = not self.membership.is_here(process.exit.rank)  # who was about to join and is needed no more
        if not is_ours and (self._summary is None or process.exit.signal is not None):
            self.crashes.append(process.exit)
        return self._lose(process.exit.rank, process.exit, now)

    def _lose(self, number: int, cause: Failed | Exit, now: float) -> list[Instruction]:
        process = self._processes[number]
        process.is_lost = True
        if self._phase in ("failing", "ended") or self._is_killed or not self.membership.is_here(number):
            return []
        if self._summary is not None:
            # The run has reached its end, and it is saved: who is still here may wait for the lost one, but not long.
            self._deadline = min(self._deadline, now + FAILING_GRACE_S)
            return []
        if self.membership.policy == "stop" or self._would_happen_again(cause):
            return self._fail(cause, now)
        if isinstance(cause, Failed) and process.exit is None:
            return []  # `on_exit` goes on with it: two lives of one process must not overlap
        return self._replace(number, now)

    def _replace(self, number: int, now: float) -> list[Instruction]:
        """Go on without a process that is gone, and with another in its place if that is the policy."""
        process = self._processes[number]
        if self._phase in ("failing", "ended") or self._is_killed or self._summary is not None:
            return []
        cause = process.failed or process.exit
        assert cause is not None, "it is gone"
        runs_on = self._phase == "running"
        decisions = self.membership.on_lost(number, process.life, now, replace=runs_on)
        if self.membership.too_many_losses(now) and runs_on:
            return self._give_up(cause, now)
        if not self.membership.has_workers:
            return self._fail(cause, now)
        if not runs_on and (not self.membership.survivors or self.membership.is_server(number)):
            return self._fail(cause, now)
        replaced = any(isinstance(d, Launch) for d in decisions)
        return [Lost(cause, replaced, self._hung.pop(number, "")), *self._told(decisions)]

    def _would_happen_again(self, cause: Failed | Exit) -> bool:
        """Whether another process in its place would fail in the same way."""
        if not isinstance(cause, Failed):
            return False
        own = getattr(errors, cause.kind, None)
        is_own = isinstance(own, type) and issubclass(own, errors.SynclineError) and own is not errors.PeerLost
        earlier = [f for f in self.failures if f is not cause and (f.kind, f.step) == (cause.kind, cause.step)]
        return is_own or cause.is_first_step or (bool(earlier) and not cause.consequence)

    def _dismiss_late(self) -> list[Instruction]:
        """The run is complete and saved. Who was about to join has nobody to join any more."""
        instructions = self._told(self.membership.dismiss())
        if self.membership.view.number > 1:
            # A member of a View that the others have not entered would wait for them; those who have finished, too,
            # but for their last word, do not mind.
            instructions.append(TellAbort("the run is complete", workers_only=True))
        return instructions

    def _give_up(self, cause: Failed | Exit, now: float) -> list[Instruction]:
        """Too many were lost: those who are left save and stop."""
        self._fatal, self.lost_too_many = cause, True
        if not self.membership.survivors:
            return self._fail(cause, now)
        self._phase, self._deadline = "giving up", now + STOPPING_GRACE_S
        decisions = self.membership.go_on_with_survivors()
        return [*self._told(decisions), TellStop(is_users_wish=False)]

    def _fail(self, cause: Failed | Exit, now: float) -> list[Instruction]:
        if self._phase in ("failing", "ended"):
            return []
        self._fatal = self._fatal or cause
        self._phase, self._deadline = "failing", now + FAILING_GRACE_S
        what = cause.kind if isinstance(cause, Failed) else cause.in_words()
        return [TellAbort(f"worker {cause.rank}: {what}")]

    def _kill(self, now: float) -> list[Instruction]:
        self._is_killed = True
        self._deadline = now + FAILING_GRACE_S  # said again if somebody is still there then
        return [Kill()]

    def _told(self, decisions: list[Decision]) -> list[Instruction]:
        for decision in decisions:
            if isinstance(decision, Launch):
                self._processes[decision.number] = _Process(life=decision.life)
        instructions: list[Instruction] = list(decisions)
        if self._phase == "stopping" and any(isinstance(d, Publish) for d in decisions):
            instructions.append(TellStop(is_users_wish=False))  # who joins now has not heard it
        return instructions

    def _proceed(self, now: float) -> list[Instruction]:
        if self._phase == "ended":
            return []
        servers = [p for n, p in self._processes.items() if self.membership.is_server(n)]
        workers = [p for n, p in self._processes.items() if not self.membership.is_server(n)]
        if any(p.exit is None for p in workers) or not self._are_known(workers, now):
            return []
        if any(p.exit is None for p in servers):
            if self._has_released:
                return []
            self._has_released = True
            self._deadline = min(self._deadline, now + STOPPING_GRACE_S)
            return [ReleaseServers()]
        if not self._are_known(servers, now):
            return []
        self._phase = "ended"
        causes = [*self.crashes, *(f for f in self.failures if not (f.consequence and self._is_killed))]
        if self._fatal is not None or (self._summary is None and causes):
            return [End("failed")]
        if self._summary is None:
            return [End("killed")]
        return [End("stopped" if self._summary.stopped_early else "finished")]

    def _are_known(self, processes: list[_Process], now: float) -> bool:
        """Whether it is known how all of them ended; who ended without a word may have one still on its way."""
        late = [p for p in processes if not p.is_settled and not p.is_lost and not self._is_killed]
        return all(now - p.exit_at >= MESSAGE_GRACE_S for p in late)


def _samples(message: Finished) -> int:
    """How many samples were used while this worker was there."""
    samples: int = message.summary.get("samples", 0)
    return samples
