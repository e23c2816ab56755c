"""One run and what is done to it.

Here: `attack`, which trains under a killer and a script of faults and gives the run's score, and `train_unharmed`, the
run to compare with. Not here: how many runs there are (`soak.py`), what the figures mean (`score.py`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic

from syncline.chaos.kills import Killer
from syncline.chaos.limit import Limit
from syncline.chaos.links import Links
from syncline.chaos.score import (
    Blow,
    Recovery,
    Reference,
    RunOutcome,
    RunScore,
    Samples,
    recoveries,
    steps_redone,
    stray_losses,
)
from syncline.chaos.telling import RunTeller
from syncline.config.run import RunConfig
from syncline.data.audit import audit_file
from syncline.driver import run_task
from syncline.errors import ConfigError, SynclineError
from syncline.task import Task
from syncline.telemetry.events import Event, RunStarted, Summary, WentOn, WorkerLost, WorkerReady
from syncline.telemetry.run_dir import RunDir
from syncline.testing.faults import VARIABLE, Fault, as_script, happened_in
from syncline.testing.namespaces import Namespaces
from syncline.view.state import RunState

__all__ = ["attack", "audited", "train_unharmed"]


def train_unharmed(
    task: Task, config: RunConfig, teller: RunTeller, limit: Limit, namespaces: Namespaces | None = None
) -> Reference | RunScore:
    """Train without doing anything to it. A `RunScore` if it did not even then come to its end."""
    began = monotonic()
    try:
        with closing(limit):
            result = run_task(
                task, config, _Watching(teller, limit.on_event), network=namespaces.network if namespaces else None
            )
    except ConfigError:
        raise  # there is nothing to train
    except Exception as error:
        outcome, why = _what_ended(error, limit)
        seconds = monotonic() - began
        return RunScore(strategy=config.strategy, seed=config.seed, outcome=outcome, seconds=seconds, why=why)
    return Reference(strategy=config.strategy, seed=config.seed, metrics=result.metrics, seconds=result.seconds)


def attack(
    task: Task,
    config: RunConfig,
    teller: RunTeller,
    limit: Limit,
    killer: Killer,
    faults: Sequence[Fault],
    *,
    hang_s: float,
    before: int,
    namespaces: Namespaces | None = None,
) -> tuple[RunScore, KeyboardInterrupt | None]:
    """Train while `killer` kills and `faults` happen. The score, and Ctrl-C if that is what ended it.

    `before` blows were dealt to earlier runs. In `namespaces`, workers are cut off by their links. `ConfigError` if
    there was nothing to train.
    """
    began = monotonic()
    blows_in = functools.partial(_blows, killer, workers=config.workers, namespaces=namespaces)
    live = _LiveScore(teller, blows_in, config.workers, hang_s, before)
    watching = _Watching(teller, killer.on_event, limit.on_event, live.on_event)
    outcome: RunOutcome = "finished"
    why: str | None = None
    stopped: KeyboardInterrupt | None = None
    try:
        with ExitStack() as stack:
            for each in (closing(killer), closing(limit), _script_in_environment(faults)):
                stack.enter_context(each)
            if namespaces is not None:
                stack.enter_context(Links(namespaces))
            run_task(task, config, watching, network=namespaces.network if namespaces else None)
    except KeyboardInterrupt as wish:
        outcome, why, stopped = "interrupted", str(wish), wish
    except Exception as error:  # it is this run's, and goes onto the card
        if isinstance(error, ConfigError) and watching.run_dir is None:
            raise
        outcome, why = _what_ended(error, limit)
    run_dir = watching.run_dir
    events = list(run_dir.read_events()) if run_dir is not None else []
    summary = next((e for e in events if isinstance(e, Summary)), None)
    blows = blows_in(run_dir)
    done = {h.fault for h in happened_in(run_dir.path)} if run_dir is not None else set()
    score = RunScore(
        strategy=config.strategy,
        seed=config.seed,
        outcome=outcome,
        seconds=monotonic() - began,
        recoveries=tuple(recoveries(events, blows, outcome=outcome, workers=config.workers, limit_s=hang_s)),
        redone=steps_redone(events),
        strays=tuple(f"{e.name} {e.cause} at step {e.step}" for e in stray_losses(events, blows)),
        missed=tuple(str(fault) for fault in faults if fault not in done),
        samples=audited(run_dir) if run_dir is not None and outcome in ("finished", "interrupted") else None,
        metrics=summary.metrics if summary is not None else {},
        run_dir=str(run_dir.path) if run_dir is not None else None,
        why=why,
    )
    live.tell(score.recoveries)
    return score, stopped


def audited(run_dir: RunDir) -> Samples | None:
    """What became of the samples of a run, from its ledger; None if it has none."""
    found = audit_file(run_dir.ledger)
    if not found.epochs:
        return None
    return Samples(
        lost=sum(e.lost for e in found.epochs),
        repeated=sum(e.repeated for e in found.epochs),
        is_clean=found.is_clean,
        words=tuple(found.in_words()),
    )


def _what_ended(error: Exception, limit: Limit) -> tuple[RunOutcome, str]:
    if limit.why:
        return "hang", limit.why
    text = str(error).strip() or "no message"
    return "failed", text if isinstance(error, SynclineError) else f"{type(error).__name__}: {text}"


def _blows(killer: Killer, run_dir: RunDir | None, *, workers: int, namespaces: Namespaces | None) -> list[Blow]:
    """What was done so far, oldest first."""
    found = []
    for kill in list(killer.kills):
        who = f"worker {kill.number}" if kill.number < workers else f"server {kill.number - workers}"
        found.append(Blow(what=f"kill {who}", time=kill.time, number=kill.number, pid=kill.pid, step=kill.step))
    for h in happened_in(run_dir.path) if run_dir is not None else ():
        is_deadly = h.fault.kind in ("kill", "raise")
        also = _neighbours(h.number, run_dir, namespaces) if h.fault.kind == "cut" else ()
        what = str(h.fault)
        found.append(
            Blow(what=what, time=h.time, number=h.number, pid=h.pid, step=h.step, is_deadly=is_deadly, also=also)
        )
    return sorted(found, key=lambda blow: blow.time)


def _neighbours(number: int, run_dir: RunDir | None, namespaces: Namespaces | None) -> tuple[int, ...]:
    """The other processes of a run in the namespace of this one."""
    if run_dir is None or namespaces is None:
        return ()
    plan = run_dir.read_plan()
    processes = range(len(plan["workers"]) + plan["servers"])
    of = namespaces.number_of
    return tuple(other for other in processes if other != number and of(other) == of(number))


class _Watching:
    """The view of one run: what it is told it passes on."""

    def __init__(self, teller: RunTeller, *listeners: Callable[[Event], None]) -> None:
        self.run_dir: RunDir | None = None
        self._state, self._teller, self._listeners = RunState(), teller, listeners

    def on_event(self, event: Event) -> None:
        """Take it in."""
        if isinstance(event, RunStarted):
            self.run_dir = RunDir(Path(event.run_dir))
        self._state.apply(event)
        for listener in self._listeners:
            listener(event)
        self._teller.happened(self._state, event)

    def close(self) -> None:
        """Nothing more will happen."""


class _LiveScore:
    """Tells what came of each blow as soon as it is known, each once."""

    def __init__(
        self,
        teller: RunTeller,
        blows_in: Callable[[RunDir | None], list[Blow]],
        workers: int,
        limit_s: float,
        before: int,
    ) -> None:
        self._teller, self._blows_in, self._workers, self._limit_s = teller, blows_in, workers, limit_s
        self._number = before
        self._told: set[Blow] = set()
        self._events: list[Event] = []
        self._run_dir: RunDir | None = None

    def on_event(self, event: Event) -> None:
        """Look at the blows again when somebody has gone on."""
        if isinstance(event, RunStarted):
            self._run_dir = RunDir(Path(event.run_dir))
        if isinstance(event, WorkerLost | WentOn | WorkerReady):
            self._events.append(event)
        if isinstance(event, WentOn):
            blows = self._blows_in(self._run_dir)
            found = recoveries(self._events, blows, outcome="interrupted", workers=self._workers, limit_s=self._limit_s)
            self.tell(r for r in found if r.went_on_s is not None)

    def tell(self, found: Iterable[Recovery]) -> None:
        """Those that were not told yet."""
        for recovery in found:
            if recovery.blow not in self._told:
                self._told.add(recovery.blow)
                self._number += 1
                self._teller.settled(recovery, self._number)


@contextmanager
def _script_in_environment(faults: Sequence[Fault]) -> Iterator[None]:
    """Workers inherit the environment that the engine is started in."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = as_script(faults)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
