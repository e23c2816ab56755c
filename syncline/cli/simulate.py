"""`syncline simulate`: runs on thousands of workers, without them. Not here: the work (`planning/simulation/`)."""

from __future__ import annotations

import json as json_format
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.boundary import check_surroundings
from syncline.cli.task_options import TaskArgument, with_task_options
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.measuring import Question
    from syncline.planning.simulation.scenario import Failures

_MOST_WORKERS = 100_000
_POINTS = 6
"""How many numbers of workers are simulated of a range such as 2..10000."""


@with_task_options("data", "data_dir", "optimizer", "loss", "augment")
def simulate(
    task: TaskArgument,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="Numbers of workers, such as 64, or 8,64,512, or 2..10000.")
    ] = "2..1024",
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="A strategy, several separated by semicolons, or all.")
    ] = "all",
    network: Annotated[
        str | None,
        typer.Option(help="Link of each host: rate, latency or both, such as 10gbit,50us. Default: 1gbit,100us."),
    ] = None,
    per_host: Annotated[int, typer.Option(help="Workers on each host.")] = 1,
    stragglers: Annotated[str, typer.Option(help="none, or how steps vary: lognormal(0.3).")] = "none",
    failures: Annotated[str, typer.Option(help="none, or such as '1 per worker per 30 days'.")] = "none",
    recovery: Annotated[
        str, typer.Option(help="After a failure: in-place (repeat the step) or restart (from the last checkpoint).")
    ] = "in-place",
    repair: Annotated[str, typer.Option(help="How long a replacement in place, or a restart, takes.")] = "500ms",
    checkpoint: Annotated[str, typer.Option(help="How long a checkpoint stops the run, with restarts.")] = "1s",
    interval: Annotated[
        str | None, typer.Option(help="From one checkpoint to the next. Default: the best, by Young's formula.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate.")] = 1000,
    share: Annotated[int, typer.Option(help="Samples of a worker in each step.")] = 64,
    step: Annotated[
        str | None,
        typer.Option(help="A worker's time of computing its share, such as 40ms. Default: measured on this machine."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of stragglers and failures.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, with all of the staleness.")] = False,
    *,
    parts: dict[str, Any],
) -> None:
    """Simulate runs with up to 100,000 workers, stragglers and failures.

    Each worker computes the same share of a step, so more workers take larger
    batches. Bytes and who waits for whom come from the strategy, the time of
    computing from a measurement on this machine, or from --step.

    syncline simulate lenet --data mnist --workers 2..10000 --step 40ms
    syncline simulate lenet --data mnist --workers 512 --strategy "allreduce; ssp" --stragglers "lognormal(0.3)"
    syncline simulate lenet --data mnist --failures "1 per worker per 30 days" --recovery restart
    """
    from syncline.advisor import measure_task
    from syncline.planning.simulation.scenario import Scenario, seconds_of, straggling_of
    from syncline.planning.simulation.study import study, table

    check_surroundings()
    _check_numbers(steps=(steps, 10**6), share=(share, 10**6), per_host=(per_host, 1024))
    compute_s = seconds_of(step) if step else 0.0
    failing = _failures(failures, recovery, repair, checkpoint, interval)
    straggling = straggling_of(stragglers)
    scenario = Scenario(workers=1, steps=steps, compute_s=compute_s, straggling=straggling, failures=failing,
                        share=share, seed=seed)  # fmt: skip
    counts, names = _numbers_of_workers(workers), _strategies(strategy)
    question = _question_of_a_host(task, parts, per_host, share, network)
    measured = measure_task(question, names, _progress, compute_s=compute_s or None)
    results = study(scenario, counts, names, measured, per_host=per_host)
    typer.echo(json_format.dumps(results.to_dict(), indent=1) if json else table(results))


def _question_of_a_host(task: str, parts: dict[str, Any], workers: int, share: int, network: str | None) -> Question:
    from syncline.cli.tasks import find_task
    from syncline.measuring import Question

    found = find_task(task, parts, {"workers": workers, "batch": share * workers})
    located = found.task.with_defaults().located(found.data_dir, None)
    return Question(task=located, config=found.config, hosts=1, network=network)


def _check_numbers(**given: tuple[int, int]) -> None:
    for name, (value, most) in given.items():
        if not 1 <= value <= most:
            raise ConfigError.for_setting(name, value, f"1 to {most:,}")


def _failures(failures: str, recovery: str, repair: str, checkpoint: str, interval: str | None) -> Failures:
    from syncline.planning.simulation.scenario import Failures, mean_time_between_failures, seconds_of

    if recovery not in ("in-place", "restart"):
        raise ConfigError.for_setting("recovery", recovery, "'in-place' or 'restart'", allowed=["in-place", "restart"])
    return Failures(
        mean_s=mean_time_between_failures(failures),
        in_place=recovery == "in-place",
        repair_s=seconds_of(repair),
        checkpoint_s=seconds_of(checkpoint),
        interval_s=seconds_of(interval) if interval else None,
    )


def _strategies(text: str) -> list[str]:
    from syncline.planning.cost.choice import all_strategies

    return list(all_strategies()) if text == "all" else [name.strip() for name in text.split(";")]


def _numbers_of_workers(text: str) -> list[int]:
    """Of a range, a few that are equally far apart in their logarithm."""
    if found := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text):
        low, high = int(found[1]), int(found[2])
        if 1 <= low <= high <= _MOST_WORKERS:
            ratio = (high / low) ** (1 / (_POINTS - 1))
            return sorted({low, high, *(round(low * ratio**place) for place in range(1, _POINTS - 1))})
    elif re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        counts = [int(count) for count in text.split(",")]
        if all(1 <= count <= _MOST_WORKERS for count in counts):
            return counts
    raise ConfigError.for_setting(
        "workers", text, f"numbers from 1 to {_MOST_WORKERS:,}, such as 64, or 8,64,512, or 2..10000"
    )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
