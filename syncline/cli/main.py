"""`syncline`: the list of commands, and the entry point.

Not here: what each command takes and does (one file each in this folder).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from syncline import __version__, boundary
from syncline.cli import bench, chaos, cluster, data, graph, survey, train
from syncline.cli.audit import audit
from syncline.cli.doctor import doctor
from syncline.cli.export import export
from syncline.cli.fit import MODELS_HELP, fit
from syncline.cli.list import list_names
from syncline.cli.models import models
from syncline.cli.output import exit_code_of, flush_output, open_standard_streams, print_error
from syncline.cli.plan import plan
from syncline.cli.predict import predict
from syncline.cli.report import report
from syncline.cli.serve import serve
from syncline.cli.show import show
from syncline.cli.simulate import simulate
from syncline.cli.strategies import strategies
from syncline.cli.watch import watch
from syncline.cli.worker import worker
from syncline.cli.workers import workers
from syncline.engines.choose import register_engine
from syncline.engines.engine import Engine
from syncline.errors import SynclineError

app = typer.Typer(
    name="syncline",
    help="Train PyTorch models on several workers, with any synchronization strategy, and lose no work to failures.",
    epilog="New here? Try: syncline train mlp --data digits --workers 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: an internal error."""

_SCRIPT_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

_TRAIN = "Train"
app.command("train", rich_help_panel=_TRAIN)(train.train)
app.command("run", rich_help_panel=_TRAIN, context_settings=_SCRIPT_ARGUMENTS)(train.run)
app.command("resume", rich_help_panel=_TRAIN)(train.resume)
app.command("explain", rich_help_panel=_TRAIN)(train.explain)
app.command("plan", rich_help_panel=_TRAIN)(plan)
app.command("simulate", rich_help_panel=_TRAIN)(simulate)
app.command("fit", rich_help_panel=_TRAIN, epilog=MODELS_HELP)(fit)
_RUNS = "Runs"
app.command("report", rich_help_panel=_RUNS)(report)
app.command("watch", rich_help_panel=_RUNS)(watch)
app.command("workers", rich_help_panel=_RUNS)(workers)
app.command("audit", rich_help_panel=_RUNS)(audit)
app.command("predict", rich_help_panel=_RUNS)(predict)
app.command("export", rich_help_panel=_RUNS)(export)
app.command("serve", rich_help_panel=_RUNS)(serve)
app.add_typer(graph.app, name="graph", rich_help_panel="Graphs")
_CATALOG = "Models, data and strategies"
app.command("models", rich_help_panel=_CATALOG)(models)
app.command("show", rich_help_panel=_CATALOG)(show)
app.add_typer(data.app, name="data", rich_help_panel=_CATALOG)
app.command("strategies", rich_help_panel=_CATALOG)(strategies)
app.command("list", rich_help_panel=_CATALOG)(list_names)
_MACHINES = "Machines"
app.command("doctor", rich_help_panel=_MACHINES)(doctor)
app.command("worker", rich_help_panel=_MACHINES)(worker)
app.add_typer(cluster.app, name="cluster", rich_help_panel=_MACHINES)
_MEASURE = "Benchmarks and fault injection"
app.command("bench", rich_help_panel=_MEASURE, epilog=bench.SUITES_HELP)(bench.bench)
app.command("chaos", rich_help_panel=_MEASURE, epilog=chaos.FAULTS_HELP, context_settings={"allow_extra_args": True})(
    chaos.chaos
)
app.add_typer(survey.app, name="survey", rich_help_panel=_MEASURE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"syncline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """The entry point of the `syncline` command: errors become messages and exit codes."""
    open_standard_streams()
    code = _run()
    if not flush_output():
        print_error("The output is incomplete: it could not be written.")
        code = code or 1
    sys.exit(code)


def _run() -> int | str | None:
    """The boundary: every exception ends here. The exit code."""
    try:
        _connect_lab()
        app()
    except SystemExit as leaving:  # a command's end, and usage errors
        return leaving.code
    except (SynclineError, KeyboardInterrupt) as error:
        print_error(str(error) or "Stopped.", label="Error: " if isinstance(error, SynclineError) else "")
        return exit_code_of(error)
    except Exception as error:
        if boundary.is_users(error):
            return _report_users(error)
        if (expected := boundary.as_expected(error)) is not None:
            print_error(str(expected))
            return 1
        print_error(boundary.bug_message(error))
        return EXIT_BUG
    return 0


def _report_users(error: Exception) -> int:
    """An exception of the user's code that this process ran, such as a Dataset's `__len__`: with their frames only."""
    from syncline.workers.failure import describe_failure

    failure = describe_failure(error, worker_id=0, step=0, samples=[])
    print_error(f"Your code raised {failure.kind}: {failure.message}\n\n{failure.traceback.rstrip()}")
    return 1


def _connect_lab() -> None:
    """Add emulated clusters and fault injection, which the rest of the package does not import."""
    register_engine("cluster", _cluster_engine)
    if script := os.environ.get("SYNCLINE_FAULTS"):
        from syncline.lab.faults import install

        os.environ.update(install(script))


def _cluster_engine(name: str) -> Engine:
    from syncline.lab.cluster import cluster_engine

    return cluster_engine(name)


if __name__ == "__main__":
    main()
