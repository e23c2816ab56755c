"""Straggler detection: which workers slow the others down. Pure; fed with Progress events.

Where workers wait for each other, all of them do the same number of steps per second, so rates say nothing. What
differs is the time that each needs for its own work: data, forward, backward, update, everything but waiting. A worker
is a straggler when it has needed much more than the others for some seconds, until it has kept up for as long.

Here: `StragglerDetector`. Not here: processes that have stopped responding (`heartbeats.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from syncline.telemetry.events import WAITING, Progress, WorkerSlow

SLOW = 1.5
"""A worker becomes a straggler at this multiple of the others' time."""
KEEPS_UP = 1.2
"""A straggler has caught up below this multiple."""
SPAN_S = 3.0
"""Length of the sliding window: a worker that was held up for a moment is no straggler."""
_LEAST_STEPS = 5
_LEAST_DIFFERENCE_S = 0.001
"""Smaller differences are noise of the clock and the scheduler."""
_WAITING_PHASES = ("exchange", WAITING)


@dataclass(frozen=True)
class _Interval:
    """What a worker did between two Progress events."""

    time: float
    seconds: float
    steps: int
    work: dict[str, float]


@dataclass
class _Window:
    last_step: int
    intervals: deque[_Interval] = field(default_factory=deque)

    def add(self, interval: _Interval) -> None:
        self.intervals.append(interval)
        while interval.time - self.intervals[0].time > SPAN_S:
            self.intervals.popleft()

    @property
    def is_known(self) -> bool:
        """Whether the window holds enough steps to judge."""
        long_enough = sum(p.seconds for p in self.intervals) >= 0.8 * SPAN_S
        return long_enough and sum(p.steps for p in self.intervals) >= _LEAST_STEPS

    def work_per_step(self) -> dict[str, float]:
        steps = sum(p.steps for p in self.intervals)
        phases = {name for p in self.intervals for name in p.work}
        return {name: sum(p.work.get(name, 0.0) for p in self.intervals) / steps for name in phases}


class StragglerDetector:
    """How long each member of the current View works on a step."""

    def __init__(self) -> None:
        self._workers: dict[int, _Window] = {}
        self._slow: set[int] = set()
        self._differs_since: dict[int, float] = {}  # from what was last reported

    def on_members(self, members: Iterable[int]) -> None:
        """A new View: members and their shares of a batch have changed, so measure again."""
        self._slow &= set(members)
        self._workers, self._differs_since = {}, {}

    def on_progress(self, event: Progress) -> WorkerSlow | None:
        """The event to report, if this worker has become a straggler or has caught up."""
        worker = self._workers.get(event.worker_id)
        if worker is None or event.step <= worker.last_step:
            self._workers[event.worker_id] = _Window(event.step)  # the first event covers an unknown number of steps
            return None
        work = {name: seconds for name, seconds in event.phases.items() if name not in _WAITING_PHASES}
        worker.add(_Interval(event.time, event.seconds, event.step - worker.last_step, work))
        worker.last_step = event.step
        return self._judge(event.worker_id, event)

    def _judge(self, worker_id: int, event: Progress) -> WorkerSlow | None:
        if not all(worker.is_known for worker in self._workers.values()):
            return None
        mine = self._workers[worker_id].work_per_step()
        others = [w.work_per_step() for i, w in self._workers.items() if i != worker_id]
        if not others:
            return None
        own, usual = sum(mine.values()), median(sum(work.values()) for work in others)
        limit = KEEPS_UP if worker_id in self._slow else SLOW
        is_slow = own > limit * usual and own - usual > _LEAST_DIFFERENCE_S
        if is_slow is (worker_id in self._slow):
            self._differs_since.pop(worker_id, None)
            return None
        if event.time - self._differs_since.setdefault(worker_id, event.time) < SPAN_S:
            return None  # the window still holds work from before the change
        del self._differs_since[worker_id]
        self._slow ^= {worker_id}
        excess = {name: s - median(work.get(name, 0.0) for work in others) for name, s in mine.items()}
        return WorkerSlow(
            time=event.time,
            worker_id=worker_id,
            step=event.step,
            is_slow=is_slow,
            work_s=own,
            median_s=usual,
            slowest_phase=max(excess, key=lambda name: excess[name]),
        )
