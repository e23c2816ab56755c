"""`syncline report RUN...`: an HTML report on one or more runs, and TensorBoard files.

Here: what the command takes, and where it writes. Not here: the page (`observe/report/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from syncline.observe.report.record import RunRecord


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories; several are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output file. Default: report.html in RUN, or here for several runs or the run of another user.",
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option(help="Also write scalars to RUN/tensorboard.", rich_help_panel="TensorBoard")
    ] = True,
    histograms: Annotated[
        bool,
        typer.Option(
            "--histograms", help="Also write parameter histograms of each checkpoint.", rich_help_panel="TensorBoard"
        ),
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Also write the traced model graph.", rich_help_panel="TensorBoard")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
) -> None:
    """Write an HTML report on a run, or a comparison of several.

    It shows curves, throughput, the time of each phase of a step, the confusion
    matrix and a timeline. The file is self-contained. Runs may be live, finished
    or crashed.

    syncline report runs/lenet-mnist-20260101-120000
    syncline report runs/* --out comparison.html --open
    syncline report RUN --histograms --graph && tensorboard --logdir RUN/tensorboard
    """
    from syncline.config.owned_files import is_our_directory
    from syncline.coordinator.requests import is_live
    from syncline.errors import ConfigError
    from syncline.observe.report.load import load
    from syncline.observe.report.report_page import as_html

    if (histograms or graph) and not tensorboard:
        raise ConfigError("--histograms and --graph write TensorBoard files. Leave --no-tensorboard out.")
    records = load(runs, is_live)
    ours = [is_our_directory(run.resolve()) for run in runs]  # nothing is written to another user's directory
    page = out or (runs[0] / "report.html" if ours == [True] else Path("report.html"))
    _write_page(page, as_html(records))
    if tensorboard:
        for path, record, is_ours in zip(runs, records, ours, strict=True):
            if is_ours:
                _write_for_tensorboard(path, record, histograms=histograms, graph=graph)
            else:
                typer.echo(f"No TensorBoard files: {path} is not yours, or others can write there.", err=True)
    if open_it:
        typer.launch(page.resolve().as_uri())


def _write_page(page: Path, text: str) -> None:
    from syncline.errors import ConfigError
    from syncline.telemetry.run_dir import RunDir

    try:
        RunDir.write(page, text.encode())
    except OSError as error:
        raise ConfigError(f"Cannot write {page}: {error.strerror}. Choose another file with --out FILE.") from error
    typer.echo(f"report: {page}")


def _write_for_tensorboard(run: Path, record: RunRecord, *, histograms: bool, graph: bool) -> None:
    from syncline.observe.report.tensorboard import write_scalars
    from syncline.telemetry.run_dir import RunDir

    folder = run / "tensorboard"
    try:
        write_scalars(record, folder)
    except OSError as error:
        typer.echo(f"Cannot write {folder}: {error.strerror}. The report itself is complete.", err=True)
        return
    if histograms or graph:
        from syncline.workers import tensorboard  # imports torch

        if histograms:
            tensorboard.write_histograms(RunDir(run), folder / "parameters")
        if graph:
            tensorboard.write_graph(RunDir(run), folder / "graph")
    typer.echo(f"tensorboard --logdir {folder}")
