"""`syncline plan`: strategies compared before any of them is run. Not here: the work (`measuring.py`)."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.boundary import check_surroundings
from syncline.cli.task_options import with_task_options


@with_task_options("data", "data_dir", "optimizer", "loss", "augment")
def plan(
    task: Annotated[
        str, typer.Argument(metavar="TASK|RUN", help="As for 'syncline train', or the directory of a run.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", help="Number of workers, on all hosts together. Default: 2.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts, each like this machine.")] = 1,
    network: Annotated[
        str | None,
        typer.Option(help="Link of each host: rate, latency or both, such as 100mbit,1ms. Default: 1gbit,100us."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Global batch size.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per worker. Default: cores / workers.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Plan this strategy only; may be repeated, and may be your own."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", help="Also plan this layout, or all that the model can have; may be repeated."),
    ] = None,
    why: Annotated[str | None, typer.Option(help="Explain the prediction of this strategy, term by term.")] = None,
    seconds: Annotated[
        float, typer.Option(help="How long to measure a step of the model; less than 1 measures once.")
    ] = 3.0,
    target: Annotated[
        str | None,
        typer.Option(help="Also predict how long it takes to this accuracy on the test data, such as 98.5%."),
    ] = None,
    probe: Annotated[float, typer.Option(help="With --target: for how many seconds to train towards it.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, with all terms and ranges.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare predictions with short real runs, on this machine and on emulated hosts (root).",
            rich_help_panel="Check",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --check: one model, two places.", rich_help_panel="Check")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --check: Markdown file for the table; portions are added.", rich_help_panel="Check"),
    ] = None,
    *,
    parts: dict[str, Any],
) -> None:
    """Predict which strategy trains a model fastest here, and why.

    Measures steps of the model on this machine in short runs, adds what each
    strategy exchanges, and prints all of them, best first. Strategies that
    compute what one process would come before those that train differently.

    Of a run, shows what was predicted for it and what came, term by term.

    syncline plan lenet --data mnist --workers 4
    syncline plan runs/lenet-mnist-20260101-120000
    syncline plan lenet --data mnist --workers 4 --hosts 4 --network 100mbit,1ms
    syncline plan lenet --data mnist --workers 4 --why sparknet
    syncline plan lenet --data mnist --workers 4 --target 98.5%
    syncline plan --check --quick
    syncline plan lenet --data mnist --workers 4 --strategy allreduce --layout all
    """
    from syncline.cli.tasks import find_task
    from syncline.driver import run_task
    from syncline.measuring import Question, answer
    from syncline.planning.cost.target import read_target

    check_surroundings()
    if check:
        from syncline.lab.plan_check.command import check_plans, grid_of

        grid = grid_of(quick=quick, model=task or None, workers=workers, network=network, strategies=strategy)
        check_plans(grid, out=out, as_json=json)
        return
    if not task:
        raise typer.BadParameter("Name a model, a Python task, a run file or a run.", param_hint="TASK")
    if os.path.isfile(os.path.join(task, "plan.json")):  # unlike Path.is_file, False where we may not look
        _show_run(Path(task), json=json)
        return
    given = {"workers": workers, "batch": batch, "threads": threads}
    found = find_task(task, parts, {name: value for name, value in given.items() if value is not None})

    located = found.task.with_defaults().located(found.data_dir, None)
    question = Question(
        task=located, config=found.config, hosts=hosts, network=network, seconds=seconds,
        layouts=tuple(layout or ()), target=read_target(target) if target else None, probe_s=probe,
    )  # fmt: skip
    names = [*strategy, *([why] if why and why not in strategy else [])] if strategy else None
    made = answer(question, names, _progress, run_task)
    if json:
        typer.echo(json_format.dumps(made.to_dict(), indent=1))
    else:
        typer.echo(made.why(why) if why else made.table())


def _show_run(path: Path, *, json: bool) -> None:
    """What was predicted for a run, and what came."""
    from syncline.coordinator.requests import is_live
    from syncline.observe.report.load import load
    from syncline.planning.expected import as_text

    (record,) = load([path], is_live)
    expected, found = record.expected, record.comparison
    if json:
        made = None if expected is None else json_format.loads(expected.to_json())
        rows = (
            [] if found is None else [*found.terms, found.step, found.bytes, *([found.memory] if found.memory else [])]
        )
        came = {row.name: {"predicted": row.predicted.mid, "came": row.measured, "error": row.error} for row in rows}
        typer.echo(json_format.dumps({"expected": made, "compared": came}, indent=1))
        return
    if expected is None:
        why = "it ended before its first steps could be measured, or an earlier version of Syncline made it"
        typer.echo(f"Nothing was predicted for this run: {why}.")
    elif found is None:
        more = "" if not expected.is_prediction else " It has not taken enough steps yet to compare."
        typer.echo(f"{expected.source}{more}")
    else:
        typer.echo(f"{as_text(found)}\n\n{found.summary}\n{expected.source}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
