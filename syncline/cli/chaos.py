"""`syncline chaos`: what the command takes. Not here: the work (`lab/chaos/`)."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.output import DownloadProgress, exit_if_interrupted
from syncline.cli.run_options import bundle_options, with_run_options
from syncline.cli.task_options import TaskArgument, with_task_options
from syncline.cli.train import NOT_FOR_SCRIPTS
from syncline.errors import ConfigError

FAULTS_HELP = """Faults; steps count from 0:
'kill worker 2 at step 412'
'kill server 0 at step 20'
'stop worker 1 at step 50 for 5s' (SIGSTOP; without a time, for good)
'raise in worker 1 at step 7'
'slow worker 0 at step 10 by 5x' (or by 0.2s)
'disconnect worker 1 at step 30'
'cut worker 1 at step 30 for 5s'
'lose 10% of packets to worker 1 at step 30 for 5s'
'fill the disk at step 20 for 5s'"""


def _option(kind: type, help: str, *names: str, metavar: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Faults")]


_CHAOS_OPTIONS = {
    "kills": _option(int, "Processes to kill, over all runs. Default: 10, or 0 with --fault."),
    "every": _option(str, "Average time between kills: 250ms, 3s, '200 steps'. Varies by half. Default: 3s."),
    "fault": _option(list[str], "Inject this fault into every run; repeatable. See below.", metavar="FAULT"),
    "kill_last_worker": _option(
        bool, "Also kill the last worker that holds the trained state.", "--kill-last-worker"
    ),
    "strategy": _option(list[str], "Strategy to test; repeatable. Default: allreduce."),
    "all_strategies": _option(bool, "Test every named strategy in turn.", "--all-strategies"),
    "references": _option(int, "Runs without faults per strategy, for comparison. Default: 1."),
    "hang_after": _option(str, "Count a run without progress for this long as hung. Default: 60s.", metavar="TIME"),
    "limit": _option(str, "Longest duration of one run. Default: 60min.", metavar="TIME"),
    "namespaces": _option(
        int, "Put workers and servers into N network namespaces, round-robin. Needs root.", metavar="N"
    ),
    "out": _option(
        Path, "Text file for the score, with JSON beside it. Default: in runs/chaos-TIME.", metavar="FILE"
    ),
}  # fmt: skip


@with_run_options(leave_out=("strategy", "out", "name", "resume", "max_failures"))
@with_task_options("data", "data_dir", "loss", "metrics", "optimizer", "lr", "schedule", "weight_decay", "clip_norm")
def _chaos(
    context: typer.Context,
    task: TaskArgument,
    own_loop: Annotated[
        bool,
        typer.Option("--own-loop", help="TASK is a script with its own training loop. Its arguments follow after --."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print progress as JSON lines; the last line is the score.")
    ] = False,
    *,
    given: dict[str, Any],
    parts: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Inject faults into a run and score its recovery.

    Kills random workers and parameter servers, run after run, until --kills are
    done. The score: hangs, time to recover, samples lost or repeated, and the
    final metric beside that of a run without faults. Exits with 1 if a guarantee
    was violated. The same --seed gives the same victims and pauses.

    --fault injects a given fault at a given step instead.

    With --namespaces N, worker k is behind the link of namespace k mod N. Workers
    then share no memory, and 'cut' takes the whole link down. The namespaces are
    removed when the command exits.

    Ctrl-C stops and prints the score so far.

    syncline chaos lenet --data mnist --workers 4 --kills 50 --every 3s --seed 7
    syncline chaos mlp --data digits --epochs 60 --all-strategies --kills 48 --every 500ms
    syncline chaos mlp --data digits --epochs 60 --fault 'stop worker 1 at step 50'
    syncline chaos my_loop.py --own-loop --workers 2 --kills 20 -- --my-own-flag 3
    sudo syncline chaos mlp --data digits -w 3 --epochs 60 --namespaces 3 --fault 'cut worker 1 at step 30 for 5s'
    """
    from syncline.lab.chaos.soak import soak

    if given.get("strategy") and given.get("all_strategies"):
        raise ConfigError("--all-strategies includes every --strategy. Give only one of them.")
    out = given.pop("out", None)
    what, config, data_dir = _find(task, parts, settings, context.args, is_own_loop=own_loop)
    wanted = _settings(given, default_strategy=config.strategy)
    with exit_if_interrupted():
        soak(
            what,
            config,
            wanted,
            command=shlex.join(["syncline", *sys.argv[1:]]),
            out=out,
            as_json=json,
            data_dir=data_dir,
            download_progress=None if json else DownloadProgress(sys.stderr),
        )


def _find(
    what: str, parts: dict[str, Any], settings: dict[str, Any], arguments: list[str], *, is_own_loop: bool
) -> tuple[Any, Any, Path | None]:
    """The task or the script, its settings, and where to look for its data first."""
    from syncline.cli.tasks import find_task
    from syncline.config.run import RunConfig
    from syncline.task import Script

    if not is_own_loop:
        if arguments:
            raise ConfigError(
                f"A task takes no arguments, but there are: {shlex.join(arguments)}. Add --own-loop if {what} is a "
                "script with its own training loop.",
                code="task-arguments",
            )
        found = find_task(what, parts, settings)
        return found.task, found.config, found.data_dir
    refused = [name for name in (*parts, *settings) if name in parts or name in NOT_FOR_SCRIPTS]
    if refused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ConfigError(f"With --own-loop, the script decides on {names}. Leave this out.", code="own-loop-options")
    return Script(what, tuple(arguments)), RunConfig(**settings), None


chaos = bundle_options(_chaos, into="given", options=_CHAOS_OPTIONS)


def _settings(given: dict[str, Any], *, default_strategy: str) -> Any:
    from syncline.lab.chaos.kills import read_interval
    from syncline.lab.chaos.soak import ChaosSettings
    from syncline.lab.faults import read_fault, read_seconds
    from syncline.strategies.presets import PRESETS

    faults = tuple(read_fault(text) for text in given.get("fault", ()))
    names = given.get("strategy") or [default_strategy]
    if given.get("all_strategies"):
        names = [preset.name for preset in PRESETS.values()]
    return ChaosSettings(
        strategies=tuple(dict.fromkeys(names)),
        kills=given.get("kills", 0 if faults else 10),
        every=read_interval(given.get("every", "3s")),
        faults=faults,
        references=given.get("references", 1),
        kill_last_worker=given.get("kill_last_worker", False),
        hang_s=read_seconds(given.get("hang_after", "60s")),
        limit_s=read_seconds(given.get("limit", "60min")),
        namespaces=given.get("namespaces", 0),
    )
