"""The driver: from what the user asks for to a result. Plan, launch, supervise, return.

Here: `train`, `run_script` and `resume`, and the order of things on the driver's side. Not here: reading flags
(`cli/`), deciding (`plan/`, `coordinator/supervision.py`), training (`workers/`). torch is not imported here unless it
must be: while the driver gets ready, the engine is already importing it for the workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline import payload
from syncline.config.run import RunConfig
from syncline.coordinator.cause import explain_failure
from syncline.coordinator.coordinator import Coordinator
from syncline.data.ledger_file import put_back
from syncline.data.named import Progress
from syncline.engines.choose import engine_for
from syncline.engines.engine import Engine
from syncline.engines.network import Network
from syncline.errors import ConfigError, Interrupted, SynclineError, nearest
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.planner import TaskFacts, make_plan
from syncline.result import Result
from syncline.strategies.reading import read_strategy
from syncline.strategies.words import in_words
from syncline.task import Script, Task
from syncline.telemetry.events import (
    CheckpointSaved,
    Event,
    Noted,
    RunEnded,
    RunStarted,
    Summary,
    Warned,
    WorkerFailure,
    to_line,
)
from syncline.telemetry.run_dir import EventLog, RunDir
from syncline.view.observer import Observer, UntilTheEnd, choose_view

__all__ = ["explain_task", "resume", "run_script", "run_task", "train"]

_LARGEST_KEPT_PAYLOAD_BYTES = 256 * 1024 * 1024


def train(
    *,
    model: Any,
    data: Any,
    test: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    schedule: Any = None,
    metrics: Any = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    augment: Any = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Train `model` on `data` with many workers, and return the trained model and its metrics.

    Names or objects: `model` is an nn.Module, a function that makes one, or a name such as 'lenet'; `data` and `test`
    are Datasets, tensors, arrays, (inputs, targets) or a name such as 'mnist'; loss, optimiser, schedule and metrics go
    by torch's and torchmetrics' names or are callables. `settings` are those of `RunConfig`: workers, epochs, ...

    >>> result = syncline.train(model=Net(), data=train_set, test=test_set, workers=4)   # doctest: +SKIP
    >>> result.metrics["test/accuracy"], result.model, result.run_dir                    # doctest: +SKIP
    """
    known = [f.name for f in dataclasses.fields(RunConfig)]
    for name in settings:
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(known)}."
            raise ConfigError(f"syncline.train has no setting {name!r}.{hint}")
    if "strategy" in settings:
        settings["strategy"] = str(settings["strategy"])  # a Strategy prints as what is read back
    task = Task(
        model=model, data=data, test=test, loss=loss, optimizer=optimizer, schedule=schedule, metrics=metrics,
        weight_decay=weight_decay, clip_norm=clip_norm, augment=augment,
    )  # fmt: skip
    view = UntilTheEnd(choose_view(quiet=quiet, json=False))  # a failure is told by the exception
    return run_task(task, RunConfig(**settings), view, data_dir=Path(data_dir) if data_dir else None)


def run_task(
    task: Task,
    config: RunConfig,
    view: Observer,
    *,
    engine: Engine | None = None,
    network: Network | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train a task as `config` says, showing it in `view`; on an `engine` that is getting ready already, if given.

    Otherwise the workers are put where `network` says; None is this machine.
    """
    read_strategy(config.strategy)  # a mistake is answered before anything starts
    engine = engine or engine_for(config.engine, network)  # first of all: it takes a second to get ready
    try:
        task = task.with_defaults().located(data_dir, progress)
        facts = task.facts()
        return _run(_Order(facts, config, task, engine, view))
    finally:
        engine.close()
        view.close()


def explain_task(task: Task, config: RunConfig, *, data_dir: Path | None = None) -> str:
    """What a run would do, in words; nothing is started."""
    strategy = read_strategy(config.strategy)
    task = task.with_defaults().located(data_dir, None)
    plan = make_plan(task.facts(), config, Machine.here(), _resolve_device(config.device))
    from syncline.workers.entry import parameter_shapes  # brings torch

    return "\n".join([plan.in_words(), *in_words(strategy, plan.size, parameter_shapes(task))])


def run_script(script: Script, config: RunConfig, view: Observer) -> Result:
    """Run a user's own training loop on many workers."""
    read_strategy(config.strategy)  # a mistake is answered before anything starts
    if not Path(script.path).is_file():
        raise ConfigError(f"There is no file {script.path}.")
    engine = engine_for(config.engine)
    try:
        facts = TaskFacts(kind="own-loop", model=Path(script.path).stem, data="own", fingerprint=f"{script.path}")
        script = Script(str(Path(script.path).resolve()), script.arguments)
        return _run(_Order(facts, config, script, engine, view))
    finally:
        engine.close()
        view.close()


def resume(run_dir: str | Path, view: Observer | None = None, *, quiet: bool = False, **changes: Any) -> Result:
    """Go on with a run that was stopped or crashed, at the exact sample; `changes` are settings to change, such as
    workers or epochs.
    """
    found = RunDir.existing(Path(run_dir))
    if not found.payload.exists():
        raise ConfigError(
            f"The task of {run_dir} was too large to be kept with the run. "
            f"Run the same script again with resume={str(run_dir)!r}."
        )
    config = RunConfig(**{**json.loads(found.config.read_text()), "resume": str(found.path), **changes})
    view = view or UntilTheEnd(choose_view(quiet=quiet, json=False))
    engine = engine_for(config.engine)
    try:
        what = payload.read(found.payload)
        old = found.read_plan()
        facts = TaskFacts(
            kind=old["kind"], model=old["model"], data=old["data"], fingerprint=old["fingerprint"],
            train_samples=old["train_samples"] + old.get("held_out", 0), test_samples=old["test_samples"],
            recommended_epochs=old["epochs"], recommended_batch=old["batch"],
            clip_norm=what.clip_norm if isinstance(what, Task) else None,
        )  # fmt: skip
        return _run(_Order(facts, config, what, engine, view))
    finally:
        engine.close()
        view.close()


@dataclass(frozen=True)
class _Order:
    """One run to be done."""

    facts: TaskFacts
    config: RunConfig
    what: Task | Script
    engine: Engine
    view: Observer


class _Emitter:
    """Writes each event to the run directory and shows it; remembers what the end of the run needs.

    A disk that is full is no reason to end a run: the event is then only shown, and the user told once.
    """

    def __init__(self, log: EventLog, view: Observer, checkpoints: Path) -> None:
        self._log, self._view, self._checkpoints = log, view, checkpoints
        self._has_told_of_disk = False
        self.last_checkpoint: Path | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            # Who wrote it may have other paths; it comes to here.
            self.last_checkpoint = self._checkpoints / Path(event.path).name
        self._view.on_event(event)
        try:
            self._log.write(event)
        except OSError as error:
            self.tell_of_disk("events.jsonl", error)

    def tell_of_disk(self, name: str, error: OSError) -> None:
        """The file `name` of the run directory could not be written."""
        if not self._has_told_of_disk:
            self._has_told_of_disk = True
            self._view.on_event(Warned(message=f"{name} could not be written: {error.strerror}. Training goes on."))


def _run(order: _Order) -> Result:
    started = time.monotonic()
    config = order.config
    order.engine.gather(config.workers, lambda text: order.view.on_event(Noted(message=text)))
    machine = order.engine.machine
    hosts = [host.name or machine.host for host in order.engine.network.hosts]
    plan = make_plan(order.facts, config, machine, _resolve_device(config.device), hosts)
    run_dir, checkpoint, problems = _open_run_dir(config, plan)
    with closing(EventLog(run_dir)) as log, _payload_file(run_dir, order.what) as payload_path:
        emit = _Emitter(log, order.view, run_dir.checkpoints)
        emit.last_checkpoint = checkpoint
        emit(
            RunStarted(
                run_dir=str(run_dir.path),
                plan=plan.to_dict(),
                machine=machine.to_dict(),
                resumed_from_step=_step_of(checkpoint) if checkpoint else None,
            )
        )
        for problem in problems:
            emit(Warned(message=f"{problem} Going on from an earlier checkpoint instead."))
        coordinator = Coordinator(
            plan, run_dir, order.engine, payload_path=payload_path, checkpoint_path=checkpoint, emit=emit
        )
        with closing(coordinator):
            try:
                end = coordinator.run()
            except SynclineError as error:
                emit(RunEnded(reason="failed", message=str(error)))
                raise
        return _conclude(end.outcome, coordinator, run_dir, plan, emit, started, order.what)


def _conclude(
    outcome: str,
    coordinator: Coordinator,
    run_dir: RunDir,
    plan: Plan,
    emit: _Emitter,
    started: float,
    what: Task | Script,
) -> Result:
    if outcome == "failed":
        error = explain_failure(
            coordinator.supervision, plan, run_dir, coordinator.last_step, emit.last_checkpoint, coordinator.evidence
        )
        cause = coordinator.supervision.first_cause()
        emit(WorkerFailure(rank=cause.rank if cause else 0, message=str(error)))
        emit(RunEnded(reason="failed", message=str(error)))
        raise error
    finished = coordinator.supervision.summary
    go_on = f"go on with: syncline resume {run_dir.path}"
    if outcome == "killed" or finished is None:
        at = (
            f"The last checkpoint is {emit.last_checkpoint.name}; {go_on}"
            if emit.last_checkpoint
            else "There is no checkpoint."
        )
        message = f"Stopped at once. {at}"
        emit(RunEnded(reason="killed", message=message))
        raise Interrupted(message)
    told = finished.summary
    summary = Summary(
        metrics=told["metrics"],
        samples_per_s=told["samples"] / told["seconds"] if told["seconds"] else 0.0,
        seconds=time.monotonic() - started,
        steps=told["steps"],
        epochs=told["epochs"],
        workers=plan.size,
        run_dir=str(run_dir.path),
        stopped_early=outcome == "stopped",
        peak_memory_bytes={int(number): peak for number, peak in told["peak_memory_bytes"].items()},
    )
    if outcome == "stopped":
        message = f"Stopped after step {told['steps']}, everything saved; {go_on}"
        emit(RunEnded(reason="stopped", message=message))
        raise Interrupted(message)
    try:
        run_dir.write(run_dir.summary, to_line(summary))
    except OSError as error:
        emit.tell_of_disk(run_dir.summary.name, error)
    emit(summary)
    return Result(
        metrics=summary.metrics,
        run_dir=run_dir.path,
        steps=summary.steps,
        epochs=summary.epochs,
        seconds=summary.seconds,
        samples_per_s=summary.samples_per_s,
        peak_memory_bytes=summary.peak_memory_bytes,
        _load_model=lambda: _load_model(what, run_dir),
    )


def _resolve_device(wanted: str) -> str:
    if wanted == "cpu":
        return "cpu"
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return next((name for name, there in available.items() if there), "cpu")
    if not available[wanted]:
        built = (
            "this torch was built without it" if wanted == "cuda" and torch.version.cuda is None else "none was found"
        )
        raise ConfigError(
            f"--device {wanted} is not possible: {built} (torch {torch.__version__}). Use --device cpu or auto."
        )
    return wanted


def _open_run_dir(config: RunConfig, plan: Plan) -> tuple[RunDir, Path | None, list[str]]:
    """The run directory, the checkpoint to go on from, and what was wrong with newer ones."""
    earlier = _earlier_run(config, plan)
    if earlier is None:
        name = config.name or f"{_file_name(plan.model)}-{_file_name(plan.data)}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = RunDir.new(Path(config.out), name, exact=config.name is not None)
        checkpoint, problems = None, list[str]()
    else:
        from syncline.checkpoint.store import newest_sound  # brings torch, which only resuming needs on this side

        run_dir = earlier
        found, state, problems = newest_sound(run_dir.checkpoints)
        put_back(run_dir.ledger, state.get("ledger", ()))
        checkpoint = found.path
        run_dir.summary.unlink(missing_ok=True)
    settings = {
        **dataclasses.asdict(config),
        "resume": None,
        "out": str(run_dir.path.parent),
        "name": run_dir.path.name,
    }
    run_dir.write(run_dir.plan, json.dumps(plan.to_dict(), indent=1).encode())
    run_dir.write(run_dir.config, json.dumps(settings, indent=1).encode())
    return run_dir, checkpoint, problems


def _earlier_run(config: RunConfig, plan: Plan) -> RunDir | None:
    if config.resume is None:
        return None
    if config.resume != "auto":
        return RunDir.existing(Path(config.resume))
    unfinished = [
        RunDir(path.parent)
        for path in Path(config.out).glob("*/plan.json")
        if not (path.parent / "summary.json").exists() and any((path.parent / "checkpoints").glob("step-*.json"))
    ]
    same = [r for r in unfinished if r.read_plan().get("fingerprint") == plan.fingerprint]
    return max(same, key=lambda r: r.plan.stat().st_mtime, default=None)


@contextmanager
def _payload_file(run_dir: RunDir, what: Task | Script) -> Iterator[Path]:
    """The task as a file for the workers, kept with the run unless it is very large."""
    temporary = run_dir.payload.with_name(".task.payload.tmp")
    try:
        payload.write(temporary, what)
        if temporary.stat().st_size <= _LARGEST_KEPT_PAYLOAD_BYTES:
            os.replace(temporary, run_dir.payload)
            yield run_dir.payload
        else:
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _load_model(what: Task | Script, run_dir: RunDir) -> Any:
    from syncline.workers.entry import load_trained_model

    return load_trained_model(what, run_dir)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-")[:40]
