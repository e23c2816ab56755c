"""`RunRecord`: everything of a run that the page shows, folded from its events.

Here: curves at full length, each worker's rate and phases, and what happened when, on one clock that stands still
while a run that was stopped waits to be resumed. Not here: what a run has come to by now (`view/state.py`, which this
builds on), how anything is drawn (`line_chart.py` and its neighbours), files (`load.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from syncline.telemetry.events import (
    Evaluated,
    Event,
    Logged,
    Noted,
    Progress,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    Warned,
    WentOn,
    WorkerFailure,
    WorkerLost,
    WorkerReady,
    WorkerSlow,
)
from syncline.telemetry.predictions import Predictions
from syncline.view.state import RunState
from syncline.view.words import headline

__all__ = ["Mark", "Point", "RunRecord", "Status", "Window", "record_of"]

Status = Literal["empty", "starting", "running", "finished", "stopped", "failed", "killed", "crashed"]
MarkKind = Literal["loss", "change", "slow", "warning", "end", "start", "note"]


class Point(NamedTuple):
    """A number at a moment of the run; `epoch` is None where nobody counts epochs."""

    step: int
    epoch: float | None
    time_s: float
    value: float


class Window(NamedTuple):
    """What one worker did between two of its reports."""

    time_s: float
    samples: int
    seconds: float
    step: int = 0


class Mark(NamedTuple):
    """Something that happened, in words."""

    time_s: float
    step: int
    kind: MarkKind
    words: str


@dataclass
class WorkerRecord:
    """What is known of one worker over the whole run."""

    windows: list[Window] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    _last_step: int | None = None

    def advance(self, event: Progress, time_s: float) -> None:
        """Take in one report. How many steps the first one of a session covers is not known, so it counts for none."""
        self.windows.append(Window(time_s, event.samples, event.seconds, event.step))
        if self._last_step is not None and event.step > self._last_step:
            self.steps += event.step - self._last_step
            for name, seconds in event.phases.items():
                self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._last_step = event.step

    def begin_session(self, step: int) -> None:
        """The run starts, or goes on after `step` steps."""
        self._last_step = step


class RunRecord:
    """The fold over a run's events: call `apply` with each, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = RunState()
        self.plan: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.curves: dict[str, list[Point]] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.marks: list[Mark] = []
        self.parameters = 0
        self.events = 0
        self.seconds = 0.0
        """On the run's own clock."""
        self.started_at = 0.0
        self.is_live = False
        self.predictions: Predictions | None = None
        self._before_s = self._session_start = 0.0

    @property
    def status(self) -> Status:
        """How the run is, to judge by its last words and whether anybody is there to say more."""
        if self.events == 0:
            return "starting" if self.is_live else "empty"
        if self.state.summary is not None:
            return "finished"
        if self.state.ended is not None:
            reason = self.state.ended.reason
            return "stopped" if reason in ("stopped", "interrupted") else "killed" if reason == "killed" else "failed"
        if not self.is_live:
            return "crashed"
        return "starting" if self.state.is_starting else "running"

    @property
    def metrics(self) -> dict[str, float]:
        """The final ones, or the latest."""
        if self.state.summary is not None:
            return dict(self.state.summary.metrics)
        latest = dict(self.state.metrics)
        if self.state.loss is not None and not self.state.plan.is_own_loop:
            latest.setdefault("train/loss", self.state.loss)
        return latest

    @property
    def samples_per_s(self) -> float:
        """Over the whole run: of all workers, while they trained."""
        if self.state.summary is not None:
            return self.state.summary.samples_per_s
        rates = [(sum(w.samples for w in r.windows), sum(w.seconds for w in r.windows)) for r in self.workers.values()]
        return sum(samples / seconds for samples, seconds in rates if seconds > 0)

    @property
    def peak_memory_bytes(self) -> dict[int, int]:
        """By worker; known at the end."""
        return dict(self.state.summary.peak_memory_bytes) if self.state.summary is not None else {}

    def apply(self, event: Event) -> None:
        """Take in one event."""
        self.events += 1
        if isinstance(event, RunStarted):
            self._begin_session(event)
        time_s = self._clock(event.time)
        self.seconds = max(self.seconds, time_s)
        self.state.apply(event)
        match event:
            case Progress():
                self._on_progress(event, time_s)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._add(name, Point(event.step, float(event.epoch), time_s, value))
            case Logged():
                for name, value in event.metrics.items():
                    self._add(name, Point(event.step, None, time_s, value))
            case WorkerReady():
                self.parameters = event.parameters
            case _:
                self._note(event, time_s)

    def _clock(self, time: float) -> float:
        return self._before_s + max(time - self._session_start, 0.0)

    def _begin_session(self, event: RunStarted) -> None:
        """What is behind the checkpoint from which a run goes on happens again: the curves forget it."""
        self._before_s, self._session_start = self.seconds, event.time
        self.started_at = self.started_at or event.time
        self.plan, self.machine = event.plan, event.machine
        step = event.resumed_from_step or 0
        self.curves = {name: [p for p in points if p.step <= step] for name, points in self.curves.items()}
        for worker in self.workers.values():
            worker.begin_session(step)
        if event.resumed_from_step is not None:
            self.marks.append(Mark(self._before_s, step, "start", f"resumed after step {step:,}"))

    def _on_progress(self, event: Progress, time_s: float) -> None:
        worker = self.workers.get(event.rank)
        if worker is None:
            worker = self.workers[event.rank] = WorkerRecord()
            worker.begin_session(self.state.resumed_from_step or 0)
        worker.advance(event, time_s)
        if event.rank != self.state.speaker:
            return
        samples = self.state.plan.train_samples
        epoch = event.epoch + event.cursor / samples if samples else None
        numbers = {"train/loss": event.loss, "train/accuracy": event.accuracy, "learning rate": event.lr}
        for name, value in numbers.items():
            if value is not None:
                self._add(name, Point(event.step, epoch, time_s, value))

    def _add(self, name: str, point: Point) -> None:
        if math.isfinite(point.value):
            self.curves.setdefault(name, []).append(point)

    def _note(self, event: Event, time_s: float) -> None:
        """What is to be told of an event that is no number."""
        told: list[tuple[MarkKind, str]] = []
        match event:
            case WorkerLost():
                told = [("loss", words) for words in self.state.news]
            case WentOn():
                told = [("change", words) for words in self.state.news]
            case WorkerSlow():
                told = [("slow", words) for words in self.state.news]
            case StrategySwitched():
                told = [("change", f"from here on: {event.strategy}")]
            case Warned():
                told = [("warning", headline(event.message))]
            case WorkerFailure():
                told = [("end", headline(event.message))]
            case RunEnded():
                told = [("end", f"{event.reason}: {headline(event.message)}")]
            case Noted():
                told = [("note", headline(event.message))]
            case Summary():
                told = [("note", "finished")]
        self.marks += [Mark(time_s, self.state.step, kind, words) for kind, words in told if words]


def record_of(name: str, events: Iterable[Event]) -> RunRecord:
    """The record of a run's events."""
    record = RunRecord(name)
    for event in events:
        record.apply(event)
    return record
