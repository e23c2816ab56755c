"""`syncline strategies`: list them, show what the strategy of a run did, or compare several.

Not here: the table (`tables.py`), the numbers of a run (`observe/strategy_stats.py`), comparing (`lab/bench/`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.output import DownloadProgress, exit_if_interrupted
from syncline.cli.run_options import bundle_options
from syncline.errors import ConfigError


def _option(kind: type, help: str, *names: str, metavar: str | None = None) -> Any:
    return Annotated[
        kind | None, typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Comparison (with --compare)")
    ]


_COMPARE_OPTIONS = {
    "only": _option(list[str], "Compare only this strategy; repeatable.", metavar="NAME"),
    "model": _option(str, "Model to train. Default: lenet."),
    "data": _option(str, "Dataset. Default: mnist.", "--data", "-d"),
    "workers": _option(int, "Number of workers. Default: 4 (2 for hogwild).", "--workers", "-w"),
    "epochs": _option(int, "Epochs per strategy. Default: 5.", "--epochs", "-e"),
    "seed": _option(int, "Seed of every run. Default: 0."),
    "out": _option(
        Path, "Markdown file for the results, with JSON beside it. Default: in runs/compare-TIME.", metavar="FILE"
    ),
}  # fmt: skip


def _strategies(
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Show what the strategy of this run did.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train with each strategy in turn and tabulate the results.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON output: one object with --run, one per line with --compare.")
    ] = False,
    *,
    comparison: dict[str, Any],
) -> None:
    """List synchronization strategies.

    Each is a combination of four choices: what is exchanged, when, with which
    workers, and how it is encoded. Combine them freely:
    --strategy "updates | every(20) | int8"

    --run shows what the strategy of a run did so far: exchanges, bytes,
    staleness, disagreement between workers, tournament.

    --compare trains the same model with one strategy after another. The default
    comparison takes a while; Ctrl-C keeps the results so far.

    syncline strategies
    syncline strategies --run runs/lenet-mnist-20260101-120000
    syncline strategies --compare --only allreduce --only sparknet --epochs 2
    """
    if run and compare:
        raise ConfigError("--run shows one run and --compare starts new ones. Give only one of them.")
    if comparison and not compare:
        raise ConfigError(f"--{next(iter(comparison))} applies to a comparison. Add --compare, or leave it out.")
    if json and not (run or compare):
        raise ConfigError("--json applies to --run RUN and --compare. Add one of them, or leave it out.")
    if run:
        _show_run(run, as_json=json)
    elif compare:
        _compare(comparison, as_json=json)
    else:
        from syncline.cli.tables import strategy_table

        typer.echo(strategy_table())


strategies = bundle_options(_strategies, into="comparison", options=_COMPARE_OPTIONS)


def _show_run(run: Path, *, as_json: bool) -> None:
    from syncline.observe.strategy_stats import strategy_stats
    from syncline.observe.terminal import strategy_report
    from syncline.telemetry.run_dir import RunDir

    stats = strategy_stats(RunDir.existing(run).read_events())
    if as_json:
        typer.echo(strategy_report.as_json(stats))
    else:
        strategy_report.show(stats, sys.stdout)


def _compare(comparison: dict[str, Any], *, as_json: bool) -> None:
    from syncline.lab.bench import compare_strategies

    only, out = comparison.pop("only", ()), comparison.pop("out", None)
    with exit_if_interrupted():
        compare_strategies.compare(
            compare_strategies.ComparisonSettings(**comparison), only=only, out=out, as_json=as_json,
            download_progress=None if as_json else DownloadProgress(sys.stderr),
        )  # fmt: skip
