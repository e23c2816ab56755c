"""Fitting by blocks of parameters: `syncline.fit("lasso(alpha=0.1)", data=(X, y), workers=2)`.

Here: `fit`, what it returns, and a fit in this process, for one worker. Several workers are processes of a run like any
other. Not here: the apps and their rounds (`blocks/`), and what a worker does (`workers/block_worker.py`).
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from syncline import boundary, task_file
from syncline.blocks.app import App, Arrays
from syncline.blocks.apps import make_app
from syncline.blocks.fit_task import BlockFit
from syncline.blocks.loop import Alone
from syncline.blocks.reading import names_in, read_data
from syncline.blocks.schedule import Blocks
from syncline.config.run import FOR_FITS, RunConfig
from syncline.coordinator.open_run import OpenRun, open_run
from syncline.driver import run_block_fit
from syncline.errors import ConfigError, Interrupted, check_options
from syncline.observe.observer import Observer, WithoutEnd, choose_view
from syncline.planning.machine import Machine
from syncline.planning.planner import TaskFacts, make_plan
from syncline.telemetry.events import Event, RunEnded, RunStarted, Summary, to_line
from syncline.telemetry.recorder import Recorder
from syncline.telemetry.run_dir import EventLog, RunDir

__all__ = ["Fitted", "fit", "run_fit"]

_KEPT_AT_ONCE_BYTES = 16 * 1024 * 1024
"""Larger data is written to the run directory of a fit in this process only when there is a checkpoint to resume."""


@dataclass(frozen=True)
class Fitted:
    """What a fit has found.

    >>> found = syncline.fit("lasso(alpha=0.1)", data=(X, y), quiet=True)                     # doctest: +SKIP
    >>> found.values["coefficients"], found.predict(X)                                        # doctest: +SKIP
    """

    values: Mapping[str, np.ndarray]
    """Arrays by name, such as "coefficients"."""
    metrics: Mapping[str, float]
    """The objective, how far it may be from done (`gap`), and others."""
    converged: bool
    """Whether the gap is at most the tolerance."""
    rounds: int
    seconds: float
    """Wall-clock time of the whole call."""
    run_dir: Path
    """The directory with plan, events, checkpoints and result.npz."""
    app: App = field(repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)
    """What the data calls its columns, items or words, if it does."""

    def __getitem__(self, name: str) -> np.ndarray:
        """One of the arrays."""
        if name not in self.values:
            raise ConfigError(f"{self.app.name} finds {', '.join(self.values)}, but no {name!r}.", code="no-such-value")
        return self.values[name]

    def predict(self, data: Any) -> np.ndarray:
        """What the model says about new data."""
        return self.app.predict(dict(self.values), data)

    def describe(self) -> list[str]:
        """The result in a few lines."""
        return self.app.describe(dict(self.values), self.names)

    def save(self, path: str | Path) -> None:
        """Save all arrays as `.npz`, to load with `numpy.load`, or to start another fit from."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ConfigError(f"{path} must end in .npz.", code="ending", path=str(path))
        np.savez(path, **self.values)  # type: ignore[arg-type]  # arrays by name


@boundary.guarding()
def fit(
    model: Any,
    *,
    data: Any,
    target: str | None = None,
    schedule: Blocks | None = None,
    tolerance: float | None = None,
    max_rounds: int | None = None,
    start: Any = None,
    quiet: bool = False,
    **settings: Any,
) -> Fitted:
    """Fit a model block by block of its parameters, on one worker or several: `syncline fit --help` lists the models.

    `data` is a pair of arrays (X, y), a path (CSV, Parquet; `target` names the column with the targets), or what else
    the model takes. `start` is an earlier result to start from, or its file. `settings` are those of a run: workers
    (default 1), seed, resume, checkpoint_every_s, out and others.

    >>> found = syncline.fit("lasso(alpha=0.1)", data=(X, y), workers=2)                      # doctest: +SKIP
    """
    check_options("syncline.fit", settings, FOR_FITS, kind="setting")
    config = RunConfig(**{"workers": 1, "tune": "off", **settings})
    view = WithoutEnd(choose_view(quiet=quiet, json=False))  # the exception reports a failure
    return run_fit(
        model, data, config, view, target=target, schedule=schedule, tolerance=tolerance, max_rounds=max_rounds,
        start=start,
    )  # fmt: skip


def run_fit(
    model: Any, data: Any, config: RunConfig, view: Observer, *, target: str | None = None,
    schedule: Blocks | None = None, tolerance: float | None = None, max_rounds: int | None = None, start: Any = None,
) -> Fitted:  # fmt: skip
    """Fit, and show it in `view`."""
    started = time.monotonic()
    app = make_app(model)
    content, title = read_data(data, app, target)
    what = BlockFit.make(
        app, content, title=title, workers=config.workers, schedule=schedule, tolerance=tolerance,
        max_rounds=max_rounds, seed=config.seed, warm=_warm(start, app),
    )  # fmt: skip
    if config.workers == 1:
        metrics, rounds, run_dir = _run_here(what, config, view, started)
    else:
        result = run_block_fit(what, config, view)
        metrics, rounds, run_dir = result.metrics, result.steps, result.run_dir
    from syncline.workers.block_worker import RESULT

    with np.load(run_dir / RESULT, allow_pickle=False) as found:
        values = {name: found[name] for name in found.files}
    return Fitted(
        values=values, metrics=metrics, converged=metrics["gap"] <= what.tolerance, rounds=rounds,
        seconds=time.monotonic() - started, run_dir=run_dir, app=app, names=names_in(content),
    )  # fmt: skip


def _warm(start: Any, app: App) -> Arrays | None:
    """The arrays of an earlier result."""
    if start is None:
        return None
    if isinstance(start, Fitted):
        return dict(start.values)
    if isinstance(start, Mapping):
        return {name: np.asarray(array) for name, array in start.items()}
    path = Path(start)
    path = path / "result.npz" if path.is_dir() else path
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a result to start {app.name} from: {error}. Pass a .npz file that a fit has saved, or its "
            "run directory.", code="not-a-result", path=str(path),
        ) from error  # fmt: skip


class _Here:
    """Shows and logs the events of a fit in this process."""

    def __init__(self, view: Observer, log: EventLog, recorder: Recorder) -> None:
        self._view, self._log, self._recorder = view, log, recorder

    def emit(self, event: Event) -> None:
        self._view.on_event(event)
        self._log.write(event)

    def drain(self) -> None:
        for event in self._recorder.drain():
            self.emit(event)


def _run_here(what: BlockFit, config: RunConfig, view: Observer, started: float) -> tuple[dict[str, float], int, Path]:
    """Fit in this process: metrics, rounds and the run directory."""
    from syncline.workers.block_worker import FitRun, metrics_of

    boundary.check_surroundings()
    machine = Machine.here()
    plan = make_plan(TaskFacts(**what.run_facts()), config, machine)
    with closing(view):
        opened = open_run(config, plan, secrets.token_hex(4), lambda _: None)
        run_dir, recorder = opened.run_dir, Recorder(0)
        with boundary.in_run(run_dir.path), closing(opened.lock), closing(EventLog(run_dir)) as log:
            here = _Here(view, log, recorder)
            resumed = int(opened.checkpoint.stem.removeprefix("step-")) if opened.checkpoint else None
            here.emit(
                RunStarted(
                    run_dir=str(run_dir.path), plan=opened.plan.to_dict(), machine=machine.to_dict(),
                    resumed_from_step=resumed,
                )
            )  # fmt: skip
            keeper = _TaskKeeper(what, run_dir)
            run = FitRun(what, opened.plan, run_dir, recorder, before_saving=keeper.write)
            fitting = run.loaded(opened.checkpoint)
            with _interrupts() as received:
                stopped_early = run.rounds(
                    fitting, Alone(), saves=True, before=lambda _: here.drain(), wants_stop=lambda: bool(received)
                )  # fmt: skip
                if stopped_early:
                    run.save(fitting)
                    here.drain()
                    raise _stopped(here, opened, fitting.round, received[0])
                run.finish(fitting, keeps_task=keeper.is_small)
            here.drain()
            metrics = metrics_of(run.last)
            summary = Summary(
                metrics=metrics, samples_per_s=0.0, seconds=time.monotonic() - started, steps=fitting.round, epochs=0.0,
                workers=1, run_dir=str(run_dir.path),
            )  # fmt: skip
            run_dir.write(run_dir.summary, to_line(summary))
            here.emit(summary)
            return metrics, fitting.round, run_dir.path


class _TaskKeeper:
    """Writes the task into the run directory, once, when there is something to resume."""

    def __init__(self, what: BlockFit, run_dir: RunDir) -> None:
        self._what, self._run_dir = what, run_dir
        self.is_small = sum(array.nbytes for array in what.problem.values()) <= _KEPT_AT_ONCE_BYTES

    def write(self) -> None:
        if not self._run_dir.task_file.exists():
            task_file.write(self._run_dir.task_file, self._what)


def _stopped(here: _Here, opened: OpenRun, rounds: int, number: int) -> Interrupted:
    command = f"syncline resume {opened.run_dir.path}"
    message = f"Stopped after round {rounds:,}; everything is saved. To resume: {command}"
    here.emit(RunEnded(reason="stopped", message=message))
    return Interrupted(
        message, step=rounds, run_dir=str(opened.run_dir.path), resume_command=command,
        signal=signal.Signals(number).name,
    )  # fmt: skip


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that grows with each SIGINT or SIGTERM, so that the round in progress is completed."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
