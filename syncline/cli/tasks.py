"""From what the user typed after `syncline train` to a task and its settings.

Three forms: a model's name, `file.py:name`, `file.toml`. Flags win over files; files win over defaults.
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
from syncline.errors import ConfigError, SynclineError, UnknownName, nearest
from syncline.task import Task
from syncline.workers.failure import describe_failure
from syncline.zoo import registry as zoo

__all__ = ["FoundTask", "find_task"]


@dataclasses.dataclass(frozen=True)
class FoundTask:
    """What to train, how, and where its data may lie."""

    task: Task
    config: RunConfig
    data_dir: Path | None


def find_task(what: str, given: Mapping[str, Any], settings: Mapping[str, Any], lr: float | None) -> FoundTask:
    """The task that `what` names, with the flags in `given` and `settings` taking precedence."""
    flags = {k: v for k, v in given.items() if v is not None}
    if what.endswith(".toml"):
        file = read_run_file(Path(what))
        parts = {**file.task, **flags}
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
        more = "A task in Python is given as my_task.py:task, a run file as my_run.toml."
        raise UnknownName.among("model", name, zoo.names(), more=more)
    if "data" not in flags:
        raise ConfigError(
            f"Which data should {name} be trained on? Add --data with a path, a URL or one of: "
            f"{', '.join(named.names())}."
        )
    return FoundTask(_task({"model": what, **flags}, lr), RunConfig(**settings), data_dir)


def _task(parts: Mapping[str, Any], lr: float | None) -> Task:
    return _with_lr(Task(**_without_schedule(dict(parts))), lr)


def _without_schedule(parts: dict[str, Any]) -> dict[str, Any]:
    if parts.get("schedule") == "none":
        # No schedule on purpose, which is not the same as leaving it to the model's card.
        parts["schedule"] = Spec("ConstantLR", {"factor": 1.0})
    return parts


def _with_lr(task: Task, lr: float | None) -> Task:
    if lr is None:
        return task
    if lr <= 0:
        raise ConfigError(f"lr is {lr:g}, but must be more than 0.")
    full = task.with_defaults()
    if not isinstance(full.optimizer, Spec):
        raise ConfigError("--lr cannot change an optimiser that is a function: set the learning rate inside it.")
    schedule = full.schedule if task.optimizer is None else task.schedule
    return dataclasses.replace(task, optimizer=full.optimizer.with_options(lr=lr), schedule=schedule)


def _task_of_python(what: str) -> Task:
    file_name, _, name = what.partition(":")
    path = Path(file_name)
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    with _told_by_file(path):
        module = _import_file(path)
    if not name:
        tasks = [n for n, v in vars(module).items() if isinstance(v, Task)]
        if len(tasks) != 1:
            found = f"has {len(tasks)} tasks ({', '.join(tasks)})" if tasks else "has no task"
            raise ConfigError(f"{path} {found}. Name the one to train: {path}:task")
        name = tasks[0]
    found_task = getattr(module, name, None)
    if found_task is None:
        close = nearest(name, vars(module))
        hint = f" Did you mean {path}:{close[0]}?" if close else ""
        raise ConfigError(f"{path} has no {name!r}.{hint}")
    if callable(found_task) and not isinstance(found_task, Task):
        with _told_by_file(path):
            found_task = found_task()
    if not isinstance(found_task, Task):
        raise ConfigError(
            f"{what} is a {type(found_task).__name__}, not a syncline.Task nor a function that returns one."
        )
    return found_task


@contextmanager
def _told_by_file(path: Path) -> Iterator[None]:
    """An exception in the user's file is told first, and without the way through this command to it."""
    try:
        yield
    except SynclineError:
        raise  # the message says it all
    except Exception as error:
        told = describe_failure(error, rank=0, step=0, samples=[])
        raise ConfigError(f"{path} raised {told.kind}: {told.message}\n\n{told.traceback.rstrip()}") from error


def _import_file(path: Path) -> Any:
    import cloudpickle

    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    # Workers get the file's classes and functions by value: nobody runs the file a second time.
    cloudpickle.register_pickle_by_value(module)
    return module
