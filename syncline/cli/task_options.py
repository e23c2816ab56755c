"""Options that say what to train, the same for every command that trains.

Here: their names and help. Not here: how to run it (`run_options.py`), and finding the task (`tasks.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.run_options import Command, bundle_options

TaskArgument = Annotated[
    str,
    typer.Argument(metavar="TASK", help="Model name (lenet), Python task (my_task.py:task) or run file (my_run.toml)."),
]


def _option(kind: type, help: str, *names: str) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help, rich_help_panel="Task")]


_OPTIONS: dict[str, Any] = {
    "data": _option(str, "Dataset name (see: syncline data list), or path or URL of your own data.", "--data", "-d"),
    "data_dir": _option(Path, "Folder to search for datasets first."),
    "augment": _option(str, "Augmentation of training inputs, such as 'crop(padding=4), flip, cutout(size=8)'."),
    "loss": _option(str, "Loss by its torch name, such as cross_entropy or 'huber_loss(delta=2)'."),
    "metrics": _option(str, "Comma-separated torchmetrics, such as accuracy,f1_score."),
    "optimizer": _option(str, "Optimizer by its torch name, such as 'adam(lr=0.001)'."),
    "lr": _option(float, "Learning rate."),
    "schedule": _option(str, "Learning-rate schedule by its torch name, such as CosineAnnealingLR, or none."),
    "weight_decay": _option(float, "Weight decay of the optimizer."),
    "clip_norm": _option(float, "Clip the norm of the combined gradient to this value."),
}


def with_task_options(*only: str) -> Callable[[Command], Command]:
    """Decorate a command that takes `parts: dict`: it gets the options of a task, or `only` these."""
    options = {name: option for name, option in _OPTIONS.items() if not only or name in only}
    return functools.partial(bundle_options, into="parts", options=options)
