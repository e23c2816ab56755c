"""`Profile`: what a worker's step costs, measured on a machine; and `profile_of`, which reads it off a run's events.

Every run reports how long its workers spent in each phase, four times a second. Those values, one per interval and
worker, give a median and quartiles for free. Here: the type and reading it. Not here: keeping it (`profile_store.py`),
and runs that are made only to be measured (`syncline/measuring.py`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from syncline.planning.cost.ranges import Range
from syncline.planning.plan import Plan
from syncline.telemetry.events import WAITING, Event, Progress, Summary

COMPUTE: tuple[Literal["data", "forward", "backward", "compute", "update"], ...] = (
    "data", "forward", "backward", "compute", "update",
)  # fmt: skip
"""`compute` is forward and backward together, in a user's own loop."""
_MOST_INTERVALS = 400
"""Of a worker, for medians and quartiles: the latest 100 seconds."""
_FEWEST_INTERVALS = 3
_LARGEST_SPREAD = 0.5
"""Quartiles that are further apart than this, relative to the median, mean that something else was running."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A worker's step, by phase, with the load that it was measured under."""

    phases: Mapping[str, Range]
    """Seconds of a step in each phase of computing, and `exchange`."""
    waiting_s: Range
    """Seconds of a step in which a worker waited for others."""
    noise_s: float
    """The standard deviation of a worker's time of one step."""
    share: float
    """Samples of a worker's step."""
    workers: int
    """How many workers computed at the same time on this machine."""
    threads: int
    strategy: str
    memory_bytes: int = 0
    """The largest peak of a worker."""
    start_up_s: float = 0.0
    """From the start of the run until its workers had taken a step."""
    intervals: int = 0

    @property
    def compute_s(self) -> Range:
        return Range.sum(self.phases[name] for name in COMPUTE if name in self.phases)

    @property
    def is_steady(self) -> bool:
        """Whether the measured values agree well enough to be believed."""
        return self.intervals >= _FEWEST_INTERVALS and self.compute_s.spread <= _LARGEST_SPREAD

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        return msgspec.convert(data, cls)


@dataclass
class _Seen:
    """What was read of one worker: of its latest intervals, so that a long run takes no more memory."""

    last_step: int | None = None
    phases: dict[str, deque[float]] = field(default_factory=dict)
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MOST_INTERVALS))
    taken: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    bytes_sent: int = 0

    def read(self, event: Progress) -> None:
        """The first interval of a worker warms up: caches, the allocator, and whatever comes before its first step."""
        before, self.last_step = self.last_step, event.step
        if before is None or event.step <= before:
            return
        steps = event.step - before
        for name, seconds in event.phases.items():
            self.phases.setdefault(name, deque(maxlen=_MOST_INTERVALS)).append(seconds / steps)
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        computing = sum(seconds for name, seconds in event.phases.items() if name in COMPUTE)
        self.steps.append((steps, computing / steps))
        self.taken += steps
        self.bytes_sent += event.bytes_sent


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What the steps of a run took: means over workers and steps, without each worker's first interval."""

    terms: Mapping[str, float]
    """Seconds of a step, by phase; waiting for others is one."""
    bytes_per_step: float
    """Sent by a worker."""
    steps: int
    """Of all workers together."""
    memory_bytes: int = 0
    """The largest peak of a worker; 0 if it is not known."""

    @property
    def step_s(self) -> float:
        return sum(self.terms.values())


class ProfileReader:
    """Reads the steps of a run off its events, one after another."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._started: float | None = None
        self._first: float | None = None
        self._memory = 0

    def add(self, event: Event) -> None:
        self._started = event.time if self._started is None else self._started
        if isinstance(event, Summary):
            self._memory = max(event.peak_memory_bytes.values(), default=0)
        if isinstance(event, Progress) and event.phases:
            self._first = event.time if self._first is None else self._first
            self._seen.setdefault(event.worker_id, _Seen()).read(event)

    @property
    def intervals(self) -> int:
        """Of the worker that has reported the fewest; its first one is not counted."""
        return min((len(worker.steps) for worker in self._seen.values()), default=0)

    @property
    def workers(self) -> int:
        """How many workers have reported."""
        return len(self._seen)

    def fact(self) -> Fact | None:
        """What a step took; None before there is one."""
        taken = sum(worker.taken for worker in self._seen.values())
        if not taken:
            return None
        spent: dict[str, float] = {}
        for worker in self._seen.values():
            for name, seconds in worker.spent.items():
                spent[name] = spent.get(name, 0.0) + seconds
        return Fact(
            terms={name: seconds / taken for name, seconds in spent.items()},
            bytes_per_step=sum(worker.bytes_sent for worker in self._seen.values()) / taken,
            steps=taken,
            memory_bytes=self._memory,
        )

    def profile(self, plan: Plan) -> Profile | None:
        """What is known of a step; None if the run was too short to measure, or computed otherwise than in steps."""
        names = {name for worker in self._seen.values() for name in worker.phases}
        measured = {name: [v for w in self._seen.values() for v in w.phases.get(name, ())] for name in names}
        intervals = max((len(values) for values in measured.values()), default=0)
        if intervals < _FEWEST_INTERVALS:
            return None
        phases = {name: Range.of(values) for name, values in measured.items() if name != WAITING}
        known = self._started is not None and self._first is not None
        return Profile(
            phases=phases,
            waiting_s=Range.of(measured[WAITING]) if WAITING in measured else Range.exactly(0.0),
            noise_s=_noise_s(self._seen),
            share=plan.batch / plan.size,
            workers=plan.size,
            threads=plan.workers[0].threads,
            strategy=plan.strategy,
            memory_bytes=self._memory,
            start_up_s=max(0.0, self._first - self._started) if known else 0.0,  # type: ignore[operator]
            intervals=intervals,
        )


def profile_of(events: Iterable[Event], plan: Plan) -> Profile | None:
    """The profile that a run's events show."""
    reader = ProfileReader()
    for event in events:
        reader.add(event)
    return reader.profile(plan)


def _noise_s(seen: Mapping[int, _Seen]) -> float:
    """From means over several steps, whose deviation is smaller by the root of their number."""
    deviations = []
    for worker in seen.values():
        if len(worker.steps) > 1:
            mean = statistics.fmean(seconds for _, seconds in worker.steps)
            squares = [steps * (seconds - mean) ** 2 for steps, seconds in worker.steps]
            deviations.append(statistics.median(squares) ** 0.5)
    return statistics.fmean(deviations) if deviations else 0.0
