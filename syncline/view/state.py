"""`RunState`: what a run has come to, folded from its events. Everything that the human views show is read from here.

Here: adding up, smoothing and estimating; no I/O and no clock but the events' own, so that a live run, a replayed one
and a scripted one in a test look the same. Not here: how anything is drawn (`screen.py`, `result.py`, `plain.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from syncline.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Logged,
    Progress,
    RunEnded,
    RunStarted,
    Summary,
    Warned,
    WentOn,
    WorkerFailure,
    WorkerLost,
    WorkerReady,
    WorkerSlow,
)
from syncline.view.losses import Losses
from syncline.view.stragglers import Stragglers
from syncline.view.words import best_metric, clean, count, next_steps

__all__ = ["MOST_WARNINGS", "History", "PlanFacts", "RunState", "Series", "WorkerState", "WorkerStatus"]

WorkerStatus = Literal["starting", "training", "finished", "lost"]

_SMOOTHING_S = 4.0
_LEAST_ELAPSED_S = 1.0
"""Before that, a time left would be a guess about a machine that is still warming up."""
_PHASES = ("data", "forward", "compute", "backward", "exchange", "waiting", "update")
MOST_WARNINGS = 20
"""So many are shown; the rest are in the run's events."""
_MOST_EVALUATIONS = 512
_MOST_LOGGED = 32


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What the views need to know of a plan. Everything is optional: an old run's plan may lack what ours has."""

    kind: str = "train"
    model: str = "model"
    data: str = "data"
    strategy: str = ""
    workers: int = 0
    epochs: int = 0
    train_samples: int = 0
    steps_per_epoch: int = 0
    total_steps: int = 0
    is_cut_short: bool = False
    notes: tuple[str, ...] = ()

    def name_of(self, rank: int) -> str:
        """A process, for people: servers come after the workers."""
        return f"server {rank - self.workers}" if 0 < self.workers <= rank else f"worker {rank}"

    @classmethod
    def of(cls, plan: dict[str, Any]) -> PlanFacts:
        """From `Plan.to_dict()`."""
        steps_per_epoch, total_steps = int(plan.get("steps_per_epoch") or 0), int(plan.get("total_steps") or 0)
        epochs = int(plan.get("epochs") or 0)
        is_cut_short = total_steps < steps_per_epoch * epochs
        if steps_per_epoch and total_steps:  # a limit on the steps may end the run before its last epochs begin
            epochs = min(epochs, -(-total_steps // steps_per_epoch)) or 1
        return cls(
            kind=str(plan.get("kind", "train")),
            model=clean(str(plan.get("model") or "model")),
            data=clean(str(plan.get("data") or "data")),
            strategy=str(plan.get("strategy") or ""),
            workers=len(plan.get("workers") or ()),
            epochs=epochs,
            train_samples=int(plan.get("train_samples") or 0),
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            is_cut_short=is_cut_short,
            notes=tuple(str(note) for note in plan.get("notes") or ()),
        )

    @property
    def is_own_loop(self) -> bool:
        """Whether the user's script decides what an epoch is and when the run ends."""
        return self.kind == "own-loop"

    @property
    def title(self) -> str:
        """`lenet on mnist`, or the script."""
        return self.model if self.is_own_loop or self.model == self.data else f"{self.model} on {self.data}"


@dataclass
class WorkerState:
    """What is known of one worker."""

    rank: int
    status: WorkerStatus = "starting"
    step: int = 0
    _recent: deque[tuple[int, float]] = field(default_factory=deque, repr=False)
    _samples: int = 0
    _seconds: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Over the last few seconds of training; evaluations and other pauses do not count."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    def advance(self, samples: int, seconds: float) -> None:
        """Take in what this worker did."""
        self._recent.append((samples, seconds))
        self._samples += samples
        self._seconds += seconds
        while len(self._recent) > 1 and self._seconds - self._recent[0][1] >= _SMOOTHING_S:
            old_samples, old_seconds = self._recent.popleft()
            self._samples -= old_samples
            self._seconds -= old_seconds


class History:
    """A series of any length in bounded space: when it is full, neighbours are averaged and the stride doubles."""

    def __init__(self, capacity: int = 256) -> None:
        assert capacity % 2 == 0, "halving must come out even"
        self._capacity = capacity
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._pending: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """One more value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._pending.append((step, value))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending = []
        if len(self._points) == self._capacity:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, self._capacity, 2)]
            self._stride *= 2

    def forget_after(self, step: int) -> None:
        """A run that is resumed at `step` will go through what came after it again."""
        self._points = [p for p in self._points if p[0] <= step]
        self._pending = [p for p in self._pending if p[0] <= step]

    def __len__(self) -> int:
        return len(self._points) + bool(self._pending)

    @property
    def points(self) -> list[tuple[int, float]]:
        """(step, value), oldest first, and no more than the capacity."""
        return [*self._points, _mean(self._pending)] if self._pending else list(self._points)

    @property
    def values(self) -> list[float]:
        """The values alone."""
        return [value for _, value in self.points]


@dataclass(frozen=True)
class Series:
    """Something worth drawing: a metric over the run, with what stands below the two ends of its axis."""

    name: str
    values: Sequence[float]
    first: str
    last: str


class RunState:
    """The fold over a run's events: call `apply` with each, in order."""

    def __init__(self) -> None:
        self.plan = PlanFacts()
        self.run_dir = ""
        self.cores = 0
        self.resumed_from_step: int | None = None
        self.workers: dict[int, WorkerState] = {}
        self.step = 0
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.lr: float | None = None
        self.losses = History()
        self.loss_name = "loss"
        self.logged: dict[str, float] = {}
        self.evaluations: list[Evaluated] = []
        self.phases: dict[str, float] = {}
        self.checkpoint: CheckpointSaved | None = None
        self.warnings: deque[Warned] = deque(maxlen=MOST_WARNINGS)
        self.warning_count = 0
        self.failures: list[WorkerFailure] = []
        self.news: list[str] = []
        """What the last event told of losses, recoveries and slow workers, in words."""
        self.stragglers = Stragglers()
        self._losses = Losses()
        self.summary: Summary | None = None
        self.ended: RunEnded | None = None
        self.latest_time = 0.0
        self._epochs_begun = 0
        self._is_between_epochs = False
        self._logged_histories: dict[str, History] = {}
        self._training_since: float | None = None
        self._progress_time = 0.0

    def apply(self, event: Event) -> None:
        """Take in one event."""
        self.latest_time = max(self.latest_time, event.time)
        match event:
            case Progress():
                self._on_progress(event)
            case RunStarted():
                self._on_started(event)
            case WorkerReady():
                self._worker(event.rank).status = "training"
            case Logged():
                self._on_logged(event)
            case Evaluated():
                self._on_evaluated(event)
            case CheckpointSaved():
                self.checkpoint = event
            case Warned():
                self.warnings.append(event)
                self.warning_count += 1
            case WorkerLost():
                self._worker(event.rank).status = "lost"
                self.news = [self._losses.on_lost(event)]
                self.stragglers.on_gone(event.rank, event.time)
            case WentOn():
                for rank in event.members:
                    self._worker(rank).status = "training"
                self.news = self._losses.on_went_on(event)
            case WorkerSlow():
                self.news = [self.stragglers.on_slow(event)]
            case WorkerFailure():
                self.failures.append(event)
                self._worker(event.rank).status = "lost"
            case RunEnded():
                self.ended = event
            case Summary():
                self._on_summary(event)

    @property
    def title(self) -> list[str]:
        """What is trained, by how many and how: the parts of a header."""
        workers = self.plan.workers or len(self.workers)
        parts = [self.plan.title, count(workers, "worker") if workers else "", self.plan.strategy]
        if self.resumed_from_step is not None:
            parts.append(f"resumed at step {self.resumed_from_step:,}")
        return [part for part in parts if part]

    @property
    def is_starting(self) -> bool:
        """Whether no worker has done anything yet."""
        return all(worker.status == "starting" for worker in self.workers.values())

    @property
    def speaker(self) -> int:
        """The rank whose progress stands for the run's: all see the same numbers, so one is enough."""
        return min((w.rank for w in self.workers.values() if w.status != "lost"), default=0)

    @property
    def samples_per_s(self) -> float:
        """Of all workers that are there."""
        return sum(w.samples_per_s for w in self.workers.values() if w.status != "lost")

    @property
    def epoch(self) -> int | None:
        """The epoch that is going on, or that just ended, counted from 1; None if there is no such thing."""
        if self.plan.is_own_loop or not self.plan.epochs:
            return None
        begun = self._epochs_begun if self._is_between_epochs else self._epochs_begun + 1
        return min(max(begun, 1), self.plan.epochs)

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self._is_between_epochs

    @property
    def fraction(self) -> float | None:
        """How much of the whole run is done; None if nobody knows how long it is."""
        if self.plan.is_own_loop or not self.plan.total_steps:
            return None
        return min(self.step / self.plan.total_steps, 1.0)

    @property
    def left_s(self) -> float | None:
        """How many seconds the rest will take, if it goes on as since the start; None if that is unknown."""
        done = self.fraction
        if done is None or self._training_since is None:
            return None
        elapsed = self._progress_time - self._training_since
        done_here = done - (self.resumed_from_step or 0) / self.plan.total_steps
        if elapsed < _LEAST_ELAPSED_S or done_here <= 0:
            return None
        return elapsed * (1 - done) / done_here

    @property
    def next_steps(self) -> list[tuple[str, str]]:
        """What to do after the run, as (what to type or open, what for)."""
        if self.summary is None:
            return []
        is_task = not self.plan.is_own_loop
        can_train_on = is_task and not self.plan.is_cut_short and self.summary.epochs >= 1
        return next_steps(self.summary, cores=self.cores, can_train_on=can_train_on, can_explain=is_task)

    @property
    def phase_fractions(self) -> list[tuple[str, float]]:
        """Where the time goes, over all workers since the start: each phase's part, in the order of a step."""
        total = sum(self.phases.values())
        if not total > 0:
            return []
        order = {name: i for i, name in enumerate(_PHASES)}
        names = sorted(self.phases, key=lambda name: order.get(name, len(order)))
        return [(name, self.phases[name] / total) for name in names]

    @property
    def checkpoint_age_s(self) -> float | None:
        """How long ago the last checkpoint was complete."""
        return None if self.checkpoint is None else max(0.0, self.latest_time - self.checkpoint.time)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation, or what the user's loop has reported last."""
        return dict(self.evaluations[-1].metrics) if self.evaluations else dict(self.logged)

    @property
    def loss_series(self) -> Series | None:
        """The training loss over the run, if there is enough of it to draw."""
        if len(self.losses) < 2:
            return None
        points = self.losses.points
        return Series(self.loss_name, [v for _, v in points], f"step {points[0][0]:,}", f"step {points[-1][0]:,}")

    @property
    def result_series(self) -> Series | None:
        """The result that matters most over the run (an accuracy if there is one), if there is enough to draw."""
        if self.evaluations:
            name = best_metric(self.evaluations[-1].metrics)
            having = [e for e in self.evaluations if name in e.metrics]
            if name is None or len(having) < 2:
                return None
            values = [e.metrics[name] for e in having]
            return Series(name, values, f"epoch {having[0].epoch}", f"epoch {having[-1].epoch}")
        name = best_metric(n for n, h in self._logged_histories.items() if n != self.loss_name and len(h) >= 2)
        if name is None:
            return None
        points = self._logged_histories[name].points
        return Series(name, [v for _, v in points], f"step {points[0][0]:,}", f"step {points[-1][0]:,}")

    def _worker(self, rank: int) -> WorkerState:
        return self.workers.setdefault(rank, WorkerState(rank))

    def _on_started(self, event: RunStarted) -> None:
        self.plan = PlanFacts.of(event.plan)
        self.run_dir = event.run_dir
        self.cores = int(event.machine.get("cores") or 0)
        self.resumed_from_step = event.resumed_from_step
        self.workers = {rank: WorkerState(rank) for rank in range(self.plan.workers)}
        self._losses = Losses(self.plan.workers)
        self.summary = self.ended = None
        self.failures = []
        self._training_since = None
        self.step = step = event.resumed_from_step or 0
        # The events of one run directory may hold several starts: what is behind the checkpoint happens again.
        self.losses.forget_after(step)
        for history in self._logged_histories.values():
            history.forget_after(step)
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        if self.plan.steps_per_epoch:
            self._epochs_begun, self._is_between_epochs = step // self.plan.steps_per_epoch, False

    def _on_progress(self, event: Progress) -> None:
        worker = self._worker(event.rank)
        worker.step = event.step
        if worker.status == "starting":  # one that is lost stays so until its replacement is ready
            worker.status = "training"
        worker.advance(event.samples, event.seconds)
        for name, seconds in event.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        if self._training_since is None:
            self._training_since = event.time - event.seconds
        total = self.plan.total_steps
        if total and event.step >= total and not self.plan.is_own_loop and worker.status == "training":
            worker.status = "finished"
        if event.step >= self.step:
            self.step, self._progress_time = event.step, max(self._progress_time, event.time)
            self._epochs_begun, self._is_between_epochs = event.epoch, event.cursor == 0 and event.epoch > 0
        if event.rank != self.speaker:
            return
        self.lr = event.lr if event.lr is not None else self.lr
        self.accuracy = event.accuracy if event.accuracy is not None else self.accuracy
        if event.loss is not None:
            self.loss = event.loss
            self.losses.add(event.step, event.loss)

    def _on_logged(self, event: Logged) -> None:
        self.logged.update(event.metrics)
        for name, value in event.metrics.items():
            if name in self._logged_histories or len(self._logged_histories) < _MOST_LOGGED:
                self._logged_histories.setdefault(name, History()).add(event.step, value)
        if not self.plan.is_own_loop:
            return
        loss_name = _training_loss(self.logged)
        if loss_name is not None and loss_name in self._logged_histories:
            self.loss_name, self.losses = loss_name, self._logged_histories[loss_name]
            self.loss = self.logged[loss_name]

    def _on_evaluated(self, event: Evaluated) -> None:
        self.evaluations.append(event)
        if len(self.evaluations) > _MOST_EVALUATIONS:
            del self.evaluations[1:-1:2]

    def _on_summary(self, event: Summary) -> None:
        self.summary = event
        self.step = max(self.step, event.steps)
        for worker in self.workers.values():
            if worker.status != "lost":
                worker.status = "finished"


def _mean(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value / len(points) for _, value in points)


def _training_loss(metrics: dict[str, float]) -> str | None:
    """Which of the numbers that a loop reports is its training loss, to judge by the names."""
    losses = [name for name in metrics if "loss" in name.lower()]
    return min(losses, key=lambda n: (n != "loss", any(t in n.lower() for t in ("test", "val", "eval"))), default=None)
