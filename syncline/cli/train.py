"""`syncline train`, `run`, `resume` and `explain`. Not here: the work (`driver.py`) and finding a task (`tasks.py`)."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.boundary import check_surroundings
from syncline.cli.output import DownloadProgress, observing
from syncline.cli.run_options import Json, Quiet, RunPath, with_run_options
from syncline.cli.task_options import TaskArgument, with_task_options

NOT_FOR_SCRIPTS = (
    "epochs", "batch", "accumulate", "checkpoint_activations", "memory_limit", "loaders", "evaluate_every", "on_nan",
    "partition", "halo",
)  # fmt: skip
"""Settings that a script's own loop decides on."""


@with_run_options()
@with_task_options()
def train(
    task: TaskArgument,
    quiet: Quiet = False,
    json: Json = False,
    *,
    parts: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Train a model on several workers.

    syncline train lenet --data mnist --workers 2 --epochs 3
    syncline train my_task.py:task --workers 4
    syncline train my_run.toml
    """
    from syncline.cli.tasks import find_task
    from syncline.driver import run_task
    from syncline.engines.local import LocalEngine

    check_surroundings()
    # Loading a Python task imports torch here. Start the engine first, so that the workers import it at the same time.
    engine = LocalEngine() if ".py" in task and settings.get("engine", "local") == "local" else None
    with closing(engine) if engine else nullcontext():
        found = find_task(task, parts, settings)
        progress = None if quiet or json else DownloadProgress(sys.stderr)
        with observing(quiet=quiet, json=json) as view:
            run_task(found.task, found.config, view, engine=engine, data_dir=found.data_dir, progress=progress)


@with_run_options(leave_out=NOT_FOR_SCRIPTS)
def run(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Python file that trains: your own loop, or a script for torchrun.")
    ],
    quiet: Quiet = False,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run your own training loop on several workers.

    Arguments after -- are passed to the script. A script written for torchrun
    (DDP, Accelerate, Lightning, transformers' Trainer) runs unchanged.

    syncline run my_loop.py --workers 4 -- --my-own-flag 3
    syncline run my_ddp_script.py --workers 2
    """
    from syncline.config.run import RunConfig
    from syncline.driver import run_script
    from syncline.task import Script

    with observing(quiet=quiet, json=json) as view:
        run_script(Script(str(script), tuple(context.args)), RunConfig(**settings), view)


@with_run_options(leave_out=("resume", "name", "out", "shared", "seed", "batch"))
def resume(run_dir: RunPath, quiet: Quiet = False, json: Json = False, *, settings: dict[str, Any]) -> None:
    """Resume an interrupted run from the exact sample.

    Settings are those of the run; options override them. A finished run
    continues if --epochs is larger than before.

    syncline resume runs/lenet-mnist-20260101-120000
    syncline resume runs/lenet-mnist-20260101-120000 --epochs 10 --workers 4
    """
    from syncline.driver import resume as resume_run

    with observing(quiet=quiet, json=json) as view:
        resume_run(run_dir, view, **settings)


@with_run_options()
@with_task_options("data", "data_dir")
def explain(task: TaskArgument, *, parts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Dry run: show the plan without training.

    Prints the share of each worker, what the strategy exchanges and when, and
    the bytes per step.

    syncline explain lenet --data mnist --workers 4 --strategy sparknet
    """
    from syncline.cli.tasks import find_task
    from syncline.driver import explain_task

    found = find_task(task, parts, settings)
    typer.echo(explain_task(found.task, found.config, data_dir=found.data_dir))
