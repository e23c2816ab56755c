"""Overhead of an engine per step, after startup.

Here: the same run on the local engine and on each installed cluster engine, which gets its own cluster on this machine:
LeNet on images in memory, two workers. Measured is the time of a step in the middle of the run, as reported by the
workers, without startup. Not here: training throughput as such (`training.py`).
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

from syncline.engines.java import borrowed_java_home, java_problem
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.processes import output_of
from syncline.telemetry.events import Progress
from syncline.telemetry.run_dir import RunDir

_WORKERS = 2
_BATCH = 128
_STEPS, _QUICK_STEPS = 600, 120
_WARM_UP_SHARE = 0.2
"""The first part of a run, which does not count."""
_GOAL = 1.05
_LIMIT_S = 300.0
_TASK = Path(__file__).parent / "scripts" / "engines_task.py"


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite, with the engines that are installed."""
    steps = _QUICK_STEPS if settings.quick else _STEPS
    engines = {"local": "Processes on this machine."}
    if importlib.util.find_spec("ray") is None:
        settings.say("The Ray engine is not measured: pip install 'syncline[ray]'.")
    else:
        engines["ray"] = "Actors of a Ray cluster on this machine, started for the run."
    if importlib.util.find_spec("pyspark") is None:
        settings.say("The Spark engine is not measured: pip install 'syncline[spark]'.")
    elif (problem := java_problem()) is not None and borrowed_java_home() is None:
        settings.say(f"The Spark engine is not measured. {problem}")
    else:
        engines[f"spark-local[{_WORKERS}]"] = "Tasks of a Spark instance on this machine, started for the run."
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        yield Suite(
            name="engines",
            measures=f"Time per step of LeNet, {_WORKERS} workers, batch {_BATCH}, images in memory, one thread each, "
            f"in runs of {steps} steps, without startup.",
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
    """The median time of a step of the first worker, in milliseconds, from its progress events after the warm-up.

    >>> events = [Progress(worker_id=0, epoch=0, step=s, samples=64, seconds=0.2, cursor=0) for s in (10, 30, 40, 50)]
    >>> step_ms(events, steps=50)
    20.0
    """
    mine = [e for e in events if isinstance(e, Progress) and e.worker_id == 0]
    times = [
        1e3 * now.seconds / (now.step - before.step)
        for before, now in itertools.pairwise(mine)
        if before.step >= _WARM_UP_SHARE * steps and now.step > before.step
    ]
    return statistics.median(times)
