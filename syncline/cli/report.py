"""`syncline report RUN [RUN...]`: one page from what runs have left, and TensorBoard's files beside it.

Here: what the command takes, and where things go. Not here: the page (`report/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories; several are drawn over each other."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page. Default: report.html in RUN, or here if there are several."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Make one page of a run, or of several: curves, throughput, where the time goes, what is confused, what happened.

    The page needs nothing else: it opens without a network, and can be sent to
    somebody. The run may be going on, finished, or crashed.

    syncline report runs/lenet-mnist-20260101-120000
    syncline report runs/* --out comparison.html --open
    """
    from syncline.coordinator.requests import is_live
    from syncline.report.load import load
    from syncline.report.page import as_html
    from syncline.telemetry.run_dir import RunDir

    records = load(runs, is_live)
    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    RunDir.write(page, as_html(records).encode())
    typer.echo(f"report: {page}")
    if open_it:
        typer.launch(page.resolve().as_uri())
