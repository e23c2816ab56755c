"""`syncline chaos`: what the command takes. Not here: the work (`syncline/chaos/`)."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.flags import with_run_options
from syncline.cli.task_flags import (
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
from syncline.errors import ConfigError, Interrupted

__all__ = ["chaos"]


@with_run_options(leave_out=("strategy", "out", "name", "resume", "most_losses"))
def chaos(
    task: What,
    data: Data = None,
    kills: Annotated[
        int | None,
        typer.Option(help="How many processes to kill, in all runs together. Default: 10, or 0 with --fault."),
    ] = None,
    every: Annotated[
        str,
        typer.Option(help="How far kills are apart, on average: 3s, 250ms, '200 steps'; half of it to one and a half."),
    ] = "3s",
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="What goes wrong at a given step of every run; may be given several times."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Train with this strategy; may be given several times. Default: allreduce."),
    ] = None,
    all_strategies: Annotated[
        bool, typer.Option("--all-strategies", help="Train with every strategy that has a name, in turn.")
    ] = False,
    references: Annotated[
        int, typer.Option(help="How many runs to leave unharmed, with each strategy, to compare with.")
    ] = 1,
    to_the_last: Annotated[
        bool, typer.Option("--to-the-last", help="Kill also the last worker that holds what was trained.")
    ] = False,
    hang_after: Annotated[
        str, typer.Option(metavar="TIME", help="A run without progress for so long hangs: it is ended.")
    ] = "60s",
    limit: Annotated[str, typer.Option(metavar="TIME", help="The longest that one run may take.")] = "60min",
    namespaces: Annotated[
        int | None,
        typer.Option(metavar="N", help="Put workers and servers into N network namespaces, in turn. Needs root."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The score as text, with JSON beside it. Default: in runs/chaos-TIME."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line; the last one is the score.")] = False,
    loss: Loss = None,
    optimizer: Optimizer = None,
    lr: Lr = None,
    schedule: Schedule = None,
    metrics: Metrics = None,
    weight_decay: WeightDecay = None,
    clip_norm: ClipNorm = None,
    data_dir: DataDir = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Break a training on purpose, and see what it makes of it.

    Kills workers and servers of parameters at random while they train, one run
    after the other until enough kills were made, and keeps the score: hangs,
    how soon the others went on, samples lost or used twice, and the result
    next to that of a run that was left unharmed. The exit code is 1 if a
    promise was broken. The same --seed draws the same pauses and victims.

    --fault breaks it at a given step instead, counted from 0:
    'kill worker 2 at step 412', 'kill server 0 at step 20',
    'stop worker 1 at step 50 for 5s' (or for good), 'raise in worker 1 at step 7',
    'slow worker 0 at step 10 by 5x' (or by 0.2s), 'disconnect worker 1 at step 30',
    'cut worker 1 at step 30 for 5s', 'fill the disk at step 20 for 5s',
    'lose 10% of packets to worker 1 at step 30 for 5s'

    With --namespaces N, worker k is behind the link of namespace k mod N, and
    so on with the servers; they share no memory, and 'cut' takes the whole link
    away. For root; nothing of it is left when the command ends.

    Ctrl-C stops, and shows the score by then.

    syncline chaos lenet --data mnist --workers 4 --kills 50 --every 3s --seed 7
    syncline chaos mlp --data digits --epochs 60 --all-strategies --kills 48 --every 500ms
    syncline chaos mlp --data digits --epochs 60 --fault 'stop worker 1 at step 50'
    sudo syncline chaos mlp --data digits -w 3 --epochs 60 --namespaces 3 --fault 'cut worker 1 at step 30 for 5s'
    """
    from syncline.chaos.kills import read_rhythm
    from syncline.chaos.soak import Settings, soak
    from syncline.cli.download_progress import DownloadProgress
    from syncline.cli.tasks import find_task
    from syncline.strategies.presets import PRESETS
    from syncline.testing.faults import read_fault, read_seconds

    if strategy and all_strategies:
        raise ConfigError("--all-strategies has every --strategy in it. Give one of the two.")
    faults = tuple(read_fault(text) for text in fault or ())
    given = {"data": data, "loss": loss, "optimizer": optimizer, "schedule": schedule, "metrics": metrics,
             "weight_decay": weight_decay, "clip_norm": clip_norm, "data_dir": data_dir}  # fmt: skip
    found = find_task(task, given, settings, lr)
    names = [preset.name for preset in PRESETS.values()] if all_strategies else strategy or [found.config.strategy]
    wanted = Settings(
        strategies=tuple(dict.fromkeys(names)),
        kills=kills if kills is not None else 0 if faults else 10,
        every=read_rhythm(every),
        faults=faults,
        references=references,
        to_the_last=to_the_last,
        hang_s=read_seconds(hang_after),
        limit_s=read_seconds(limit),
        namespaces=namespaces if namespaces is not None else 0,
    )
    try:
        soak(
            found.task,
            found.config,
            wanted,
            command=shlex.join(["syncline", *sys.argv[1:]]),
            out=out,
            as_json=json,
            data_dir=found.data_dir,
            download_progress=None if json else DownloadProgress(sys.stderr),
        )
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from stopped
