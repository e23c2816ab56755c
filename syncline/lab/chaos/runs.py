"""One run with injected faults.

Here: `run_with_faults`, which trains while processes are killed and scripted faults happen and returns the run's score,
and `run_reference`, the same run without faults. Not here: how many runs there are (`soak.py`), what the figures mean
(`score.py`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Protocol

from syncline.config.run import RunConfig
from syncline.data.audit import audit_file
from syncline.driver import run_script, run_task
from syncline.errors import ConfigError
from syncline.lab.chaos.kills import Killer
from syncline.lab.chaos.links import LinkCutter
from syncline.lab.chaos.score import (
    Injection,
    Recovery,
    Reference,
    RunOutcome,
    RunScore,
    SampleAudit,
    recoveries,
    steps_redone,
    unexpected_failures,
)
from syncline.lab.chaos.watchdog import Watchdog
from syncline.lab.faults import Fault, as_script, faults_injected, install
from syncline.lab.namespaces import Namespaces
from syncline.lab.output import RunObserver, error_text
from syncline.observe.observer import Observer
from syncline.observe.state import RunState
from syncline.result import Result
from syncline.task import Script, Task
from syncline.telemetry.events import Event, Recovered, RunStarted, Summary, WorkerFailure, WorkerReady
from syncline.telemetry.run_dir import RunDir


class RunListener(Protocol):
    """Follows one run. One thread calls it, in order."""

    def on_run_event(self, state: RunState, event: Event) -> None: ...

    def on_recovery(self, recovery: Recovery, number: int) -> None:
        """The result of the `number`-th injected fault is known."""


def run_reference(
    what: Task | Script,
    config: RunConfig,
    listener: RunListener,
    watchdog: Watchdog,
    namespaces: Namespaces | None = None,
) -> Reference | RunScore:
    """Train without faults. A `RunScore` if even that did not finish."""
    began = monotonic()
    try:
        with closing(watchdog):
            observer = RunObserver(listener.on_run_event, watchdog.on_event)
            result = _train(what, config, observer, namespaces)
    except ConfigError:
        raise  # nothing was trained
    except Exception as error:
        outcome, reason = _failure(error, watchdog)
        seconds = monotonic() - began
        return RunScore(strategy=config.strategy, seed=config.seed, outcome=outcome, seconds=seconds, reason=reason)
    return Reference(strategy=config.strategy, seed=config.seed, metrics=result.metrics, seconds=result.seconds)


def run_with_faults(
    what: Task | Script,
    config: RunConfig,
    listener: RunListener,
    watchdog: Watchdog,
    killer: Killer,
    faults: Sequence[Fault],
    *,
    hang_s: float,
    earlier_faults: int = 0,
    namespaces: Namespaces | None = None,
) -> tuple[RunScore, KeyboardInterrupt | None]:
    """Train while `killer` kills and `faults` happen. Returns the score, and Ctrl-C if that ended the run.

    `earlier_faults` were injected into earlier runs. With `namespaces`, 'cut' takes down a worker's link. Raises
    `ConfigError` if nothing was trained.
    """
    began = monotonic()
    injections_in = functools.partial(_injections, killer, workers=config.workers, namespaces=namespaces)
    live = _LiveScore(listener, injections_in, config.workers, hang_s, earlier_faults)
    observer = RunObserver(listener.on_run_event, killer.on_event, watchdog.on_event, live.on_event)
    outcome: RunOutcome = "finished"
    reason: str | None = None
    stopped: KeyboardInterrupt | None = None
    try:
        with ExitStack() as stack:
            for each in (closing(killer), closing(watchdog), _script_in_environment(faults)):
                stack.enter_context(each)
            if namespaces is not None:
                stack.enter_context(LinkCutter(namespaces))
            _train(what, config, observer, namespaces)
    except KeyboardInterrupt as interrupt:
        outcome, reason, stopped = "interrupted", str(interrupt), interrupt
    except Exception as error:  # a failed run is a result, not an error of this command
        if isinstance(error, ConfigError) and observer.run_dir is None:
            raise
        outcome, reason = _failure(error, watchdog)
    run_dir = observer.run_dir
    events = list(run_dir.read_events()) if run_dir is not None else []
    summary = next((e for e in events if isinstance(e, Summary)), None)
    injections = injections_in(run_dir)
    done = {record.fault for record in faults_injected(run_dir.path)} if run_dir is not None else set()
    score = RunScore(
        strategy=config.strategy,
        seed=config.seed,
        outcome=outcome,
        seconds=monotonic() - began,
        recoveries=tuple(recoveries(events, injections, outcome=outcome, workers=config.workers, limit_s=hang_s)),
        redone=steps_redone(events),
        unexpected=tuple(f"{e.name} {e.cause} at step {e.step}" for e in unexpected_failures(events, injections)),
        missed_faults=tuple(str(fault) for fault in faults if fault not in done),
        samples=audit_samples(run_dir) if run_dir is not None and outcome in ("finished", "interrupted") else None,
        metrics=summary.metrics if summary is not None else {},
        run_dir=str(run_dir.path) if run_dir is not None else None,
        reason=reason,
    )
    live.report(score.recoveries)
    return score, stopped


def _train(what: Task | Script, config: RunConfig, view: Observer, namespaces: Namespaces | None) -> Result:
    if isinstance(what, Script):
        return run_script(what, config, view)
    return run_task(what, config, view, network=namespaces.network if namespaces else None)


def audit_samples(run_dir: RunDir) -> SampleAudit | None:
    """How often each sample was used, from the run's ledger; None without one."""
    found = audit_file(run_dir.ledger)
    if not found.epochs:
        return None
    return SampleAudit(
        lost=sum(e.lost for e in found.epochs),
        repeated=sum(e.repeated for e in found.epochs),
        is_clean=found.is_clean,
        lines=tuple(found.report_lines()),
    )


def _failure(error: Exception, watchdog: Watchdog) -> tuple[RunOutcome, str]:
    return ("hang", watchdog.reason) if watchdog.reason else ("failed", error_text(error))


def _injections(
    killer: Killer, run_dir: RunDir | None, *, workers: int, namespaces: Namespaces | None
) -> list[Injection]:
    """The faults injected so far, oldest first."""
    found = []
    for kill in list(killer.kills):
        name = f"worker {kill.worker_id}" if kill.worker_id < workers else f"server {kill.worker_id - workers}"
        found.append(
            Injection(what=f"kill {name}", time=kill.time, worker_id=kill.worker_id, pid=kill.pid, step=kill.step)
        )
    for record in faults_injected(run_dir.path) if run_dir is not None else ():
        kind, worker_id = record.fault.kind, record.worker_id
        found.append(
            Injection(
                what=str(record.fault),
                time=record.time,
                worker_id=worker_id,
                pid=record.pid,
                step=record.step,
                is_deadly=kind in ("kill", "raise"),
                also=_behind_same_link(worker_id, run_dir, namespaces) if kind == "cut" else (),
            )
        )
    return sorted(found, key=lambda injection: injection.time)


def _behind_same_link(worker_id: int, run_dir: RunDir | None, namespaces: Namespaces | None) -> tuple[int, ...]:
    """The other processes of a run in the same namespace."""
    if run_dir is None or namespaces is None:
        return ()
    plan = run_dir.read_plan()
    processes = range(len(plan["workers"]) + plan["servers"])
    of = namespaces.number_of
    return tuple(other for other in processes if other != worker_id and of(other) == of(worker_id))


class _LiveScore:
    """Reports each recovery once, as soon as it is known."""

    def __init__(
        self,
        listener: RunListener,
        injections_in: Callable[[RunDir | None], list[Injection]],
        workers: int,
        limit_s: float,
        earlier_faults: int,
    ) -> None:
        self._listener, self._injections_in, self._workers, self._limit_s = listener, injections_in, workers, limit_s
        self._number = earlier_faults
        self._reported: set[Injection] = set()
        self._events: list[Event] = []
        self._run_dir: RunDir | None = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run_dir = RunDir(Path(event.run_dir))
        if isinstance(event, WorkerFailure | Recovered | WorkerReady):
            self._events.append(event)
        if isinstance(event, Recovered):
            injections = self._injections_in(self._run_dir)
            found = recoveries(
                self._events, injections, outcome="interrupted", workers=self._workers, limit_s=self._limit_s
            )
            self.report(r for r in found if r.recovered_s is not None)

    def report(self, found: Iterable[Recovery]) -> None:
        for recovery in found:
            if recovery.injection not in self._reported:
                self._reported.add(recovery.injection)
                self._number += 1
                self._listener.on_recovery(recovery, self._number)


@contextmanager
def _script_in_environment(faults: Sequence[Fault]) -> Iterator[None]:
    """Workers inherit the environment of the process that starts the engine."""
    script = install(as_script(faults))
    before = {name: os.environ.get(name) for name in script}
    os.environ.update(script)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
