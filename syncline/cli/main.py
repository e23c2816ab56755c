"""`syncline`: the commands.

Here: what each command takes and calls. Not here: the work (`driver.py`), the flags that come from the configuration
(`flags.py`), finding a task (`tasks.py`).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline import __version__
from syncline.cli.chaos import chaos
from syncline.cli.cluster import app as cluster
from syncline.cli.data import app as data_commands
from syncline.cli.flags import with_run_options
from syncline.cli.list import list_names
from syncline.cli.models import models
from syncline.cli.predict import predict
from syncline.cli.report import report
from syncline.cli.show import show
from syncline.cli.task_flags import (
    Augment,
    ClipNorm,
    Data,
    DataDir,
    Loss,
    Lr,
    Metrics,
    Optimizer,
    Schedule,
    WeightDecay,
    What,
)
from syncline.cli.watch import watch
from syncline.errors import ConfigError, Interrupted, SynclineError
from syncline.telemetry.events import Event, RunEnded
from syncline.view.observer import Observer

__all__ = ["app", "main"]

app = typer.Typer(
    name="syncline",
    help="Train any PyTorch model on many workers, at any rhythm, and never lose work.",
    epilog="First time here? Try: syncline train mlp --data digits --workers 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only warnings and the result.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object a line; the last one is the summary.")]
_NOT_FOR_SCRIPTS = (
    "epochs", "batch", "accumulate", "checkpoint_activations", "memory_limit", "loaders", "evaluate_every", "on_nan",
)  # fmt: skip
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/lenet-mnist-20260101-120000.")]


@app.command()
@with_run_options()
def train(
    task: What,
    data: Data = None,
    loss: Loss = None,
    optimizer: Optimizer = None,
    lr: Lr = None,
    schedule: Schedule = None,
    metrics: Metrics = None,
    weight_decay: WeightDecay = None,
    clip_norm: ClipNorm = None,
    augment: Augment = None,
    data_dir: DataDir = None,
    quiet: _Quiet = False,
    json: _Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train a model on many workers.

    syncline train lenet --data mnist --workers 2 --epochs 3
    syncline train my_task.py:task --workers 4
    syncline train my_run.toml
    """
    from syncline.cli.tasks import find_task
    from syncline.driver import run_task
    from syncline.engines.local import LocalEngine

    # A task in Python imports torch here; the workers' import runs beside it.
    engine = LocalEngine() if ".py" in task and settings.get("engine", "local") == "local" else None
    given = {"data": data, "loss": loss, "optimizer": optimizer, "schedule": schedule, "metrics": metrics,
             "weight_decay": weight_decay, "clip_norm": clip_norm, "augment": augment,
             "data_dir": data_dir}  # fmt: skip
    with closing(engine) if engine else nullcontext():
        found = find_task(task, given, settings, lr)
        progress = _download_progress(quiet or json)
        with _told(quiet=quiet, json=json) as view:
            run_task(found.task, found.config, view, engine=engine, data_dir=found.data_dir, progress=progress)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_run_options(leave_out=_NOT_FOR_SCRIPTS)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file with your own training loop.")],
    quiet: _Quiet = False,
    json: _Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run your own training loop on many workers; what follows -- goes to the script.

    syncline run my_loop.py --workers 4 -- --my-own-flag 3
    """
    from syncline.config.run import RunConfig
    from syncline.driver import run_script
    from syncline.task import Script

    with _told(quiet=quiet, json=json) as view:
        run_script(Script(str(script), tuple(context.args)), RunConfig(**settings), view)


@app.command()
@with_run_options(leave_out=("resume", "name", "out", "seed", "batch"))
def resume(run_dir: _Run, quiet: _Quiet = False, json: _Json = False, *, settings: dict[str, Any]) -> None:
    """Go on with a run that was stopped or crashed, at the exact sample.

    syncline resume runs/lenet-mnist-20260101-120000
    syncline resume runs/lenet-mnist-20260101-120000 --epochs 10 --workers 4
    """
    from syncline.driver import resume as resume_run

    with _told(quiet=quiet, json=json) as view:
        resume_run(run_dir, view, **settings)


@app.command()
@with_run_options()
def explain(task: What, data: Data = None, data_dir: DataDir = None, *, settings: dict[str, Any]) -> None:
    """Say what a run would do, without doing it: who computes what, and how they exchange it."""
    from syncline.cli.tasks import find_task
    from syncline.driver import explain_task

    found = find_task(task, {"data": data, "data_dir": data_dir}, settings, None)
    typer.echo(explain_task(found.task, found.config, data_dir=found.data_dir))


@app.command()
def audit(run_dir: _Run) -> None:
    """Say of every epoch of a run how many samples were committed once, lost or repeated, whatever was killed."""
    from syncline.data.audit import audit_file
    from syncline.telemetry.run_dir import RunDir

    found = audit_file(RunDir.existing(run_dir).ledger)
    if not found.epochs:
        raise ConfigError(f"{run_dir} has no ledger of samples: it has done nothing yet, or is a script's own loop.")
    typer.echo("\n".join(found.in_words()))
    if not found.is_clean:
        raise typer.Exit(1)


class _Change(enum.StrEnum):
    ADD = "add"
    REMOVE = "remove"


@app.command()
def workers(
    run_dir: _Run,
    change: Annotated[_Change, typer.Argument(help="Take more workers in, or let some go.")],
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="How many.")],
) -> None:
    """Let a run that is under way grow or shrink: syncline workers RUN add 2, syncline workers RUN remove 1."""
    from syncline.cli.workers import change_workers

    for line in change_workers(run_dir, add=number if change == "add" else 0, remove=number if change != "add" else 0):
        typer.echo(line)


app.add_typer(cluster, name="cluster")
app.add_typer(data_commands, name="data")


@app.command()
def worker(
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="Where the run waits for workers.")],
    reached_at: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="This machine's address. Default: the one on the way to the run."),
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="How many seconds the run may come later.")] = 60.0,
) -> None:
    """Give a run on another machine a place for a worker on this one, until it is over.

    SYNCLINE_SECRET=... syncline worker --join 10.0.0.5:7077
    SYNCLINE_SECRET=... torchrun --nproc-per-node 2 --no-python syncline worker --join 10.0.0.5:7077
    SYNCLINE_SECRET=... srun --ntasks 8 syncline worker --join 10.0.0.5:7077
    The run: SYNCLINE_SECRET=... syncline train lenet --data mnist --workers 8 --engine attach://10.0.0.5:7077
    """
    from syncline.cli.worker import join as join_run

    why = join_run(join, reached_at=reached_at, patience_s=patience)
    typer.echo(f"Left: {why}.")
    if why != "the run is over":
        raise typer.Exit(1)


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="The folder in which run directories would be made.")] = Path("runs"),
) -> None:
    """Say what this machine offers a run, what would go wrong on it, and how to mend that.

    The exit code is 1 if something would.
    """
    from syncline.doctor import examine

    problems = 0
    for finding in examine(out):
        problems += bool(finding.problem)
        typer.echo(f"{'!!' if finding.problem else 'ok'}  {finding.what}: {finding.found}")
        if finding.problem:
            typer.echo(f"    {finding.problem}")
    typer.echo(f"{problems or 'no'} problem{'s' * (problems != 1)}")
    if problems:
        raise typer.Exit(1)


@app.command()
def strategies(
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Tell what the strategy of this run did; a run directory.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train with each strategy in turn, and make a table of how they fared.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare this strategy; may be given several times.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Compare on this model. Default: lenet.")] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="Compare on this data. Default: mnist.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", help="Compare with so many workers. Default: 4; hogwild takes 2.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", "-e", help="Compare over so many epochs. Default: 5.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Compare with this seed. Default: 0.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The comparison as Markdown, with JSON beside it. Default: in runs/compare-TIME."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="With --run, one JSON object; with --compare, one a line, the table last.")
    ] = False,
) -> None:
    """The ways to keep workers in agreement, by name: after which system, and the four answers.

    What they are made of can be put together freely: --strategy "updates | every(20) | int8"

    --run tells what the strategy of a run did: exchanges, bytes, staleness,
    disagreement between the workers, tournament. The run may be going on.

    --compare trains the same model with one strategy after the other. With the
    defaults that takes a while; Ctrl-C keeps what was measured by then.

    syncline strategies
    syncline strategies --run runs/lenet-mnist-20260101-120000
    syncline strategies --compare --only allreduce --only sparknet --epochs 2
    """
    settings = {"model": model, "data": data, "workers": workers, "epochs": epochs, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    needs_compare = [*given, *(["only"] if only else []), *(["out"] if out else [])]
    if run and compare:
        raise ConfigError("--run tells of one run and --compare makes new ones. Give one of the two.")
    if needs_compare and not compare:
        raise ConfigError(f"--{needs_compare[0]} is a setting of a comparison. Add --compare, or leave it out.")
    if json and not (run or compare):
        raise ConfigError("--json goes with --run RUN or with --compare. Add one of them, or leave it out.")
    if run:
        from syncline.telemetry.run_dir import RunDir
        from syncline.view.strategy_account import account_of
        from syncline.view.strategy_report import as_json, show

        account = account_of(RunDir.existing(run).read_events())
        if json:
            typer.echo(as_json(account))
        else:
            show(account, sys.stdout)
    elif compare:
        from syncline.bench import compare_strategies

        try:
            compare_strategies.compare(
                compare_strategies.Settings(**given), only=only or (), out=out, as_json=json,
                download_progress=_download_progress(json),
            )  # fmt: skip
        except Interrupted as stopped:
            _complain(str(stopped), label="")
            raise typer.Exit(130) from stopped
    else:
        from syncline.cli.tables import strategy_table

        typer.echo(strategy_table())


@app.command(
    epilog="Suites: startup (command to first training step), training (training speed, against DDP), scaling (that, "
    "by model and number of workers), accuracy (time to 99% on MNIST), inference (answers a second), growth (speed and "
    "memory as runs grow), overhead (the built-in loop's cost per step), servers "
    "(parameter servers, against gloo), stragglers (what slow workers cost), recovery (what a killed worker "
    "costs), tolerance (what being ready for that costs), allreduce (adding up gradients, against gloo), "
    "engines (what Ray and Spark cost per step; only when named), memory (peak memory by batch size; only when named), "
    "peers (training speed beside other frameworks; only when "
    "named)."
)
def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="SUITE", help="What to measure. Default: everything but peers.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often each contender is measured. Default: 5, or 2 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: less is measured, so it is rougher.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder for bench.html, bench.md and bench.json. Default: runs/bench-TIME.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line; the last one is the report.")] = False,
    peers_dir: Annotated[
        Path | None,
        typer.Option(help="Where the peers' environments are. Default: $SYNCLINE_PEERS, else ~/.cache/syncline/peers."),
    ] = None,
    install: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER", help="Make a peer's environment and measure nothing, such as: accelerate."),
    ] = None,
) -> None:
    """Measure Syncline on this machine, side by side with what you would use instead.

    The contenders run in turn, round after round, so that what disturbs the
    machine disturbs all of them. Each round gives a ratio to the baseline; the
    report gives their median and spread. It takes a few minutes, so leave the
    machine alone. Ctrl-C shows what was measured by then.

    syncline bench
    syncline bench startup --repeats 9
    syncline bench overhead --quick --out bench-results
    syncline bench peers --install accelerate && syncline bench peers
    """
    from syncline.bench.command import bench as run_bench

    try:
        if install:
            _install_peers(suites or [], install, peers_dir)
        else:
            run_bench(suites or [], repeats=repeats, quick=quick, out=out, as_json=json, peers_dir=peers_dir)
    except Interrupted as stopped:
        _complain(str(stopped), label="")
        raise typer.Exit(130) from stopped


def _install_peers(suites: list[str], keys: list[str], peers_dir: Path | None) -> None:
    from syncline.bench.peer_recipes import adapters_folder, environments_folder, install, peers_named

    if suites not in ([], ["peers"]):
        raise ConfigError(f"--install is for peers, but {' '.join(suites)} was asked for. Leave one of them out.")
    environments = environments_folder(peers_dir)
    for peer in peers_named(keys, adapters_folder()):
        install(peer, environments, say=lambda text: typer.echo(text, err=True))
        typer.echo(f"{peer.name} is installed in {environments / peer.key}. Now: syncline bench peers", err=True)


app.command()(chaos)
app.command()(models)
app.command()(predict)
app.command(name="list")(list_names)
app.command()(show)
app.command()(report)
app.command()(watch)


class _Telling:
    """A view that remembers whether it has told how the run ended, so that it is not told twice."""

    def __init__(self, view: Observer) -> None:
        self._view = view
        self.has_told_end = False

    def on_event(self, event: Event) -> None:
        self._view.on_event(event)
        self.has_told_end = self.has_told_end or isinstance(event, RunEnded)

    def close(self) -> None:
        self._view.close()


@contextmanager
def _told(*, quiet: bool, json: bool) -> Iterator[_Telling]:
    """A view for a run; however the run ends, the user is told once and the exit code tells scripts."""
    from syncline.view.observer import choose_view

    view = _Telling(choose_view(quiet=quiet, json=json))
    try:
        yield view
    except (SynclineError, Interrupted) as end:
        was_stopped = isinstance(end, Interrupted)
        if json or not view.has_told_end:
            _complain(str(end), label="" if was_stopped else "Error: ")
        raise typer.Exit(130 if was_stopped else 1) from end
    except KeyboardInterrupt as end:
        _complain("Stopped before training began.", label="")
        raise typer.Exit(130) from end


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"syncline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    del version


def _download_progress(silent: bool) -> Any:
    from syncline.cli.download_progress import DownloadProgress

    return None if silent else DownloadProgress(sys.stderr)


def main() -> None:
    """The entry point of the `syncline` command: errors become messages, and exit codes tell scripts how it went."""
    try:
        app()
    except SynclineError as error:
        _complain(str(error))
        sys.exit(1)


def _complain(message: str, label: str = "Error: ") -> None:
    is_terminal = sys.stderr.isatty()
    red, plain = ("\033[1;31m", "\033[0m") if is_terminal and label else ("", "")
    typer.echo(f"{red}{label}{plain}{message}", err=True)


if __name__ == "__main__":
    main()
