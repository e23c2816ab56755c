"""Scores of runs with injected faults. Pure: events, injections and sample audits in, figures out.

Here: `recoveries`, how a run handled each injected fault, and `Scorecard`, the figures of all runs. Not here: injecting
faults (`kills.py`, `lab/faults/`), text and tables (`report.py`).

An *injection* is a random kill or a scripted fault. Its result is one of:

    recovered   the worker failed, and the survivors finished the first step of the next view
    tolerated   no worker failed; the run continued
    too late    training was already complete
    hang        the run neither took a step nor ended within the limit
    fatal       the run failed before it recovered
    unresolved  the user stopped the run before it recovered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from syncline.lab.statistics import quantile
from syncline.observe.formatting import count
from syncline.telemetry.events import Event, Progress, Recovered, Summary, WorkerFailure, WorkerReady

FaultResult = Literal["recovered", "tolerated", "too late", "hang", "fatal", "unresolved"]
RunOutcome = Literal["finished", "failed", "hang", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault that was injected: into which process, and when."""

    what: str
    """`kill worker 2`, or the text of a scripted fault."""
    time: float
    worker_id: int
    """Workers are numbered first, then the parameter servers."""
    pid: int
    step: int
    is_deadly: bool = True
    """Whether no process survives it."""
    also: tuple[int, ...] = ()
    """The worker_ids of other processes that it hits: those behind the same link."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a run handled an injection. Times count from the injection; None if it did not get that far."""

    injection: Injection
    result: FaultResult
    detected_s: float | None = None
    """Until the coordinator detected the failure."""
    recovered_s: float | None = None
    """Until the survivors finished their first step."""
    restored_s: float | None = None
    """Until the first step with as many workers as at the start."""
    redone: int = 0
    """Steps that the run had to repeat."""


def recoveries(
    events: Sequence[Event], injections: Iterable[Injection], *, outcome: RunOutcome, workers: int, limit_s: float
) -> list[Recovery]:
    """The result of each injection in a run with `workers` workers and these events.

    More than `limit_s` without a step is a hang, even if the run recovered later.
    """
    return [_recovery(events, injection, outcome, workers, limit_s) for injection in injections]


def _recovery(
    events: Sequence[Event], injection: Injection, outcome: RunOutcome, workers: int, limit_s: float
) -> Recovery:
    ended_at = next((e.time for e in events if isinstance(e, Summary)), None)
    failure = next(
        (
            e
            for e in events
            if isinstance(e, WorkerFailure) and e.worker_id == injection.worker_id and e.time >= injection.time
        ),
        None,
    )
    if failure is None:
        return Recovery(injection=injection, result=_unsettled(outcome, injection))
    detected_s = failure.time - injection.time
    after = [
        e for e in events if isinstance(e, Recovered) and e.time > failure.time and _is_without(e, injection, events)
    ]
    recovered_s = after[0].time - injection.time if after else None
    restored_s = next((e.time - injection.time for e in after if len(e.members) >= workers), None)
    if recovered_s is not None:
        result: FaultResult = "recovered" if recovered_s <= limit_s else "hang"
    elif ended_at is not None:
        result = "too late" if ended_at - injection.time <= limit_s else "hang"
    else:
        result = _unsettled(outcome, injection)
    redone = _steps_back(after[0], [e for e in events if e.time < failure.time]) if after else 0
    return Recovery(
        injection=injection,
        result=result,
        detected_s=detected_s,
        recovered_s=recovered_s,
        restored_s=restored_s,
        redone=redone,
    )


def unexpected_failures(events: Iterable[Event], injections: Iterable[Injection]) -> list[WorkerFailure]:
    """Failures that no injection explains, such as a survivor that crashed during recovery."""
    unused = sorted((each.time, worker) for each in injections for worker in (each.worker_id, *each.also))
    found = []
    for event in events:
        if isinstance(event, WorkerFailure):
            cause = next((b for b in reversed(unused) if b[1] == event.worker_id and b[0] <= event.time), None)
            if cause is not None:
                unused.remove(cause)
            else:
                found.append(event)
    return found


def steps_redone(events: Sequence[Event]) -> int:
    """Steps that a run repeated, after failures and after joins."""
    return sum(
        _steps_back(event, [e for e in events if e.time < event.time])
        for event in events
        if isinstance(event, Recovered)
    )


def _steps_back(event: Recovered, earlier: Iterable[Event]) -> int:
    """Steps between the furthest one done earlier and the start of this view.

    Rank 0 of the view reports `redone`. It may be a replacement that does not know how far the others had come.
    """
    furthest = 0
    for e in sorted(earlier, key=lambda e: e.time):  # events of different workers arrive in any order
        if isinstance(e, Recovered):
            furthest = e.step
        elif isinstance(e, Progress):
            furthest = max(furthest, e.step)
    return max(0, furthest - (event.step - 1), event.repeated_steps)


def _is_without(event: Recovered, injection: Injection, events: Sequence[Event]) -> bool:
    """Whether the failed process is no member of this view: the event of an earlier view may arrive late."""
    if injection.worker_id not in event.members:
        return True
    return any(
        isinstance(e, WorkerReady)
        and e.worker_id == injection.worker_id
        and e.pid != injection.pid
        and injection.time <= e.time <= event.time
        for e in events
    )


def _unsettled(outcome: RunOutcome, injection: Injection) -> FaultResult:
    """The result if no event settles it."""
    if outcome == "finished":  # also without a summary, perhaps because the disk was full
        return "too late" if injection.is_deadly else "tolerated"
    by_outcome: dict[str, FaultResult] = {"hang": "hang", "failed": "fatal", "interrupted": "unresolved"}
    return by_outcome[outcome]


@dataclass(frozen=True, kw_only=True)
class SampleAudit:
    """How often the samples of a run were used, over all epochs."""

    lost: int
    repeated: int
    is_clean: bool
    lines: tuple[str, ...] = ()
    """The findings, for people."""


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """One run with injected faults."""

    strategy: str
    seed: int
    outcome: RunOutcome
    seconds: float
    recoveries: tuple[Recovery, ...] = ()
    redone: int = 0
    """Steps that were repeated."""
    unexpected: tuple[str, ...] = ()
    """Failures that no injection explains."""
    missed_faults: tuple[str, ...] = ()
    """Scripted faults that never happened."""
    samples: SampleAudit | None = None
    """None if the run did not finish, or has no ledger."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_dir: str | None = None
    reason: str | None = None
    """Why the run did not finish."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The result of a run without faults."""

    strategy: str
    seed: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """Quantiles of recovery times, in seconds."""

    count: int
    p50: float
    p95: float
    most: float


def times_of(seconds: Iterable[float | None]) -> RecoveryTimes | None:
    """None if none of them is known."""
    known = [s for s in seconds if s is not None]
    if not known:
        return None
    return RecoveryTimes(count=len(known), p50=quantile(known, 0.5), p95=quantile(known, 0.95), most=max(known))


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """Totals over the runs of one strategy, or of all."""

    name: str
    runs: int
    finished: int
    injections: int
    recovered: int
    hangs: int
    """Injections that led to a hang, and runs that hung without one."""
    detection: RecoveryTimes | None
    recovery: RecoveryTimes | None
    restoration: RecoveryTimes | None
    redone: int
    """Steps that were repeated."""
    lost: int | None
    """Samples that were never used; None if no run has a ledger."""
    repeated: int | None
    metrics: tuple[float, ...]
    """Of the runs that finished."""
    reference: tuple[float, ...]
    """Of the runs without faults."""

    @classmethod
    def of(cls, name: str, scores: Sequence[RunScore], references: Sequence[Reference], metric: str | None) -> ScoreRow:
        faults = [recovery for score in scores for recovery in score.recoveries]
        audits = [score.samples for score in scores if score.samples is not None]
        silent = [s for s in scores if s.outcome == "hang" and not any(r.result == "hang" for r in s.recoveries)]
        finished = [score for score in scores if score.outcome == "finished"]
        return cls(
            name=name,
            runs=len(scores),
            finished=len(finished),
            injections=len(faults),
            recovered=sum(r.result in ("recovered", "tolerated", "too late") for r in faults),
            hangs=sum(r.result == "hang" for r in faults) + len(silent),
            detection=times_of(r.detected_s for r in faults),
            recovery=times_of(r.recovered_s for r in faults),
            restoration=times_of(r.restored_s for r in faults),
            redone=sum(score.redone for score in scores),
            lost=sum(a.lost for a in audits) if audits else None,
            repeated=sum(a.repeated for a in audits) if audits else None,
            metrics=tuple(s.metrics[metric] for s in finished if metric in s.metrics) if metric else (),
            reference=tuple(r.metrics[metric] for r in references if metric in r.metrics) if metric else (),
        )


@dataclass
class Scorecard:
    """The score of a whole soak test, complete or not."""

    title: str
    """The model, the data and the number of workers."""
    command: str
    """The command that reproduces it."""
    seed: int
    kills_wanted: int
    strategies: tuple[str, ...]
    scores: list[RunScore] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Strategies that cannot run here, and why."""
    is_interrupted: bool = False

    @property
    def metric(self) -> str | None:
        """The metric by which runs are compared: the test accuracy if there is one."""
        found = [*(r.metrics for r in self.references), *(s.metrics for s in self.scores)]
        names = {name for metrics in found for name in metrics}
        order = ("test/accuracy", "test/loss", "train/loss")
        return next((name for name in order if name in names), min(names, default=None))

    def rows(self) -> list[ScoreRow]:
        """One per strategy, in order."""
        tried = [name for name in self.strategies if any(s.strategy == name for s in self.scores)]
        return [self._row(name, name) for name in tried]

    def total(self) -> ScoreRow:
        """All runs together, without metrics: those of different strategies do not add up."""
        return self._row("all", None)

    @property
    def problems(self) -> list[str]:
        """Every guarantee that did not hold."""
        total = self.total()
        found = []
        if total.hangs:
            found.append(count(total.hangs, "hang"))
        unfinished = [s for s in self.scores if s.outcome == "failed"]
        if unfinished:
            found.append(f"{len(unfinished)} of {total.runs} runs failed")
        if total.lost:
            found.append(f"{total.lost:,} samples lost")
        if total.repeated:
            found.append(f"{total.repeated:,} samples used more than once")
        unsound = [s for s in self.scores if s.samples is not None and not s.samples.is_clean]
        if unsound and not total.lost and not total.repeated:
            found.append(f"{count(len(unsound), 'sample audit')} failed")
        unexpected = sum(len(s.unexpected) for s in self.scores)
        if unexpected:
            found.append(f"{count(unexpected, 'worker')} failed without an injected fault")
        missed_faults = sum(len(s.missed_faults) for s in self.scores if s.outcome == "finished")
        if missed_faults:
            found.append(f"{count(missed_faults, 'scripted fault')} never happened")
        return found

    def _row(self, name: str, strategy: str | None) -> ScoreRow:
        scores = [s for s in self.scores if strategy in (None, s.strategy)]
        references = [r for r in self.references if strategy in (None, r.strategy)]
        return ScoreRow.of(name, scores, references, self.metric if strategy is not None else None)
