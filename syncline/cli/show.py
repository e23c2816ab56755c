"""`syncline show`: a model, layer by layer. Not here: examining and drawing it (`models/summary/`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.cli.task_options import TaskArgument, with_task_options
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.models.summary.summarize import ModelSummary
    from syncline.task import Task


@with_task_options("data", "data_dir")
def show(
    task: TaskArgument,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a diagram to this SVG file.")] = None,
    *,
    parts: dict[str, Any],
) -> None:
    """Show a model layer by layer: output shapes, parameters, memory, FLOPs.

    TASK may also be the directory of a run. The names of the layers are those
    that 'export --outputs' and 'predict --output' take.

    syncline show my_run.toml
    syncline show lenet --data mnist --svg lenet.svg
    """
    located = _of_run(Path(task)) if Path(task).is_dir() else _of_task(task, parts)

    from syncline.models.summary.terminal import as_text

    summary = _summary_of(located)
    typer.echo(as_text(summary))
    typer.echo(f"Layers by name: {', '.join(part.name for part in summary.parts[1:])}")
    if svg is not None:
        from syncline.models.summary.svg import as_svg

        svg.write_text(as_svg(summary))
        typer.echo(f"Wrote {svg}.")


def _of_task(what: str, parts: dict[str, Any]) -> Task:
    from syncline.cli.tasks import find_task

    found = find_task(what, parts, {})
    return found.task.located(found.data_dir, None)


def _of_run(path: Path) -> Task:
    from syncline.serving.trained import saved_task
    from syncline.task import Task
    from syncline.telemetry.run_dir import RunDir

    found = saved_task(RunDir.owned(path))
    if not isinstance(found, Task):
        raise ConfigError(
            f"{path} is the run of a script, so its model is not known here.", code="script-model", path=str(path)
        )
    return found


def _summary_of(task: Task) -> ModelSummary:
    """Examine the task's model with one sample of its data."""
    import torch

    from syncline.models.summary.summarize import summarize
    from syncline.task import LocatedData
    from syncline.workers.build import build_model, build_sources

    source, _ = build_sources(task)
    batch = source.fetch([0])
    sample = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(sample, torch.Tensor):
        raise ConfigError(f"The inputs of this data are {type(sample).__name__}; 'syncline show' needs tensors.")
    model = copy.deepcopy(build_model(task, source, seed=0)).to("meta")
    facts = task.facts()
    name = task.data.name if isinstance(task.data, LocatedData) else facts.data
    return summarize(model, sample.to("meta"), title=f"{facts.model} on {name}")
