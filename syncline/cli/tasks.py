"""From the TASK argument to a task and its settings.

Three forms: a model's name, `file.py:name`, `file.toml`. Options override files; files override defaults.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.config.toml import read_run_file
from syncline.data import named
from syncline.errors import ConfigError, SynclineError, UnknownName
from syncline.models.declared.read import task_settings
from syncline.models.zoo import registry as zoo
from syncline.task import Task
from syncline.workers.failure import describe_failure


@dataclasses.dataclass(frozen=True)
class FoundTask:
    """What to train, how, and where to look for its data first."""

    task: Task
    config: RunConfig
    data_dir: Path | None


def find_task(what: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> FoundTask:
    """The task that `what` names; the options in `given` and `settings` take precedence over files."""
    flags = dict(given)
    lr = flags.pop("lr", None)
    if what.endswith(".toml"):
        file = read_run_file(Path(what))
        parts = {**task_settings(file), **flags}
        data_dir = parts.pop("data_dir", None)
        try:
            task, config = _task(parts, lr), RunConfig(**{**file.config, **settings})
        except ConfigError as error:
            raise file.located(error) from error
        return FoundTask(task, config, Path(data_dir) if data_dir else None)
    data_dir = flags.pop("data_dir", None)
    if ".py" in what:
        task = _task_of_python(what)
        changed = dataclasses.replace(task, **_without_schedule(flags))
        return FoundTask(_with_lr(changed, lr), RunConfig(**settings), data_dir)
    name = Spec.parse(what).name
    if not zoo.is_known(name):
        more = "A Python task is given as my_task.py:task, a run file as my_run.toml."
        raise UnknownName.among("model", name, [*zoo.names(), *zoo.graph_names()], more=more)
    if "data" not in flags:
        kind, known = "dataset", named.names()
        if zoo.card(name).takes == "graph":
            kind, known = "graph", ["cora", "debian", "graph:nodes.csv,edges.csv"]
        raise ConfigError(f"{name} needs a {kind}. Add --data with a path, a URL or one of: {', '.join(known)}.")
    return FoundTask(_task({"model": what, **flags}, lr), RunConfig(**settings), data_dir)


def _task(parts: Mapping[str, Any], lr: float | None) -> Task:
    return _with_lr(Task(**_without_schedule(dict(parts))), lr)


def _without_schedule(parts: dict[str, Any]) -> dict[str, Any]:
    if parts.get("schedule") == "none":
        # Explicitly no schedule; without the option, the model's card decides.
        parts["schedule"] = Spec("ConstantLR", {"factor": 1.0})
    return parts


def _with_lr(task: Task, lr: float | None) -> Task:
    if lr is None:
        return task
    if lr <= 0:
        raise ConfigError(f"lr is {lr:g}, but must be more than 0.")
    full = task.with_defaults()
    if not isinstance(full.optimizer, Spec):
        raise ConfigError("--lr cannot change an optimizer that is a function. Set the learning rate inside it.")
    schedule = full.schedule if task.optimizer is None else task.schedule
    return dataclasses.replace(task, optimizer=full.optimizer.with_options(lr=lr), schedule=schedule)


def _task_of_python(what: str) -> Task:
    file_name, _, name = what.partition(":")
    path = Path(file_name)
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    with _errors_in(path):
        module = _import_file(path)
    if not name:
        tasks = [n for n, v in vars(module).items() if isinstance(v, Task)]
        if len(tasks) != 1:
            found = f"has {len(tasks)} tasks ({', '.join(tasks)})" if tasks else "has no task"
            raise ConfigError(f"{path} {found}. Name the one to train: {path}:task")
        name = tasks[0]
    found_task = getattr(module, name, None)
    if found_task is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UnknownName.among(f"name in {path} called", name, public)
    if callable(found_task) and not isinstance(found_task, Task):
        with _errors_in(path):
            found_task = found_task()
    if not isinstance(found_task, Task):
        raise ConfigError(
            f"{what} is a {type(found_task).__name__}, not a syncline.Task nor a function that returns one."
        )
    return found_task


@contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """Report an exception in the user's file with its own traceback, without the frames of this command."""
    try:
        yield
    except SynclineError:
        raise  # the message says it all
    except Exception as error:
        failure = describe_failure(error, worker_id=0, step=0, samples=[])
        raise ConfigError(f"{path} raised {failure.kind}: {failure.message}\n\n{failure.traceback.rstrip()}") from error


def _import_file(path: Path) -> Any:
    import cloudpickle

    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    # Workers get the file's classes and functions by value, so that they need not run the file again.
    cloudpickle.register_pickle_by_value(module)
    return module
