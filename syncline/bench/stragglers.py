"""What slow workers cost: waiting for everybody in each step, against going on within a bound of the slowest.

Here: real runs with 4 workers whose steps take a fixed time, slept and not computed, so that the cores of the machine
do not matter; and on top of it random delays of up to 5 times that. Two cases: in each step one of the workers, drawn
at random, is delayed (a machine that others use, too), or it is always the same one (a slow machine). In the second no
rhythm helps in the long run, for nobody may get far ahead of the one that is slow; it is measured to show that.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.config.run import RunConfig
from syncline.driver import run_task
from syncline.task import Task, sgd
from syncline.telemetry.events import Event

__all__ = ["Delayed", "suites"]

_WORKERS = 4
_STEP_S = 0.01
_LONGEST = 5
_STEPS, _QUICK_STEPS = 300, 60


class Delayed(nn.Module):
    """A layer whose forward pass takes as long as it is told, for the worker it runs in."""

    def __init__(self, case: str | None) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.case = case
        self.draws = random.Random(0)
        self.pause = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait as long as this worker's step takes."""
        whose, length = self.draws.randrange(_WORKERS), self.draws.random()  # every worker draws the same
        rank = int(Path(os.readlink("/proc/self/fd/1")).stem.rpartition("-")[2])  # from the log it writes to
        is_mine = self.case is not None and rank == (whose if self.case == "any worker" else _WORKERS - 1)
        self.pause.wait(_STEP_S * (1 + (_LONGEST * length if is_mine else 0)))
        out: torch.Tensor = self.layer(x)
        return out

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k != "pause"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, pause=threading.Event())


class _Nobody:
    """Watches a run that nobody needs to see."""

    def on_event(self, event: Event) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Delays that hit any worker, and delays that always hit the same one. A quick bench has the first kind only."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        if settings.quick:
            suite = _suite("any worker", _QUICK_STEPS, Path(folder))
            yield replace(suite, contenders=suite.contenders[:2])
            return
        for case in ("any worker", "one worker"):
            yield _suite(case, _STEPS, Path(folder))


def _suite(case: str, steps: int, folder: Path) -> Suite:
    whose = "one of them, drawn anew in each step," if case == "any worker" else "always the same one"
    return Suite(
        name=f"stragglers-{case.replace(' ', '-')}",
        measures=f"{_WORKERS} workers whose steps take {1e3 * _STEP_S:g} ms; {whose} is delayed by up to {_LONGEST} "
        f"times that. Steps a second of all together, over {steps} steps.",
        unit="steps/s",
        baseline="every(1)",
        contenders=(
            Contender(
                name="every(1)",
                measure=_run("gradients | every(1) | server", case, steps, folder),
                what="gradients | every(1) | server: everybody waits for the slowest in each step.",
            ),
            Contender(
                name="stale(3)",
                measure=_run("gradients | stale(3) | server", case, steps, folder),
                what="gradients | stale(3) | server: nobody more than 3 steps ahead of the slowest.",
            ),
            Contender(
                name="every(1), no delays",
                measure=_run("gradients | every(1) | server", None, steps, folder),
                what="What is possible.",
            ),
            Contender(
                name="stale(3), no delays",
                measure=_run("gradients | stale(3) | server", None, steps, folder),
                what="What is possible.",
            ),
        ),
        goals=(Goal(contender="stale(3)", limit=1.0, bound="at least"),) if case == "any worker" else (),
    )


def _run(strategy: str, case: str | None, steps: int, folder: Path) -> Callable[[], float]:
    def measure() -> float:
        samples = 16 * steps
        task = Task(
            model=Delayed(case),
            data=(torch.randn(samples, 64), torch.zeros(samples, dtype=torch.long)),
            optimizer=sgd(lr=0.01),
        )
        config = RunConfig(
            workers=_WORKERS, batch=16, epochs=1, strategy=strategy, threads=1, evaluate_every=0, out=str(folder)
        )
        result = run_task(task, config, _Nobody())
        return result.samples_per_s / 16

    return measure
