"""`syncline plan`: strategies compared before any of them is run. Not here: the work (`measuring.py`)."""

from __future__ import annotations

import json as json_format
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.boundary import check_surroundings
from syncline.cli.run_options import bundle_options
from syncline.cli.task_options import with_task_options

if TYPE_CHECKING:
    from syncline.planning.cost.choice import TrainingPlan


def _option(kind: Any, help: str, *names: str, panel: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)]


_SETTINGS = {
    "workers": _option(int, "Number of workers, on all hosts together. Default: 2.", "--workers", "-w"),
    "batch": _option(int, "Global batch size.", "--batch", "-b"),
    "threads": _option(int, "CPU threads per worker. Default: cores / workers."),
}
_ASKED = {
    "hosts": _option(int, "Number of hosts, each like this machine. Default: 1, or with --network one per worker."),
    "network": _option(str, "Link of each host: rate, latency or both, such as 100mbit,1ms. Default: 1gbit,100us."),
    "strategy": _option(
        list[str], "Plan this strategy only; may be repeated, and may be your own.", "--strategy", "-s"
    ),
    "layout": _option(list[str], "Also plan this layout, or all that the model can have; may be repeated."),
    "target": _option(str, "Also predict how long it takes to this accuracy on the test data, such as 98.5%."),
    "probe": _option(float, "With --target: for how many seconds to train towards it. Default: 60."),
    "seconds": _option(float, "How long to measure a step of the model; less than 1 measures once. Default: 3."),
}
_CHECK = "Check"
_CHECKING = {
    "check": _option(
        bool, "Compare predictions with short real runs, on this machine and on emulated hosts (root).", "--check",
        panel=_CHECK,
    ),
    "quick": _option(bool, "With --check: one model, two places.", "--quick", panel=_CHECK),
    "out": _option(Path, "With --check: Markdown file for the table; portions are added.", panel=_CHECK),
}  # fmt: skip


@with_task_options("data", "data_dir", "optimizer", "loss", "augment")
@partial(bundle_options, into="checking", options=_CHECKING)
@partial(bundle_options, into="asked", options=_ASKED)
@partial(bundle_options, into="settings", options=_SETTINGS)
def plan(
    task: Annotated[
        str, typer.Argument(metavar="TASK|RUN", help="As for 'syncline train', or the directory of a run.")
    ] = "",
    why: Annotated[str | None, typer.Option(help="Explain the prediction of this strategy, term by term.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, with all terms and ranges.")] = False,
    *,
    settings: dict[str, Any],
    asked: dict[str, Any],
    checking: dict[str, Any],
    parts: dict[str, Any],
) -> None:
    """Predict which strategy trains a model fastest here, and why.

    Measures steps of the model on this machine in short runs, adds what each
    strategy exchanges, and prints all of them, best first. Strategies that
    compute what one process would come before those that train differently.

    Of a run, shows what was predicted for it and what came, term by term.

    syncline plan lenet --data mnist --workers 4
    syncline plan runs/lenet-mnist-20260101-120000
    syncline plan lenet --data mnist --workers 4 --network 100mbit,1ms
    syncline plan lenet --data mnist --workers 4 --why sparknet
    syncline plan lenet --data mnist --workers 4 --target 98.5%
    syncline plan --check --quick
    syncline plan lenet --data mnist --workers 4 --strategy allreduce --layout all
    """
    check_surroundings()
    if checking.get("check"):
        _check(task, settings, asked, checking, as_json=json)
    elif not task:
        raise typer.BadParameter("Name a model, a Python task, a run file or a run.", param_hint="TASK")
    elif os.path.isfile(os.path.join(task, "plan.json")):  # unlike Path.is_file, False where we may not look
        _show_run(Path(task), json=json)
    else:
        made = _plan(task, parts, settings, asked, why)
        if json:
            typer.echo(json_format.dumps(made.to_dict(), indent=1))
        else:
            typer.echo(made.why(why) if why else made.table())


def _plan(
    task: str, parts: dict[str, Any], settings: dict[str, Any], asked: dict[str, Any], why: str | None
) -> TrainingPlan:
    from syncline.cli.tasks import find_task
    from syncline.driver import run_task
    from syncline.measuring import Question, answer, hosts_asked
    from syncline.planning.cost.target import read_target

    strategies, layouts = asked.pop("strategy", None), asked.pop("layout", ())
    target, probe = asked.pop("target", None), asked.pop("probe", 60.0)
    found = find_task(task, parts, settings)
    located = found.task.with_defaults().located(found.data_dir, None)
    hosts = hosts_asked(asked.pop("hosts", None), asked.get("network"), found.config.workers)
    question = Question(
        task=located, config=found.config, hosts=hosts, layouts=tuple(layouts),
        target=read_target(target) if target else None, probe_s=probe, **asked,
    )  # fmt: skip
    names = [*strategies, *([why] if why and why not in strategies else [])] if strategies else None
    return answer(question, names, _progress, run_task)


def _check(
    task: str, settings: dict[str, Any], asked: dict[str, Any], checking: dict[str, Any], *, as_json: bool
) -> None:
    from syncline.lab.plan_check.command import check_plans, grid_of

    grid = grid_of(
        quick=bool(checking.get("quick")), model=task or None, workers=settings.get("workers"),
        network=asked.get("network"), strategies=asked.get("strategy"),
    )  # fmt: skip
    check_plans(grid, out=checking.get("out"), as_json=as_json)


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
