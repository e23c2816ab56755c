"""`syncline report RUN [RUN...]`: one page from what runs have left, and TensorBoard's files beside it.

Here: what the command takes, and where things go. Not here: the page (`report/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from syncline.report.record import RunRecord

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
    tensorboard: Annotated[
        bool, typer.Option(help="Also write the numbers for TensorBoard, into RUN/tensorboard.")
    ] = True,
    histograms: Annotated[
        bool, typer.Option("--histograms", help="For TensorBoard, too: the parameters at each checkpoint.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="For TensorBoard, too: the model, as torch traces it.")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Make one page of a run, or of several: curves, throughput, where the time goes, what is confused, what happened.

    The page needs nothing else: it opens without a network, and can be sent to
    somebody. The run may be going on, finished, or crashed.

    syncline report runs/lenet-mnist-20260101-120000
    syncline report runs/* --out comparison.html --open
    syncline report RUN --histograms --graph && tensorboard --logdir RUN/tensorboard
    """
    from syncline.coordinator.requests import is_live
    from syncline.errors import ConfigError
    from syncline.report.load import load
    from syncline.report.page import as_html
    from syncline.telemetry.run_dir import RunDir

    if (histograms or graph) and not tensorboard:
        raise ConfigError("--histograms and --graph are for TensorBoard. Leave --no-tensorboard out.")
    records = load(runs, is_live)
    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        RunDir.write(page, as_html(records).encode())
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror}. Say where with --out FILE.") from error
    typer.echo(f"report: {page}")
    if tensorboard:
        for path, record in zip(runs, records, strict=True):
            _write_for_tensorboard(path, record, histograms=histograms, graph=graph)
    if open_it:
        typer.launch(page.resolve().as_uri())


def _write_for_tensorboard(run: Path, record: RunRecord, *, histograms: bool, graph: bool) -> None:
    from syncline.report.tensorboard import write_scalars
    from syncline.telemetry.run_dir import RunDir

    folder = run / "tensorboard"
    try:
        write_scalars(record, folder)
    except OSError as error:
        typer.echo(f"{folder} cannot be written: {error.strerror}. The page is there all the same.", err=True)
        return
    if histograms or graph:
        from syncline.workers import portrait  # brings torch

        if histograms:
            portrait.write_histograms(RunDir(run), folder / "parameters")
        if graph:
            portrait.write_graph(RunDir(run), folder / "graph")
    typer.echo(f"tensorboard --logdir {folder}")
