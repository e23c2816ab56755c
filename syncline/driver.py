"""The driver: plan, launch, supervise, return the result.

Here: `train`, `run_script` and `resume`. Not here: reading flags (`cli/`), deciding (`planning/`,
`coordinator/supervision.py`), training (`workers/`). The driver avoids importing torch: while it gets ready, the engine
already imports it for the workers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from syncline import boundary, task_file
from syncline.config.owned_files import temporary_name
from syncline.config.run import RunConfig, read_settings
from syncline.coordinator.coordinator import Coordinator
from syncline.coordinator.open_run import earlier_run, open_run
from syncline.coordinator.root_cause import explain_failure, start_again
from syncline.coordinator.run_guard import RunGuard
from syncline.coordinator.supervision import EndRun
from syncline.data.named import Progress
from syncline.engines.choose import engine_for, keep_together
from syncline.engines.engine import Engine
from syncline.engines.network import Host, Network
from syncline.errors import SCRIPT_EXIT, ConfigError, Interrupted, SynclineError, check_options
from syncline.layouts.layout import check_layout_text, is_auto, is_plain, needs_model, read_layout
from syncline.measuring import choose, possible_strategies
from syncline.observe.observer import Observer, WithoutEnd, choose_view
from syncline.planning.adviser import Advice, Adviser
from syncline.planning.cost.auto import cannot_choose, is_auto_strategy, read_mode
from syncline.planning.cost.network import read_link
from syncline.planning.expected import Expected
from syncline.planning.forecaster import Forecaster
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, check_same_method, make_plan, saved_plan
from syncline.result import Result
from syncline.strategies import explain as strategy_text
from syncline.strategies.own import only_our_files
from syncline.strategies.reading import read_strategy
from syncline.task import Script, Task
from syncline.telemetry.events import (
    CheckpointSaved,
    Event,
    FatalFailure,
    InfoMessage,
    RunEnded,
    RunStarted,
    Summary,
    WarningMessage,
    to_line,
)
from syncline.telemetry.run_dir import EventLog, RunDir

if TYPE_CHECKING:
    from syncline.blocks.fit_task import BlockFit
    from syncline.graphs.work import VertexWork

__all__ = ["explain_task", "resume", "run_block_fit", "run_script", "run_task", "run_vertices", "train"]

_Work: TypeAlias = "Task | Script | BlockFit | VertexWork"
"""What the workers of a run do."""

_LARGEST_KEPT_PAYLOAD_BYTES = 256 * 1024 * 1024


@boundary.guarding()
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
    are Datasets, tensors, arrays, (inputs, targets) or a name such as 'mnist'; loss, optimizer, schedule and metrics go
    by torch's and torchmetrics' names or are callables. `settings` are those of `RunConfig`: workers, epochs, ...

    >>> result = syncline.train(model=Net(), data=train_set, test=test_set, workers=4)   # doctest: +SKIP
    >>> result.metrics["test/accuracy"], result.model, result.run_dir                    # doctest: +SKIP
    """
    check_options("syncline.train", settings, [f.name for f in dataclasses.fields(RunConfig)], kind="setting")
    if "strategy" in settings:
        settings["strategy"] = str(settings["strategy"])  # a Strategy prints as what is read back
    if "layout" in settings:
        settings["layout"] = str(settings["layout"])
    task = Task(
        model=model, data=data, test=test, loss=loss, optimizer=optimizer, schedule=schedule, metrics=metrics,
        weight_decay=weight_decay, clip_norm=clip_norm, augment=augment,
    )  # fmt: skip
    view = WithoutEnd(choose_view(quiet=quiet, json=False))  # the exception reports a failure
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
    """Train a task and show it in `view`, on an `engine` that is starting already, if given.

    Otherwise a local engine runs the workers on the hosts of `network`, by default on this machine.
    """
    boundary.check_surroundings()
    notes: tuple[str, ...] = ()
    adapts = False
    if is_auto_strategy(config.strategy):
        adapts = read_mode(config.strategy) == "adapt"
        task = task.with_defaults().located(data_dir, progress)
        config, notes = _choose_strategy(task, config, view, network)
    _check_texts(config)
    if not is_plain(config.layout):
        task = task.with_defaults().located(data_dir, progress)
        config, more = _settle(task, task.facts(), config, network.hosts if network is not None else ())
        notes += more
    engine = engine or engine_for(config.engine, network)  # first, because it takes a second to start
    with closing(view), closing(engine):
        task = task.with_defaults().located(data_dir, progress)
        facts = task.facts()
        request = _RunRequest(facts, config, task, engine, view, notes, adapts=adapts)
        return _run_adapting(request, network) if adapts else _run(request)


def _run_adapting(request: _RunRequest, network: Network | None) -> Result:
    """Run, and switch whenever another strategy should be clearly sooner: stop, and resume with that one."""
    while True:
        with closing(request.engine):
            try:
                return _run(request)
            except _Switched as switched:
                advice, run_dir = switched.advice, switched.run_dir
        config = request.config.replace(strategy=advice.strategy, resume=str(run_dir), name=None)
        note = f"auto(adapt) switched to {advice.strategy} after step {advice.step}."
        engine = engine_for(config.engine, network)
        request = dataclasses.replace(request, config=config, engine=engine, notes=(note,))


def _check_texts(config: RunConfig, *, is_own_loop: bool = False) -> None:
    """What is wrong with a setting that has a grammar of its own fails before anything starts."""
    read_strategy(config.strategy)
    check_layout_text(config.layout, is_own_loop=is_own_loop)
    if config.network is not None:
        read_link(config.network)


def _choose_strategy(
    task: Task, config: RunConfig, view: Observer, network: Network | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings with the strategy that is chosen now, or that was chosen for the run to resume."""
    read_mode(config.strategy)  # what cannot be read fails first
    earlier = earlier_run(config, task.facts().fingerprint)
    if earlier is not None:
        strategy = saved_plan(earlier.read_plan(), earlier.plan).strategy
        note = f"--strategy {config.strategy}: resuming with {strategy}, as {earlier.path.name} was started."
        return config.replace(strategy=strategy), (note,)

    def say(text: str) -> None:
        view.on_event(InfoMessage(message=text))

    on_hosts = config.engine != "local" or network is not None
    if on_hosts and config.network is None:
        raise cannot_choose(
            config.strategy,
            "it must know what connects the hosts: give --network, such as --network 1gbit,100us",
            "network",
        )
    hosts = min(config.workers, len(network.hosts)) if network is not None else config.workers
    return choose(task, config, say, run_task, hosts=hosts if on_hosts else 1)


def _settle(
    task: Task, facts: TaskFacts, config: RunConfig, hosts: Sequence[Host] = ()
) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings with the layout of the run, and what to say about it; `ConfigError` before any process starts."""
    machine = Machine.here()
    names = [host.name or machine.host for host in hosts]
    if config.engine == "local" and not is_auto(config.layout) and len(set(names)) <= 1:
        make_plan(facts, config, machine, names)  # what does not depend on the model
    if not needs_model(config.layout, config.workers, has_memory_limit=config.memory_limit is not None):
        return config, ()
    from syncline.workers.entry import settle_layout  # imports torch

    return settle_layout(task, facts, config, machine)


def explain_task(task: Task, config: RunConfig, *, data_dir: Path | None = None) -> str:
    """Describe what a run would do; nothing is started."""
    if is_auto_strategy(config.strategy):
        why = "nothing is measured in a dry run; 'syncline plan' measures and compares all strategies"
        raise cannot_choose(config.strategy, why, "dry-run")
    strategy = read_strategy(config.strategy)
    check_layout_text(config.layout)
    task = task.with_defaults().located(data_dir, None)
    config, notes = _settle(task, task.facts(), config)
    plan = make_plan(task.facts(), config, Machine.here())
    layout = read_layout(plan.layout)
    from syncline.workers.entry import describe_spread, parameter_shapes  # imports torch

    shapes = parameter_shapes(task)
    parameter_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
    method = strategy.method
    members = plan.size if method.sums_exact_gradients else layout.grid(plan.size).replicas
    lines = [
        *strategy_text.explain(strategy, members, shapes),
        *layout.explain(plan.size, parameter_bytes, method),
    ]
    return "\n".join([plan.describe(), *lines, *describe_spread(task, plan), *notes])


def run_script(script: Script, config: RunConfig, view: Observer) -> Result:
    """Run a user's own training loop on several workers."""
    boundary.check_surroundings()
    if is_auto_strategy(config.strategy):
        raise cannot_choose(config.strategy, "a script's own loop cannot be tried out before the run", "own-loop")
    _check_texts(config, is_own_loop=True)
    if not Path(script.path).is_file():
        raise ConfigError(f"There is no file {script.path}.", code="no-file", path=script.path)
    engine = engine_for(config.engine)
    with closing(view), closing(engine):
        facts = _script_facts(script)
        script = Script(str(Path(script.path).resolve()), script.arguments)
        return _run(_RunRequest(facts, config, script, engine, view))


def run_block_fit(fit: BlockFit, config: RunConfig, view: Observer) -> Result:
    """Fit by blocks of parameters on several workers."""
    boundary.check_surroundings()
    engine = engine_for(config.engine)
    with closing(view), closing(engine):
        return _run(_RunRequest(TaskFacts(**fit.run_facts()), config, fit, engine, view))


def run_vertices(work: VertexWork, data: str, config: RunConfig, view: Observer) -> Result:
    """Run a vertex program on several workers. The result's model is the state of all vertices, by name."""
    boundary.check_surroundings()
    engine = engine_for(config.engine)
    with closing(view), closing(engine):
        facts = TaskFacts(kind="graph", model=work.name, data=data, fingerprint=work.fingerprint)
        return _run(_RunRequest(facts, config, work, engine, view))


@boundary.guarding()
def resume(run_dir: str | Path, view: Observer | None = None, *, quiet: bool = False, **changes: Any) -> Result:
    """Resume an interrupted run from the exact sample; `changes` are settings to change, such as workers or epochs."""
    boundary.check_surroundings()
    found = RunDir.owned(Path(run_dir))
    if not found.task_file.exists():
        raise ConfigError(
            f"The task of {run_dir} was too large to be saved with the run. "
            f"Run the same script again with resume={str(run_dir)!r}.",
            code="no-task",
            run_dir=str(run_dir),
        )
    check_options("syncline.resume", changes, [f.name for f in dataclasses.fields(RunConfig)], kind="setting")
    if is_auto_strategy(str(changes.get("strategy", ""))):
        raise cannot_choose(changes["strategy"], "the strategy of a run is chosen when it is started", "resume")
    saved = {**read_settings(found.config), "resume": str(found.path), "name": None}
    config = RunConfig(**{**saved, **changes})
    old = saved_plan(found.read_plan(), found.plan)
    if old.kind == "graph":
        raise _resumes_elsewhere(found)
    check_same_method(config, old, found.config, changes)
    view = view or WithoutEnd(choose_view(quiet=quiet, json=False))
    own_files = nullcontext if "strategy" in changes else only_our_files
    with own_files():
        config, notes = _settle_again(found, config, old)
    engine = engine_for(config.engine)
    with closing(view), closing(engine), own_files():
        what = task_file.read_saved(found.task_file)
        # The data of a task may have changed since: count it again. A script's workers do so themselves.
        facts = _facts_of(what)
        facts = dataclasses.replace(facts, recommended_epochs=old.epochs, recommended_batch=old.batch)
        return _run(_RunRequest(facts, config, what, engine, view, notes))


def _settle_again(found: RunDir, config: RunConfig, old: Plan) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings and notes for the layout of a run that is resumed."""
    if is_plain(config.layout):
        return config, ()
    what = task_file.read_saved(found.task_file)
    if not isinstance(what, Task):
        check_layout_text(config.layout, is_own_loop=True)
        return config, ()
    facts = dataclasses.replace(what.facts(), recommended_epochs=old.epochs, recommended_batch=old.batch)
    return _settle(what, facts, config)


def _facts_of(what: Task | Script | BlockFit) -> TaskFacts:
    if isinstance(what, Task):
        return what.facts()
    return _script_facts(what) if isinstance(what, Script) else TaskFacts(**what.run_facts())


def _script_facts(script: Script) -> TaskFacts:
    return TaskFacts(kind="own-loop", model=Path(script.path).stem, data="own", fingerprint=script.path)


def _resumes_elsewhere(found: RunDir) -> ConfigError:
    return ConfigError(
        f"{found.path} is a run of a vertex program. To continue it, repeat its command with --resume {found.path}, or "
        f"its call with resume={str(found.path)!r}.",
        code="resumes-with-its-command", run_dir=str(found.path),
    )  # fmt: skip


@dataclass(frozen=True)
class _RunRequest:
    """One run to carry out."""

    facts: TaskFacts
    config: RunConfig
    what: _Work
    engine: Engine
    view: Observer
    notes: tuple[str, ...] = ()
    """What to say of the choice of a strategy or layout."""
    adapts: bool = False
    """Whether to switch to another strategy when that should be clearly sooner."""


class _Switched(Exception):
    """The run has stopped, to be resumed with another strategy."""

    def __init__(self, advice: Advice, run_dir: Path) -> None:
        super().__init__(advice.text)
        self.advice, self.run_dir = advice, run_dir


class _Emitter:
    """Writes each event to the run directory and shows it; remembers the last checkpoint.

    A full disk does not end a run: the event is then only shown, and the user warned once.
    """

    def __init__(self, log: EventLog, view: Observer, run_dir: RunDir, forecaster: Forecaster) -> None:
        self._log, self._view, self._run_dir, self._forecaster = log, view, run_dir, forecaster
        self._has_warned_of_disk = False
        self.last_checkpoint: Path | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            # A remote worker has other paths; its checkpoint is copied to this one.
            self.last_checkpoint = self._run_dir.checkpoints / Path(event.path).name
        self._view.on_event(event)
        try:
            self._log.write(event)
        except OSError as error:
            self.warn_of_disk("events.jsonl", error)
        self.expect(self._forecaster.on_event(event))

    def expect(self, expected: Expected | None) -> None:
        """Write what is expected of the run, if anything new is."""
        if expected is not None:
            self.write(self._run_dir.expected, expected.to_json())

    def write(self, path: Path, data: bytes) -> None:
        """Write a file of the run directory that the run can do without."""
        try:
            self._run_dir.write(path, data)
        except OSError as error:
            self.warn_of_disk(path.name, error)

    def warn_of_disk(self, name: str, error: OSError) -> None:
        """Warn, once, that a file of the run directory could not be written."""
        if not self._has_warned_of_disk:
            self._has_warned_of_disk = True
            self._view.on_event(WarningMessage(message=f"Cannot write {name}: {error.strerror}. Training continues."))


class _Switch:
    """Passes events on, and has the run stop when another strategy should be clearly sooner."""

    def __init__(self, emit: _Emitter, request: _RunRequest, plan: Plan, machine: Machine) -> None:
        names = possible_strategies(request.facts, request.config, machine, [worker.host for worker in plan.workers])
        self._emit = emit
        self._adviser = Adviser(plan, machine, names, request.config.network)
        self.advice: Advice | None = None
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> None:
        self._emit(event)
        advice = self._adviser.on_event(event) if self.advice is None else None
        if advice is not None:
            self.advice = advice
            self._emit(InfoMessage(message=f"{advice.text} Switching."))
            self.stop()


def _run(request: _RunRequest) -> Result:
    started = time.monotonic()
    config = request.config

    def report(text: str) -> None:
        request.view.on_event(InfoMessage(message=text))

    request.engine.reserve(config.workers, report)
    machine = request.engine.machine
    keep_together(request.engine, read_layout(config.layout).grid(config.workers).per_replica)
    network = request.engine.network
    hosts = [network.host_of(worker_id).name or machine.host for worker_id in range(config.workers)]
    plan = make_plan(request.facts, config, machine, hosts)
    session = secrets.token_hex(4)
    opened = open_run(config, plan, session, report)
    plan, run_dir, checkpoint = opened.plan, opened.run_dir, opened.checkpoint
    with (
        boundary.in_run(run_dir.path),
        closing(opened.lock),
        closing(EventLog(run_dir)) as log,
        _written_task(run_dir, request.what) as task_path,
    ):
        forecaster = Forecaster(plan, machine, config.network)
        emit = _Emitter(log, request.view, run_dir, forecaster)
        emit.last_checkpoint = checkpoint
        emit.expect(forecaster.before_start())
        emit(
            RunStarted(
                run_dir=str(run_dir.path),
                plan=plan.to_dict(),
                machine=machine.to_dict(),
                resumed_from_step=_step_of(checkpoint) if checkpoint else None,
            )
        )
        for note in request.notes:
            emit(InfoMessage(message=note))
        for problem in opened.problems:
            emit(WarningMessage(message=f"{problem} Resuming from an earlier checkpoint."))

        def restore() -> None:
            opened.write()
            if not task_path.exists():
                task_file.write(task_path, request.what)
            log.follow()

        switch = _Switch(emit, request, plan, machine) if request.adapts else None
        coordinator = Coordinator(
            plan, run_dir, request.engine, task_path=task_path, checkpoint_path=checkpoint,
            guard=RunGuard(run_dir, opened.lock, restore), session=session, emit=switch or emit,
        )  # fmt: skip
        with closing(coordinator):
            if switch is not None:
                switch.stop = coordinator.stop
            end = _supervise(coordinator, emit)
        if switch is not None and switch.advice is not None and end.outcome == "stopped" and not coordinator.stopped_by:
            raise _Switched(switch.advice, run_dir.path)
        result = _conclude(end.outcome, coordinator, run_dir, plan, emit, started, request.what)
        emit.expect(forecaster.at_end())
        return result


def _supervise(coordinator: Coordinator, emit: _Emitter) -> EndRun:
    try:
        return coordinator.run()
    except SynclineError as error:
        emit(RunEnded(reason="failed", message=str(error)))
        raise


def _conclude(
    outcome: str,
    coordinator: Coordinator,
    run_dir: RunDir,
    plan: Plan,
    emit: _Emitter,
    started: float,
    what: _Work,
) -> Result:
    if outcome == "failed":
        error = explain_failure(
            coordinator.supervision, plan, run_dir, coordinator.last_step, emit.last_checkpoint, coordinator.diagnosis
        )
        cause = coordinator.supervision.failures.root_cause()
        if error.code == SCRIPT_EXIT:  # the script has printed why
            emit(RunEnded(reason=SCRIPT_EXIT, message=str(error)))
            raise error
        emit(FatalFailure(worker_id=cause.worker_id if cause else 0, message=str(error)))
        emit(RunEnded(reason="failed", message=str(error)))
        raise error
    finished = coordinator.supervision.summary
    resume_command = f"syncline resume {run_dir.path}"
    if plan.kind == "graph":
        resume_command = f"the same command with --resume {run_dir.path}, or resume={str(run_dir.path)!r} in Python"
    if coordinator.membership.restarts_together and (outcome in ("killed", "stopped") or finished is None):
        raise _script_stopped(outcome, coordinator, run_dir, emit)
    if outcome == "killed" or finished is None:
        checkpoint = emit.last_checkpoint.name if emit.last_checkpoint else None
        hint = f"To resume from the last checkpoint ({checkpoint}): {resume_command}"
        message = f"Stopped without saving. {hint if checkpoint else 'There is no checkpoint to resume from.'}"
        emit(RunEnded(reason="killed", message=message))
        raise Interrupted(
            message, code="killed", run_dir=str(run_dir.path), checkpoint=checkpoint, signal=coordinator.stopped_by,
            resume_command=resume_command if checkpoint else None,
        )  # fmt: skip
    summary = _summary_of(finished.summary, plan, run_dir, started, stopped_early=outcome == "stopped")
    if outcome == "stopped":
        what_done = "round" if plan.kind in ("graph", "fit") else "step"
        message = f"Stopped after {what_done} {summary.steps}; everything is saved. To resume: {resume_command}"
        emit(RunEnded(reason="stopped", message=message))
        raise Interrupted(
            message, step=summary.steps, run_dir=summary.run_dir, resume_command=resume_command,
            signal=coordinator.stopped_by,
        )  # fmt: skip
    emit.write(run_dir.summary, to_line(summary))
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


def _script_stopped(outcome: str, coordinator: Coordinator, run_dir: RunDir, emit: _Emitter) -> Interrupted:
    """The end of a script that trains with torch.distributed itself, and was stopped."""
    reason = "stopped" if outcome == "stopped" else "killed"
    message = f"{'Stopped' if reason == 'stopped' else 'Killed'} the script. {start_again(run_dir)}"
    emit(RunEnded(reason=reason, message=message))
    return Interrupted(
        message, code=reason, run_dir=str(run_dir.path), signal=coordinator.stopped_by,
        resume_command=f"syncline resume {run_dir.path}",
    )  # fmt: skip


def _summary_of(final: dict[str, Any], plan: Plan, run_dir: RunDir, started: float, *, stopped_early: bool) -> Summary:
    """The summary of a run from `final`, a worker's last message."""
    return Summary(
        metrics=final["metrics"],
        samples_per_s=final["samples"] / final["seconds"] if final["seconds"] else 0.0,
        seconds=time.monotonic() - started,
        steps=final["steps"],
        epochs=final["epochs"],
        workers=final.get("workers", plan.size),
        run_dir=str(run_dir.path),
        stopped_early=stopped_early,
        has_steps=final.get("has_steps", True),
        peak_memory_bytes={int(worker_id): peak for worker_id, peak in final["peak_memory_bytes"].items()},
    )


@contextmanager
def _written_task(run_dir: RunDir, what: _Work) -> Iterator[Path]:
    """The task as a file for the workers; saved with the run unless it is very large."""
    temporary = temporary_name(run_dir.task_file)
    try:
        task_file.write(temporary, what)
        if temporary.stat().st_size <= _LARGEST_KEPT_PAYLOAD_BYTES:
            os.replace(temporary, run_dir.task_file)
            yield run_dir.task_file
        else:
            yield temporary
    finally:
        with suppress(OSError):  # the run directory may be gone
            temporary.unlink()


def _load_model(what: _Work, run_dir: RunDir) -> Any:
    if not isinstance(what, Task | Script):
        if run_dir.read_plan().get("kind") != "graph":
            raise ConfigError("A fit has no network: its arrays are in result.npz.", code="no-network")
        from syncline.checkpoint.store import newest_sound

        return newest_sound(run_dir.checkpoints)[1]["model"]
    from syncline.workers.entry import load_trained_model

    return load_trained_model(what, run_dir)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))
