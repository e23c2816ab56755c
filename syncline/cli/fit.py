"""`syncline fit MODEL`: fitting block by block. Not here: the models (`blocks/apps/`) and the work (`fitting.py`)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.output import observing
from syncline.cli.run_options import Json, Quiet, bundle_options, with_run_options
from syncline.config.run import FOR_FITS, RunConfig

_LEFT_OUT = tuple(
    field.name for field in dataclasses.fields(RunConfig) if field.name not in FOR_FITS or field.name == "workers"
)

MODELS_HELP = (
    "Models and their options: lasso(alpha, intercept), elastic-net(alpha, l1_ratio, intercept), als(factors, "
    "regularization, alpha, implicit), k-means(clusters)."
)


def _option(kind: type, help: str) -> Any:
    return Annotated[kind | None, typer.Option(help=help, rich_help_panel="Blocks", show_default=False)]


_SCHEDULE = {
    "by": _option(str, "Which blocks come next: change (those that changed most), random, cyclic."),
    "size": _option(int, "Blocks that each lane updates in a round."),
    "lanes": _option(
        int,
        "Sequences of blocks that are updated at once. Default: one for each worker. With the same lanes, any number "
        "of workers finds the same.",
    ),
    "apart": _option(float, "Blocks more closely related than this, from 0 to 1, are never updated at once."),
    "staleness": _option(int, "Rounds in which a lane may lack the changes of others."),
}


@with_run_options(leave_out=_LEFT_OUT)
@partial(bundle_options, into="blocks", options=_SCHEDULE)
def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Such as lasso or 'lasso(alpha=0.1)'; see below.")],
    data: Annotated[
        Path,
        typer.Option(metavar="DATA", help="Table (.csv, .csv.gz, .parquet). For als: columns user, item and rating."),
    ],
    workers: Annotated[int, typer.Option("--workers", "-w", help="Number of workers (processes).", min=1)] = 1,
    target: Annotated[str | None, typer.Option(help="Column of the table with the targets.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="End when the relative gap is at most this. Default: the model's.")
    ] = None,
    max_rounds: Annotated[int | None, typer.Option(help="End after so many rounds at the latest.")] = None,
    start: Annotated[
        Path | None, typer.Option(help="Start from an earlier result: a .npz file, or a run directory.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the result as .npz, too, besides RUN/result.npz.")] = None,
    quiet: Quiet = False,
    json: Json = False,
    *,
    blocks: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Fit a model block by block of its parameters.

    In each round, the blocks that changed most are updated, those that depend
    on each other never at the same time. It ends when the gap is at most the
    tolerance. Ctrl-C saves the work; syncline resume RUN continues.

    syncline fit "lasso(alpha=0.1)" --data table.parquet --target y
    syncline fit "elastic-net(alpha=0.1, l1_ratio=0.9)" --data table.csv --target y --workers 2
    """
    from syncline.blocks.schedule import Blocks
    from syncline.errors import ConfigError
    from syncline.fitting import run_fit

    if save is not None and save.suffix != ".npz":
        raise ConfigError(f"--save is {save}, but must end in .npz.", code="ending", path=str(save))
    config = RunConfig(**{"workers": workers, "tune": "off", **settings})
    with observing(quiet=quiet, json=json) as view:
        found = run_fit(
            model, data, config, view, target=target, schedule=Blocks(**blocks), tolerance=tolerance,
            max_rounds=max_rounds, start=start,
        )  # fmt: skip
    if save is not None:
        found.save(save)
    if not json and not quiet:
        for line in found.describe():
            typer.echo(line)
