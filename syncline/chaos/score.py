"""What runs made of what was done to them. Pure: from events, blows and the account of samples to figures.

Here: `recoveries`, how a run came through each blow, and `Card`, the figures of all runs. Not here: dealing the blows
(`kills.py`, `testing/faults.py`), the words and tables (`report.py`).

A *blow* is a kill from outside or a scripted fault. What can come of it:

    recovered   the process was lost, and the others went on: the first step in the next View was done
    borne       nobody was lost; the run went on as it was
    too late    the run was over already but for its end
    hang        within the limit the run neither went on nor ended
    fatal       the run failed before it had gone on
    open        the user stopped the run before it had gone on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from syncline.bench.statistics import quantile
from syncline.telemetry.events import Event, Progress, Summary, WentOn, WorkerLost, WorkerReady

__all__ = ["Blow", "Card", "Came", "Recovery", "Reference", "Row", "RunOutcome", "RunScore", "Samples", "Times",
           "recoveries", "steps_redone", "stray_losses", "times_of"]  # fmt: skip

Came = Literal["recovered", "borne", "too late", "hang", "fatal", "open"]
RunOutcome = Literal["finished", "failed", "hang", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What was done to a run: to which process, when."""

    what: str
    """`kill worker 2`, or a fault as it was scripted."""
    time: float
    number: int
    """Of the process in the run: the workers first, then the servers."""
    pid: int
    step: int
    is_deadly: bool = True
    """Whether no process outlives it."""
    also: tuple[int, ...] = ()
    """The numbers of others whom it hit: those behind the same link."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What came of a blow; the times are from the blow on, and None where there is none."""

    blow: Blow
    came: Came
    noticed_s: float | None = None
    """Until the coordinator knew that the process was lost."""
    went_on_s: float | None = None
    """Until the first step with whoever was there then."""
    whole_s: float | None = None
    """Until the first step with as many workers as at the start."""
    redone: int = 0
    """How many steps the run went back for it."""


def recoveries(
    events: Sequence[Event], blows: Iterable[Blow], *, outcome: RunOutcome, workers: int, limit_s: float
) -> list[Recovery]:
    """What came of each blow in a run of `workers` workers that had these events, in the order in which they were told.

    More than `limit_s` without a step is a hang, also if the run went on after all.
    """
    return [_recovery(events, blow, outcome, workers, limit_s) for blow in blows]


def _recovery(events: Sequence[Event], blow: Blow, outcome: RunOutcome, workers: int, limit_s: float) -> Recovery:
    ended_at = next((e.time for e in events if isinstance(e, Summary)), None)
    lost = next(
        (e for e in events if isinstance(e, WorkerLost) and e.rank == blow.number and e.time >= blow.time), None
    )
    if lost is None:
        if outcome == "finished":
            return Recovery(blow=blow, came="too late" if blow.is_deadly else "borne")
        return Recovery(blow=blow, came=_unsettled(outcome, blow))
    noticed_s = lost.time - blow.time
    after = [e for e in events if isinstance(e, WentOn) and e.time > lost.time and _is_without(e, blow, events)]
    went_on_s = after[0].time - blow.time if after else None
    whole_s = next((e.time - blow.time for e in after if len(e.members) >= workers), None)
    if went_on_s is not None:
        came: Came = "recovered" if went_on_s <= limit_s else "hang"
    elif ended_at is not None:
        came = "too late" if ended_at - blow.time <= limit_s else "hang"
    else:
        came = _unsettled(outcome, blow)
    redone = _steps_back(after[0], [e for e in events if e.time < lost.time]) if after else 0
    return Recovery(blow=blow, came=came, noticed_s=noticed_s, went_on_s=went_on_s, whole_s=whole_s, redone=redone)


def stray_losses(events: Iterable[Event], blows: Iterable[Blow]) -> list[WorkerLost]:
    """Who was lost though nothing was done to it: a survivor that did not survive, say."""
    unused, strays = sorted((blow.time, number) for blow in blows for number in (blow.number, *blow.also)), []
    for event in events:
        if isinstance(event, WorkerLost):
            cause = next((b for b in reversed(unused) if b[1] == event.rank and b[0] <= event.time), None)
            if cause is not None:
                unused.remove(cause)
            else:
                strays.append(event)
    return strays


def steps_redone(events: Sequence[Event]) -> int:
    """How many steps a run went back in all: when somebody was lost, and when somebody joined."""
    return sum(
        _steps_back(event, [e for e in events if e.time < event.time]) for event in events if isinstance(event, WentOn)
    )


def _steps_back(event: WentOn, earlier: Iterable[Event]) -> int:
    """How many steps lie between what had been done before and the start of this View.

    Whoever tells of the View may be new, and not know from where the others went back.
    """
    furthest = 0
    for e in sorted(earlier, key=lambda e: e.time):  # from several workers they are told in any order
        if isinstance(e, WentOn):
            furthest = e.step
        elif isinstance(e, Progress):
            furthest = max(furthest, e.step)
    return max(0, furthest - (event.step - 1), event.redone)


def _is_without(event: WentOn, blow: Blow, events: Sequence[Event]) -> bool:
    """Whether the process that the blow hit has no part in this: an earlier View may be told of late."""
    if blow.number not in event.members:
        return True
    return any(
        isinstance(e, WorkerReady) and e.rank == blow.number and e.pid != blow.pid and blow.time <= e.time <= event.time
        for e in events
    )


def _unsettled(outcome: RunOutcome, blow: Blow) -> Came:
    """What to call a blow after which nothing more was heard."""
    if outcome == "finished":  # without its summary, which a full disk can swallow
        return "too late" if blow.is_deadly else "borne"
    by_outcome: dict[str, Came] = {"hang": "hang", "failed": "fatal", "interrupted": "open"}
    return by_outcome[outcome]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What became of the samples of a run, over all epochs."""

    lost: int
    repeated: int
    is_clean: bool
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """One run and what was done to it."""

    strategy: str
    seed: int
    outcome: RunOutcome
    seconds: float
    recoveries: tuple[Recovery, ...] = ()
    redone: int = 0
    """How many steps it went back in all."""
    strays: tuple[str, ...] = ()
    """Who was lost though nothing was done to it, and why."""
    missed: tuple[str, ...] = ()
    """Faults of the script that never came about."""
    samples: Samples | None = None
    """None if the run did not come to its end, or kept no account."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_dir: str | None = None
    why: str | None = None
    """What ended a run that did not finish."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One run to which nothing was done."""

    strategy: str
    seed: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long it took, over some recoveries, in seconds."""

    count: int
    p50: float
    p95: float
    most: float


def times_of(seconds: Iterable[float | None]) -> Times | None:
    """None if there is no time among them."""
    known = [s for s in seconds if s is not None]
    if not known:
        return None
    return Times(count=len(known), p50=quantile(known, 0.5), p95=quantile(known, 0.95), most=max(known))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Several runs, of one strategy or of all, added up."""

    name: str
    runs: int
    finished: int
    blows: int
    recovered: int
    hangs: int
    """Blows, and runs that hung without one."""
    noticed: Times | None
    went_on: Times | None
    whole: Times | None
    redone: int
    """Steps that were done again."""
    lost: int | None
    """Samples; None if no run has an account of them."""
    repeated: int | None
    metrics: tuple[float, ...]
    """Of the runs that finished."""
    reference: tuple[float, ...]
    """Of the runs to which nothing was done."""

    @classmethod
    def of(cls, name: str, scores: Sequence[RunScore], references: Sequence[Reference], metric: str | None) -> Row:
        """These runs, by the metric of this name."""
        told = [recovery for score in scores for recovery in score.recoveries]
        accounts = [score.samples for score in scores if score.samples is not None]
        silent = [s for s in scores if s.outcome == "hang" and not any(r.came == "hang" for r in s.recoveries)]
        finished = [score for score in scores if score.outcome == "finished"]
        return cls(
            name=name,
            runs=len(scores),
            finished=len(finished),
            blows=len(told),
            recovered=sum(r.came in ("recovered", "borne", "too late") for r in told),
            hangs=sum(r.came == "hang" for r in told) + len(silent),
            noticed=times_of(r.noticed_s for r in told),
            went_on=times_of(r.went_on_s for r in told),
            whole=times_of(r.whole_s for r in told),
            redone=sum(score.redone for score in scores),
            lost=sum(a.lost for a in accounts) if accounts else None,
            repeated=sum(a.repeated for a in accounts) if accounts else None,
            metrics=tuple(s.metrics[metric] for s in finished if metric in s.metrics) if metric else (),
            reference=tuple(r.metrics[metric] for r in references if metric in r.metrics) if metric else (),
        )


@dataclass
class Card:
    """The score of a whole soak, complete or not."""

    what: str
    """What was trained, in words."""
    command: str
    """What to type to do it again."""
    seed: int
    kills_wanted: int
    strategies: tuple[str, ...]
    scores: list[RunScore] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Strategies that could not be tried, and why."""
    is_interrupted: bool = False

    @property
    def metric(self) -> str | None:
        """The metric that everything is compared by: an accuracy on the test data if there is one."""
        found = [*(r.metrics for r in self.references), *(s.metrics for s in self.scores)]
        names = {name for metrics in found for name in metrics}
        order = ("test/accuracy", "test/loss", "train/loss")
        return next((name for name in order if name in names), min(names, default=None))

    def rows(self) -> list[Row]:
        """One for each strategy that was tried, in order."""
        tried = [name for name in self.strategies if any(s.strategy == name for s in self.scores)]
        return [self._row(name, name) for name in tried]

    def total(self) -> Row:
        """All runs together; metrics of different strategies are not."""
        return self._row("all", None)

    @property
    def problems(self) -> list[str]:
        """Every promise that was broken, in words; none if all is well."""
        total = self.total()
        found = []
        if total.hangs:
            found.append(f"{total.hangs} {'hang' if total.hangs == 1 else 'hangs'}")
        unfinished = [s for s in self.scores if s.outcome == "failed"]
        if unfinished:
            found.append(f"{len(unfinished)} of {total.runs} runs failed")
        if total.lost:
            found.append(f"{total.lost:,} samples lost")
        if total.repeated:
            found.append(f"{total.repeated:,} samples used twice")
        unsound = [s for s in self.scores if s.samples is not None and not s.samples.is_clean]
        if unsound and not total.lost and not total.repeated:
            found.append(f"the account of samples of {len(unsound)} runs is not clean")
        strays = sum(len(s.strays) for s in self.scores)
        if strays:
            found.append(f"{strays} lost to whom nothing was done")
        missed = sum(len(s.missed) for s in self.scores if s.outcome == "finished")
        if missed:
            found.append(f"{missed} scripted {'fault' if missed == 1 else 'faults'} never came about")
        return found

    def _row(self, name: str, strategy: str | None) -> Row:
        scores = [s for s in self.scores if strategy in (None, s.strategy)]
        references = [r for r in self.references if strategy in (None, r.strategy)]
        return Row.of(name, scores, references, self.metric if strategy is not None else None)
