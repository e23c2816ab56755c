"""`RunRecord`: everything of a run that the report shows, folded from its events.

Here: curves at full length, each worker's throughput and phases, and a timeline, on a clock that stands still between a
stop and a resume. Not here: the current state (`observe/state.py`, which this builds on), drawing (`line_chart.py`,
`overview.py`), files (`load.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from syncline.observe.division_text import division_text
from syncline.observe.formatting import headline
from syncline.observe.state import RunState
from syncline.planning.cost.profile import ProfileReader
from syncline.planning.expected import Comparison, Expected, compare
from syncline.telemetry.centroids import Centroids
from syncline.telemetry.events import (
    Evaluated,
    Event,
    FatalFailure,
    GraphDivided,
    HeldPart,
    InfoMessage,
    MetricsLogged,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    WarningMessage,
    WorkerFailure,
    WorkerReady,
    WorkerSlow,
)
from syncline.telemetry.predictions import Predictions

Status = Literal["empty", "starting", "running", "finished", "stopped", "failed", "killed", "crashed"]
MarkKind = Literal["failure", "change", "slow", "warning", "end", "start", "note"]


class Point(NamedTuple):
    """A metric value; `epoch` is None in runs without epochs."""

    step: int
    epoch: float | None
    time_s: float
    value: float


class Window(NamedTuple):
    """What one worker did between two Progress events."""

    time_s: float
    samples: int
    seconds: float
    step: int = 0


class Mark(NamedTuple):
    """An entry of the timeline."""

    time_s: float
    step: int
    kind: MarkKind
    text: str


@dataclass
class WorkerRecord:
    """One worker over the whole run."""

    windows: list[Window] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    bytes_sent: int = 0
    bytes_inside: int = 0
    _last_step: int | None = None

    def advance(self, event: Progress, time_s: float) -> None:
        """Add one event. How many steps the first one of a session covers is unknown, so it counts for none."""
        self.windows.append(Window(time_s, event.samples, event.seconds, event.step))
        if self._last_step is not None and event.step > self._last_step:
            self.steps += event.step - self._last_step
            self.bytes_sent += event.bytes_sent
            self.bytes_inside += event.bytes_inside
            for name, seconds in event.phases.items():
                self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._last_step = event.step

    def begin_session(self, step: int) -> None:
        """The run starts, or resumes after `step` steps."""
        self._last_step = step


class RunRecord:
    """Call `apply` with each event, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = RunState()
        self.plan: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.curves: dict[str, list[Point]] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.marks: list[Mark] = []
        self.parameters = 0
        self.parts: dict[int, HeldPart] = {}
        """What each worker holds, by id, if none holds the whole model; as last reported."""
        self.division: GraphDivided | None = None
        """How the graph is divided, if one is; as last reported."""
        self.events = 0
        self.seconds = 0.0
        """On the run's clock, which stands still between sessions."""
        self.started_at = 0.0
        self.is_live = False
        self.expected: Expected | None = None
        """What was predicted of its steps."""
        self.predictions: Predictions | None = None
        self.centroids: Centroids | None = None
        self._before_s = self._session_start = 0.0
        self._steps = ProfileReader()

    @property
    def comparison(self) -> Comparison | None:
        """Prediction against fact, for the last session; None if there is no prediction, or no steps yet."""
        fact = self._steps.fact()
        return compare(self.expected, fact) if self.expected is not None and fact is not None else None

    @property
    def status(self) -> Status:
        """Judged by the last event, and by whether the run is live."""
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
        """The final metrics, or the latest."""
        if self.state.summary is not None:
            return dict(self.state.summary.metrics)
        latest = dict(self.state.metrics)
        if self.state.loss is not None and not self.state.plan.is_own_loop:
            latest.setdefault("train/loss", self.state.loss)
        return latest

    @property
    def samples_per_s(self) -> float:
        """All workers, over the whole run, without pauses."""
        if self.state.summary is not None:
            return self.state.summary.samples_per_s
        rates = [(sum(w.samples for w in r.windows), sum(w.seconds for w in r.windows)) for r in self.workers.values()]
        return sum(samples / seconds for samples, seconds in rates if seconds > 0)

    @property
    def peak_memory_bytes(self) -> dict[int, int]:
        """By worker id; known at the end of the run."""
        return dict(self.state.summary.peak_memory_bytes) if self.state.summary is not None else {}

    def apply(self, event: Event) -> None:
        self.events += 1
        if isinstance(event, RunStarted):
            self._begin_session(event)
        self._steps.add(event)
        time_s = self._clock(event.time)
        self.seconds = max(self.seconds, time_s)
        self.state.apply(event)
        match event:
            case Progress():
                self._on_progress(event, time_s)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._add(name, Point(event.step, float(event.epoch), time_s, value))
            case MetricsLogged():
                for name, value in event.metrics.items():
                    self._add(name, Point(event.step, None, time_s, value))
            case WorkerReady():
                self.parameters = event.parameters
                if event.part is not None:
                    self.parts[event.worker_id] = event.part
            case _:
                self._note(event, time_s)

    def _clock(self, time: float) -> float:
        return self._before_s + max(time - self._session_start, 0.0)

    def _begin_session(self, event: RunStarted) -> None:
        """Drop the points after the checkpoint that the run resumes from: those steps are repeated."""
        self._before_s, self._session_start = self.seconds, event.time
        self.started_at = self.started_at or event.time
        self.plan, self.machine = event.plan, event.machine
        self._steps = ProfileReader()
        step = event.resumed_from_step or 0
        self.curves = {name: [p for p in points if p.step <= step] for name, points in self.curves.items()}
        for worker in self.workers.values():
            worker.begin_session(step)
        if event.resumed_from_step is not None:
            self.marks.append(Mark(self._before_s, step, "start", f"resumed after step {step:,}"))

    def _on_progress(self, event: Progress, time_s: float) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is None:
            worker = self.workers[event.worker_id] = WorkerRecord()
            worker.begin_session(self.state.resumed_from_step or 0)
        worker.advance(event, time_s)
        if event.worker_id != self.state.reporter_id:
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
        """Add an event without metrics to the timeline."""
        entries: list[tuple[MarkKind, str]] = []
        match event:
            case WorkerFailure():
                entries = [("failure", text) for text in self.state.notices]
            case Recovered():
                entries = [("change", text) for text in self.state.notices]
            case WorkerSlow():
                entries = [("slow", text) for text in self.state.notices]
            case GraphDivided():
                self.division = event
                entries = [("note", division_text(event))]
            case StrategySwitched():
                entries = [("change", f"strategy: {event.strategy}")]
            case WarningMessage():
                entries = [("warning", headline(event.message))]
            case FatalFailure():
                entries = [("end", headline(event.message))]
            case RunEnded():
                entries = [("end", f"{event.reason}: {headline(event.message)}")]
            case InfoMessage():
                entries = [("note", headline(event.message))]
            case Summary():
                entries = [("note", "finished")]
        self.marks += [Mark(time_s, self.state.step, kind, text) for kind, text in entries if text]


def record_of(name: str, events: Iterable[Event]) -> RunRecord:
    """The record of a run's events."""
    record = RunRecord(name)
    for event in events:
        record.apply(event)
    return record
