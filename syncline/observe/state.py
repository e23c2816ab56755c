"""`RunState`: the current state of a run, folded from its events. All views for people read it.

Here: sums, smoothing and estimates. No I/O and no clock but the events' own, so that live, replayed and scripted runs
look the same. Not here: drawing (`terminal/`, `report/`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from syncline.observe.formatting import count
from syncline.observe.history import History
from syncline.observe.incidents import FailureLog, StragglerLog
from syncline.observe.plan_facts import PlanFacts
from syncline.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    FatalFailure,
    GroupTrains,
    MetricsLogged,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
    Summary,
    WarningMessage,
    WorkerFailure,
    WorkerReady,
    WorkerSlow,
)

WorkerStatus = Literal["starting", "training", "finished", "failed"]

_SMOOTHING_S = 4.0
_LEAST_ELAPSED_S = 1.0
"""No estimate of the remaining time before that: the machine is still warming up."""
_PHASES = ("data", "forward", "compute", "backward", "exchange", "waiting", "update")
MOST_WARNINGS = 20
"""How many warnings the views show; `events.jsonl` has all of them."""
_MOST_EVALUATIONS = 512
_MOST_LOGGED = 32


@dataclass
class WorkerState:
    """The current state of one worker."""

    worker_id: int
    status: WorkerStatus = "starting"
    step: int = 0
    _recent: deque[tuple[int, float]] = field(default_factory=deque, repr=False)
    _samples: int = 0
    _seconds: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Over the last few seconds of training, without evaluations and other pauses."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    def advance(self, samples: int, seconds: float) -> None:
        self._recent.append((samples, seconds))
        self._samples += samples
        self._seconds += seconds
        while len(self._recent) > 1 and self._seconds - self._recent[0][1] >= _SMOOTHING_S:
            old_samples, old_seconds = self._recent.popleft()
            self._samples -= old_samples
            self._seconds -= old_seconds


class RunState:
    """Call `apply` with each event, in order."""

    def __init__(self) -> None:
        self.plan = PlanFacts()
        self.run_dir = ""
        self.cores = 0
        self.resumed_from_step: int | None = None
        self.workers: dict[int, WorkerState] = {}
        self.step = 0
        self.has_steps = True
        """False for a script that trains with torch.distributed itself, whose steps Syncline does not see."""
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.lr: float | None = None
        self.losses = History()
        self.loss_name = "loss"
        self.logged: dict[str, float] = {}
        self.evaluations: list[Evaluated] = []
        self.phases: dict[str, float] = {}
        self.checkpoint: CheckpointSaved | None = None
        self.warnings: deque[WarningMessage] = deque(maxlen=MOST_WARNINGS)
        self.warning_count = 0
        self.failures: list[FatalFailure] = []
        self.notices: list[str] = []
        """What the last event says about failures, recoveries and stragglers, as sentences."""
        self.stragglers = StragglerLog()
        self._failure_log = FailureLog()
        self.summary: Summary | None = None
        self.ended: RunEnded | None = None
        self.latest_time = 0.0
        self._epochs_begun = 0
        self.is_between_epochs = False
        self.logged_histories: dict[str, History] = {}
        self._training_since: float | None = None
        self._progress_time = 0.0

    def apply(self, event: Event) -> None:
        self.latest_time = max(self.latest_time, event.time)
        match event:
            case Progress():
                self._on_progress(event)
            case RunStarted():
                self._on_started(event)
            case WorkerReady():
                self._worker(event.worker_id).status = "training"
            case MetricsLogged():
                self._on_logged(event)
            case Evaluated():
                self._on_evaluated(event)
            case CheckpointSaved():
                self.checkpoint = event
            case WarningMessage():
                self.warnings.append(event)
                self.warning_count += 1
            case WorkerFailure():
                self._worker(event.worker_id).status = "failed"
                self.notices = [self._failure_log.on_failure(event)]
                self.stragglers.on_end(event.worker_id, event.time)
            case Recovered():
                for worker_id in event.members:
                    self._worker(worker_id).status = "training"
                self.notices = self._failure_log.on_recovery(event)
            case GroupTrains():
                self.has_steps = False
                for worker_id in event.members:
                    self._worker(worker_id).status = "training"
                self.notices = self._failure_log.on_group(event)
            case WorkerSlow():
                self.notices = [self.stragglers.on_slow(event)]
            case FatalFailure():
                self.failures.append(event)
                self._worker(event.worker_id).status = "failed"
            case RunEnded():
                self.ended = event
            case Summary():
                self._on_summary(event)

    @property
    def title(self) -> list[str]:
        """The parts of a header: model and data, number of workers, strategy."""
        workers = self.plan.workers or len(self.workers)
        strategy = self.plan.strategy if self.plan.kind not in ("fit", "graph") else ""
        parts = [self.plan.title, count(workers, "worker") if workers else "", strategy, self.plan.layout]
        if self.resumed_from_step is not None:
            parts.append(f"resumed at step {self.resumed_from_step:,}")
        return [part for part in parts if part]

    @property
    def is_starting(self) -> bool:
        """Whether no worker has taken a step yet."""
        return all(worker.status == "starting" for worker in self.workers.values())

    @property
    def reporter_id(self) -> int:
        """The worker whose loss and metrics are shown; they are the same on all workers."""
        return min((w.worker_id for w in self.workers.values() if w.status != "failed"), default=0)

    @property
    def samples_per_s(self) -> float:
        """The sum over all workers that have not failed."""
        return sum(w.samples_per_s for w in self.workers.values() if w.status != "failed")

    @property
    def epoch(self) -> int | None:
        """The current epoch, or the one that just ended, counted from 1; None without epochs."""
        if self.plan.is_own_loop or not self.plan.epochs:
            return None
        begun = self._epochs_begun if self.is_between_epochs else self._epochs_begun + 1
        return min(max(begun, 1), self.plan.epochs)

    @property
    def fraction(self) -> float | None:
        """The completed fraction of the run; None if its length is unknown."""
        if self.plan.is_own_loop or not self.plan.total_steps:
            return None
        return min(self.step / self.plan.total_steps, 1.0)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left at the average speed so far; None if unknown."""
        done = self.fraction
        if done is None or self._training_since is None:
            return None
        elapsed = self._progress_time - self._training_since
        done_here = done - (self.resumed_from_step or 0) / self.plan.total_steps
        if elapsed < _LEAST_ELAPSED_S or done_here <= 0:
            return None
        return elapsed * (1 - done) / done_here

    @property
    def phase_fractions(self) -> list[tuple[str, float]]:
        """Each phase's fraction of the time, over all workers since the start, in the order of a step."""
        total = sum(self.phases.values())
        if not total > 0:
            return []
        order = {name: i for i, name in enumerate(_PHASES)}
        names = sorted(self.phases, key=lambda name: order.get(name, len(order)))
        return [(name, self.phases[name] / total) for name in names]

    @property
    def checkpoint_age_s(self) -> float | None:
        """Seconds since the last checkpoint was saved."""
        return None if self.checkpoint is None else max(0.0, self.latest_time - self.checkpoint.time)

    @property
    def metrics(self) -> dict[str, float]:
        """From the last evaluation, or the latest that the user's loop logged."""
        return dict(self.evaluations[-1].metrics) if self.evaluations else dict(self.logged)

    def _worker(self, worker_id: int) -> WorkerState:
        return self.workers.setdefault(worker_id, WorkerState(worker_id))

    def _on_started(self, event: RunStarted) -> None:
        self.plan = PlanFacts.of(event.plan)
        self.run_dir = event.run_dir
        cores = event.machine.get("cores")
        self.cores = cores if isinstance(cores, int) else 0
        self.resumed_from_step = event.resumed_from_step
        self.workers = {worker_id: WorkerState(worker_id) for worker_id in range(self.plan.workers)}
        self._failure_log = FailureLog(self.plan.workers)
        self.summary = self.ended = None
        self.failures = []
        self._training_since = None
        self.step = step = event.resumed_from_step or 0
        # One run directory may hold several starts. Steps after the checkpoint are repeated.
        self.losses.forget_after(step)
        for history in self.logged_histories.values():
            history.forget_after(step)
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        if self.plan.steps_per_epoch:
            self._epochs_begun, self.is_between_epochs = step // self.plan.steps_per_epoch, False

    def _on_progress(self, event: Progress) -> None:
        worker = self._worker(event.worker_id)
        worker.step = event.step
        if worker.status == "starting":  # a failed worker stays so until its replacement is ready
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
            self._epochs_begun, self.is_between_epochs = event.epoch, event.cursor == 0 and event.epoch > 0
        if event.worker_id != self.reporter_id:
            return
        self.lr = event.lr if event.lr is not None else self.lr
        self.accuracy = event.accuracy if event.accuracy is not None else self.accuracy
        if event.loss is not None:
            self.loss = event.loss
            self.losses.add(event.step, event.loss)

    def _on_logged(self, event: MetricsLogged) -> None:
        self.logged.update(event.metrics)
        for name, value in event.metrics.items():
            if name in self.logged_histories or len(self.logged_histories) < _MOST_LOGGED:
                self.logged_histories.setdefault(name, History()).add(event.step, value)
        if not self.plan.is_own_loop:
            return
        loss_name = _training_loss(self.logged)
        if loss_name is not None and loss_name in self.logged_histories:
            self.loss_name, self.losses = loss_name, self.logged_histories[loss_name]
            self.loss = self.logged[loss_name]

    def _on_evaluated(self, event: Evaluated) -> None:
        self.evaluations.append(event)
        if len(self.evaluations) > _MOST_EVALUATIONS:
            del self.evaluations[1:-1:2]

    def _on_summary(self, event: Summary) -> None:
        self.summary = event
        self.step = max(self.step, event.steps)
        for worker in self.workers.values():
            if worker.status != "failed":
                worker.status = "finished"


def _training_loss(metrics: dict[str, float]) -> str | None:
    """The logged metric that is the training loss, judging by the names."""
    losses = [name for name in metrics if "loss" in name.lower()]
    return min(losses, key=lambda n: (n != "loss", any(t in n.lower() for t in ("test", "val", "eval"))), default=None)
