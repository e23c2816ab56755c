"""The cost of stragglers: waiting for all workers in each step, or training within a staleness bound.

Here: real runs with 4 workers whose steps take a fixed time, slept and not computed, so that the number of cores does
not matter, plus random delays of up to 5 times that. Two cases: a random worker is delayed in each step (a shared
machine), or always the same one (a slow machine). In the second case a staleness bound cannot help in the long run,
because no worker may get further ahead of the slow one than the bound; the suite shows that.
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

from syncline.config.run import RunConfig
from syncline.driver import run_task
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.output import RunObserver
from syncline.task import Task, sgd

_WORKERS = 4
_STEP_S = 0.01
_LONGEST = 5
_STEPS, _QUICK_STEPS = 300, 60


class Delayed(nn.Module):
    """A layer whose forward pass takes a given time, depending on the worker that runs it."""

    def __init__(self, case: str | None) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.case = case
        self.draws = random.Random(0)
        self.pause = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delayed, length = self.draws.randrange(_WORKERS), self.draws.random()  # every worker draws the same
        worker_id = int(Path(os.readlink("/proc/self/fd/1")).stem.rpartition("-")[2])  # from the name of its log
        is_mine = self.case is not None and worker_id == (delayed if self.case == "any worker" else _WORKERS - 1)
        self.pause.wait(_STEP_S * (1 + (_LONGEST * length if is_mine else 0)))
        out: torch.Tensor = self.layer(x)
        return out

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k != "pause"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, pause=threading.Event())


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Delays of random workers, then of one worker. A quick bench has the first case only."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        if settings.quick:
            suite = _suite("any worker", _QUICK_STEPS, Path(folder))
            yield replace(suite, contenders=suite.contenders[:2])
            return
        for case in ("any worker", "one worker"):
            yield _suite(case, _STEPS, Path(folder))


def _suite(case: str, steps: int, folder: Path) -> Suite:
    whose = "a random one in each step" if case == "any worker" else "always the same one"
    return Suite(
        name=f"stragglers-{case.replace(' ', '-')}",
        measures=f"{_WORKERS} workers whose steps take {1e3 * _STEP_S:g} ms; {whose} is delayed by up to {_LONGEST} "
        f"times that. Steps per second over all workers, over {steps} steps.",
        unit="steps/s",
        baseline="every(1)",
        contenders=tuple(
            Contender(name=name, measure=_run(f"gradients | {when} | server", delays, steps, folder), what=what)
            for name, when, delays, what in (
                ("every(1)", "every(1)", case, "All workers wait for the slowest in each step."),
                ("stale(3)", "stale(3)", case, "No worker gets more than 3 steps ahead of the slowest."),
                ("every(1), no delays", "every(1)", None, "The upper bound."),
                ("stale(3), no delays", "stale(3)", None, "The upper bound."),
            )
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
        result = run_task(task, config, RunObserver(lambda _state, _event: None))
        return result.samples_per_s / 16

    return measure
