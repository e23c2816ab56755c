"""`syncline show`: a network, layer by layer. Not here: looking at it and drawing it (`anatomy/`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.task_flags import Data, DataDir, What

__all__ = ["show"]


def show(
    task: What,
    data: Data = None,
    data_dir: DataDir = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the network as a picture, into this file.")
    ] = None,
) -> None:
    """Draw a network: its layers and branches, output shapes, parameters, memory and FLOPs.

    syncline show my_run.toml
    syncline show lenet --data mnist --svg lenet.svg
    """
    from syncline.cli.tasks import find_task

    found = find_task(task, {"data": data, "data_dir": data_dir}, {}, None)
    located = found.task.located(found.data_dir, None)

    from syncline.anatomy.of_task import anatomy_of
    from syncline.anatomy.terminal import as_text

    anatomy = anatomy_of(located)
    typer.echo(as_text(anatomy))
    if svg is not None:
        from syncline.anatomy.svg import as_svg

        svg.write_text(as_svg(anatomy))
        typer.echo(f"Drawn in {svg}.")
