"""Who holds the others up: a pure judge of how long workers take for their own part of a step.

Where workers wait for each other, all of them take as many steps in the same time, so rates tell nothing. What differs
is the time that each needs for its own work: data, forward, backward, update, everything but waiting. A worker is
called slow when it has needed much more of it than the others for some seconds, and no longer slow when it has kept up
with them for as long.

Here: `Pace`. Not here: who has stopped altogether (`watch.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from syncline.telemetry.events import WAITING, Progress, WorkerSlow

__all__ = ["Pace"]

SLOW = 1.5
"""So many times the others' work is slow."""
KEEPS_UP = 1.2
"""So many times the others' work is not slow any more."""
SPAN_S = 3.0
"""What was seen in so many seconds counts: a worker that was held up for a moment is not slow."""
_LEAST_STEPS = 5
_LEAST_DIFFERENCE_S = 0.001
"""Below that it is the clock and the scheduler that differ."""
_NOT_ITS_OWN = ("exchange", WAITING)


@dataclass(frozen=True)
class _Piece:
    """What a worker did between two of its reports."""

    time: float
    seconds: float
    steps: int
    work: dict[str, float]


@dataclass
class _Worker:
    last_step: int
    pieces: deque[_Piece] = field(default_factory=deque)

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        while piece.time - self.pieces[0].time > SPAN_S:
            self.pieces.popleft()

    @property
    def is_known(self) -> bool:
        """Whether enough was seen of it."""
        long_enough = sum(p.seconds for p in self.pieces) >= 0.8 * SPAN_S
        return long_enough and sum(p.steps for p in self.pieces) >= _LEAST_STEPS

    def work_per_step(self) -> dict[str, float]:
        steps = sum(p.steps for p in self.pieces)
        phases = {name for p in self.pieces for name in p.work}
        return {name: sum(p.work.get(name, 0.0) for p in self.pieces) / steps for name in phases}


class Pace:
    """How fast each of the present members works."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._slow: set[int] = set()
        self._differs_since: dict[int, float] = {}  # from what was last told of it

    def on_members(self, members: Iterable[int]) -> None:
        """The workers are others from now on, and so are their shares: judge anew."""
        self._slow &= set(members)
        self._workers, self._differs_since = {}, {}

    def on_progress(self, event: Progress) -> WorkerSlow | None:
        """What there is to tell after a worker's report, if anything."""
        worker = self._workers.get(event.rank)
        if worker is None or event.step <= worker.last_step:
            self._workers[event.rank] = _Worker(event.step)  # how many steps its first report covers is not known
            return None
        work = {name: seconds for name, seconds in event.phases.items() if name not in _NOT_ITS_OWN}
        worker.add(_Piece(event.time, event.seconds, event.step - worker.last_step, work))
        worker.last_step = event.step
        return self._judge(event.rank, event)

    def _judge(self, rank: int, event: Progress) -> WorkerSlow | None:
        if not all(worker.is_known for worker in self._workers.values()):
            return None
        mine = self._workers[rank].work_per_step()
        others = [w.work_per_step() for r, w in self._workers.items() if r != rank]
        if not others:
            return None
        own, usual = sum(mine.values()), median(sum(work.values()) for work in others)
        limit = KEEPS_UP if rank in self._slow else SLOW
        is_slow = own > limit * usual and own - usual > _LEAST_DIFFERENCE_S
        if is_slow is (rank in self._slow):
            self._differs_since.pop(rank, None)
            return None
        if event.time - self._differs_since.setdefault(rank, event.time) < SPAN_S:
            return None  # let it be seen whole: the average still holds what was before
        del self._differs_since[rank]
        self._slow ^= {rank}
        excess = {name: s - median(work.get(name, 0.0) for work in others) for name, s in mine.items()}
        return WorkerSlow(
            time=event.time,
            rank=rank,
            step=event.step,
            is_slow=is_slow,
            work_s=own,
            others_s=usual,
            mostly=max(excess, key=lambda name: excess[name]),
        )
