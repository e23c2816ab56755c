"""`Profile`: what a worker's step costs, measured on a machine; and `profile_of`, which reads it off a run's events.

Every run reports how long its workers spent in each phase, four times a second. Those values, one per interval and
worker, give a median and quartiles for free. Here: the type and reading it. Not here: keeping it (`profile_store.py`),
and runs that are made only to be measured (`planner` of `syncline plan`, above the driver).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from syncline.planning.cost.ranges import Range
from syncline.planning.plan import Plan
from syncline.telemetry.events import WAITING, Event, Progress, Summary

COMPUTE: tuple[Literal["data", "forward", "backward", "update"], ...] = ("data", "forward", "backward", "update")
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
    """What was read of one worker."""

    last_step: int | None = None
    phases: dict[str, list[float]] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)


def profile_of(events: Iterable[Event], plan: Plan) -> Profile | None:
    """What a run's events say of a step; None if it was too short to measure, or computed otherwise than in steps."""
    seen: dict[int, _Seen] = {}
    started = first = None
    memory = 0
    for event in events:
        started = event.time if started is None else started
        if isinstance(event, Summary):
            memory = max(event.peak_memory_bytes.values(), default=0)
        if isinstance(event, Progress) and event.phases:
            first = event.time if first is None else first
            _read(seen.setdefault(event.worker_id, _Seen()), event)
    names = {name for worker in seen.values() for name in worker.phases}
    measured = {name: [v for worker in seen.values() for v in worker.phases.get(name, [])] for name in names}
    intervals = max((len(values) for values in measured.values()), default=0)
    if intervals < _FEWEST_INTERVALS:
        return None
    phases = {name: Range.of(values) for name, values in measured.items() if name != WAITING}
    return Profile(
        phases=phases,
        waiting_s=Range.of(measured[WAITING]) if WAITING in measured else Range.exactly(0.0),
        noise_s=_noise_s(seen),
        share=plan.batch / plan.size,
        workers=plan.size,
        threads=plan.workers[0].threads,
        strategy=plan.strategy,
        memory_bytes=memory,
        start_up_s=0.0 if started is None or first is None else max(0.0, first - started),
        intervals=intervals,
    )


def _read(worker: _Seen, event: Progress) -> None:
    """The first interval of a worker warms up: caches, the allocator, and whatever comes before its first step."""
    before, worker.last_step = worker.last_step, event.step
    if before is None or event.step <= before:
        return
    steps = event.step - before
    for name, seconds in event.phases.items():
        worker.phases.setdefault(name, []).append(seconds / steps)
    computing = sum(seconds for name, seconds in event.phases.items() if name in COMPUTE)
    worker.steps.append((steps, computing / steps))


def _noise_s(seen: Mapping[int, _Seen]) -> float:
    """From means over several steps, whose deviation is smaller by the root of their number."""
    deviations = []
    for worker in seen.values():
        if len(worker.steps) > 1:
            mean = statistics.fmean(seconds for _, seconds in worker.steps)
            squares = [steps * (seconds - mean) ** 2 for steps, seconds in worker.steps]
            deviations.append(statistics.median(squares) ** 0.5)
    return statistics.fmean(deviations) if deviations else 0.0
