"""What an engine costs per step, after it has started.

Here: the same run on the local engine and on those of clusters that are installed, each on a cluster of its own on this
machine: LeNet on images in memory, two workers. Counted is the time of a step in the middle of the run, by what the
workers themselves tell; starting is not in it. Not here: training speed as such (`training.py`).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.processes import output_of
from syncline.engines.java import borrowed_java_home, java_problem
from syncline.telemetry.events import Progress
from syncline.telemetry.run_dir import RunDir

__all__ = ["step_ms", "suites"]

_WORKERS = 2
_BATCH = 128
_STEPS, _QUICK_STEPS = 600, 120
_LEFT_OUT = 0.2
"""This part of a run is its beginning, and not counted."""
_GOAL = 1.05
_LIMIT_S = 300.0
_TASK = Path(__file__).parent / "scripts" / "engines_task.py"


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """One suite, of the engines that can be had here."""
    steps = _QUICK_STEPS if settings.quick else _STEPS
    engines = {"local": "Processes of this machine."}
    if importlib.util.find_spec("ray") is None:
        settings.say("The Ray engine is not measured: pip install 'syncline[ray]'.")
    else:
        engines["ray"] = "Actors of a Ray cluster on this machine, started for the run."
    if importlib.util.find_spec("pyspark") is None:
        settings.say("The Spark engine is not measured: pip install 'syncline[spark]'.")
    elif (problem := java_problem()) is not None and borrowed_java_home() is None:
        settings.say(f"The Spark engine is not measured. {problem}")
    else:
        engines[f"spark-local[{_WORKERS}]"] = "Tasks of a Spark on this machine, started for the run."
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        yield Suite(
            name="engines",
            measures=f"Time per step of LeNet, {_WORKERS} workers, a batch of {_BATCH} images in memory, one thread "
            f"each, in runs of {steps} steps; starting is not counted.",
            unit="ms",
            baseline="local",
            contenders=tuple(
                Contender(name=name, measure=_timed(name, steps, Path(folder)), what=what)
                for name, what in engines.items()
            ),
            goals=tuple(Goal(contender=name, limit=_GOAL) for name in engines if name != "local"),
        )


def _timed(engine: str, steps: int, folder: Path) -> Callable[[], float]:
    return lambda: _measured(engine, steps, folder)


def _measured(engine: str, steps: int, folder: Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        output_of(
            [
                sys.executable, "-m", "syncline.cli.main", "train", f"{_TASK}:task", "--engine", engine,
                "--workers", str(_WORKERS), "--batch", str(_BATCH), "--threads", "1", "--max-steps", str(steps),
                "--epochs", "1000", "--tune", "off", "--evaluate-every", "0", "--out", out, "--name", "run", "--quiet",
            ],
            environment=os.environ, folder=folder, timeout_s=_LIMIT_S,
        )  # fmt: skip
        return step_ms(list(RunDir(Path(out, "run")).read_events()), steps)


def step_ms(events: Sequence[object], steps: int) -> float:
    """The median time of a step of the first worker, in milliseconds, by what it told after the beginning.

    >>> told = [Progress(rank=0, epoch=0, step=s, samples=64, seconds=0.2, cursor=0) for s in (10, 30, 40, 50)]
    >>> step_ms(told, steps=50)
    20.0
    """
    mine = [e for e in events if isinstance(e, Progress) and e.rank == 0]
    times = [
        1e3 * now.seconds / (now.step - before.step)
        for before, now in itertools.pairwise(mine)
        if before.step >= _LEFT_OUT * steps and now.step > before.step
    ]
    return statistics.median(times)
