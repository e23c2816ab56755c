"""What to do about what happens to workers: a pure state machine. Events in, instructions out.

Here: deciding. Not here: acting on the decisions (`coordinator.py`), how a process is started or ended (`engines/`).
Time comes in as a number, so that every interleaving can be tested without waiting.

    running --a worker failed--> failing --all gone, or the limit--> ended
       |  `--Ctrl-C--> stopping --all gone--> ended           (a second Ctrl-C: kill)
       `--all finished and gone--> ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from syncline.comms.control import Failed, Finished
from syncline.engines.engine import Exit

__all__ = ["End", "Instruction", "Kill", "Supervision", "TellAbort", "TellStop"]

MESSAGE_GRACE_S = 2.0
"""A worker's last message and the news of its end come on different ways; this long the message may be late."""
FAILING_GRACE_S = 5.0
"""How long the others have to notice that the run has failed."""
STOPPING_GRACE_S = 60.0
"""How long the workers have to agree on a step, save and end."""


@dataclass(frozen=True)
class TellStop:
    """Ask every worker to save and stop."""


@dataclass(frozen=True)
class TellAbort:
    """Tell every worker that one of them is gone."""

    reason: str


@dataclass(frozen=True)
class Kill:
    """End all processes now."""


@dataclass(frozen=True)
class End:
    """Nobody is left: the run is over."""

    outcome: Literal["finished", "stopped", "failed", "killed"]


Instruction = TellStop | TellAbort | Kill | End


@dataclass
class _Worker:
    finished: Finished | None = None
    failed: Failed | None = None
    exit: Exit | None = None
    exit_at: float = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether it is known how this worker ended."""
        return self.finished is not None or self.failed is not None


@dataclass
class Supervision:
    """The state of all workers of a run."""

    size: int
    failures: list[Failed] = field(default_factory=list)
    crashes: list[Exit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._workers = {rank: _Worker() for rank in range(self.size)}
        self._phase: Literal["running", "stopping", "failing", "ended"] = "running"
        self._deadline = float("inf")
        self._killed = False
        self._interrupts = 0

    @property
    def has_ended(self) -> bool:
        """Whether `End` was given out."""
        return self._phase == "ended"

    @property
    def summary(self) -> Finished | None:
        """What the first worker said at its end."""
        return self._workers[0].finished

    def on_finished(self, message: Finished, now: float) -> list[Instruction]:
        """A worker has done its part."""
        worker = self._workers[message.rank]
        if worker.finished is None and worker.failed is None:
            worker.finished = message
        return self._proceed(now)

    def on_failed(self, message: Failed, now: float) -> list[Instruction]:
        """A worker says that it cannot go on."""
        worker = self._workers[message.rank]
        if worker.is_settled:
            return []  # said before
        worker.failed = message
        self.failures.append(message)
        return [*self._fail(f"worker {message.rank}: {message.kind}", now), *self._proceed(now)]

    def on_exit(self, exit: Exit, now: float) -> list[Instruction]:
        """A worker's process has ended."""
        worker = self._workers[exit.rank]
        if worker.exit is not None:
            return []
        worker.exit, worker.exit_at = exit, now
        return [*(self._crash(worker, now) if exit.signal is not None else []), *self._proceed(now)]

    def on_interrupt(self, now: float) -> list[Instruction]:
        """The user wants the run to end: first time cleanly, second time at once."""
        self._interrupts += 1
        if self._phase == "ended":
            return []
        if self._interrupts == 1 and self._phase == "running":
            self._phase, self._deadline = "stopping", now + STOPPING_GRACE_S
            return [TellStop()]
        return self._kill(now)

    def on_tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        instructions: list[Instruction] = []
        for worker in self._workers.values():
            if worker.exit is not None and now - worker.exit_at >= MESSAGE_GRACE_S:
                instructions += self._crash(worker, now)
        if now >= self._deadline and self._phase in ("failing", "stopping"):
            instructions += self._kill(now)
        return [*instructions, *self._proceed(now)]

    def first_cause(self) -> Failed | Exit | None:
        """What went wrong first; a failure that is only a consequence of another one counts last."""
        causes = [f for f in self.failures if not f.consequence]
        if causes:
            return causes[0]
        if self.crashes:  # those that were not our own doing
            return self.crashes[0]
        return self.failures[0] if self.failures else None

    def _crash(self, worker: _Worker, now: float) -> list[Instruction]:
        """A process ended without a word, unless it was we who ended it."""
        assert worker.exit is not None
        if worker.is_settled or self._killed or worker.exit in self.crashes:
            return []
        self.crashes.append(worker.exit)
        return self._fail(f"worker {worker.exit.rank} {worker.exit.in_words()}", now)

    def _fail(self, reason: str, now: float) -> list[Instruction]:
        if self._phase in ("failing", "ended"):
            return []
        self._phase, self._deadline = "failing", now + FAILING_GRACE_S
        return [TellAbort(reason)]

    def _kill(self, now: float) -> list[Instruction]:
        self._killed = True
        self._deadline = now + FAILING_GRACE_S  # said again if somebody is still there then
        return [Kill()]

    def _proceed(self, now: float) -> list[Instruction]:
        workers = self._workers.values()
        if self._phase == "ended" or any(w.exit is None for w in workers):
            return []
        # Everybody is gone. Whoever ended without a word may have one still on its way.
        late = [w for w in workers if not w.is_settled and w.exit not in self.crashes and not self._killed]
        if any(now - w.exit_at < MESSAGE_GRACE_S for w in late):
            return []
        self._phase = "ended"
        if self.failures or self.crashes:
            return [End("failed")]
        if self._killed:
            return [End("killed")]
        stopped = any(w.finished is not None and w.finished.stopped_early for w in workers)
        return [End("stopped" if stopped else "finished")]
