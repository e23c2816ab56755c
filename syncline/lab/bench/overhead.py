"""Overhead per step of the built-in loop, beside the same loop written by hand.

Here: both loops in one process, in turn, one worker, one thread, the same model, data and order; their final parameters
are bit-identical. The built-in loop is the real one (`workers/loop.py` with a `Job`) on a `Solo` collective. Not
measured: the telemetry thread, which sends to the driver five times a second, and checkpoints.

The time of a step is the median over a block of steps, from the end of one step to the end of the next.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline.config.run import RunConfig
from syncline.data.assignment import Position
from syncline.data.order import permutation
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.statistics import quantile
from syncline.models import zoo
from syncline.planning.machine import Machine
from syncline.planning.planner import make_plan
from syncline.task import Task, sgd
from syncline.telemetry.recorder import Recorder
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.session import Session

_INPUTS = (784,)
_CLASSES = 10
_SEED = 0
_LR, _MOMENTUM = 0.01, 0.9
_LARGEST_BATCH = 16384
_CALIBRATION_STEPS = 40
_WARM_UP_STEPS = 5
_GOAL = 1.03


@dataclass(frozen=True)
class Workload:
    """One epoch of `steps` full batches of an MLP, for both loops."""

    inputs: torch.Tensor
    targets: torch.Tensor
    batch: int

    @property
    def steps(self) -> int:
        return len(self.inputs) // self.batch


@dataclass(frozen=True)
class Loop:
    """One pass over a workload: the end time of each step, and the trained model."""

    step_ends: list[float]
    model: nn.Module

    def step_times(self) -> list[float]:
        """Seconds from the end of one step to the end of the next, without the first few."""
        times = [after - before for before, after in itertools.pairwise(self.step_ends)]
        return times[min(_WARM_UP_STEPS, len(times) - 1) :]


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """A step of 10 ms, for which there is a goal, and one of 1 ms, where every microsecond shows."""
    with as_in_a_worker():
        for target_ms, steps, goal in ((10.0, 20, _GOAL), (1.0, 100, None)):
            batch = calibrate(target_ms)
            settings.say(f"Batch {batch}: a step takes about {target_ms:g} ms.")
            yield suite_for(
                f"overhead-{target_ms:g}ms",
                make_workload(batch, steps),
                goal=goal,
                rounds_per_repeat=4 if settings.quick else 10,
            )


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """One thread, and optimizers without torch's compiler, for both loops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    without_compiler()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def suite_for(name: str, work: Workload, *, goal: float | None = None, rounds_per_repeat: int = 1) -> Suite:
    """Both loops on `work`, and one of them twice: its distance from itself is the noise.

    There are many rounds of few steps: the shorter a round, the more similar the conditions for its contenders.
    """
    return Suite(
        name=name,
        measures=f"Time per step of an MLP (784-256-128-10) with batch {work.batch}, one process, one thread: "
        f"the median of {work.steps} steps.",
        unit="ms",
        baseline="by hand",
        contenders=(
            Contender(
                name="by hand", measure=_step_ms(by_hand, work), what="A hand-written loop as in PyTorch's tutorial."
            ),
            Contender(
                name="syncline",
                measure=_step_ms(built_in, work),
                what="The built-in loop of syncline train, one worker.",
            ),
            Contender(
                name="by hand, again", measure=_step_ms(by_hand, work), what="The same as the first, to show the noise."
            ),
        ),
        goals=(Goal(contender="syncline", limit=goal),) if goal else (),
        rounds_per_repeat=rounds_per_repeat,
    )


def make_workload(batch: int, steps: int) -> Workload:
    """Random samples for this many steps."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs = torch.randn(batch * steps, *_INPUTS, generator=generator)
    targets = torch.randint(_CLASSES, (batch * steps,), generator=generator)
    targets[0] = _CLASSES - 1  # the task derives the number of classes from the data
    return Workload(inputs, targets, batch)


def by_hand(work: Workload) -> Loop:
    torch.manual_seed(_SEED)
    model = zoo.build("mlp", _INPUTS, _CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)
    batches = torch.from_numpy(permutation(_SEED, 0, len(work.inputs))).view(work.steps, work.batch)
    step_ends = []
    for index in batches:
        inputs, targets = work.inputs.index_select(0, index), work.targets.index_select(0, index)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        optimizer.step()
        loss.item()
        step_ends.append(time.perf_counter())
    return Loop(step_ends, model)


def built_in(work: Workload) -> Loop:
    """The loop of `syncline train`, in this process."""
    task = Task(model="mlp", data=(work.inputs, work.targets), optimizer=sgd(lr=_LR, momentum=_MOMENTUM))
    task = task.with_defaults()
    config = RunConfig(workers=1, epochs=1, batch=work.batch, seed=_SEED, threads=1, evaluate_every=0)
    recorder = _StepEnds(0)
    session = Session(make_plan(task.facts(), config.replace(device="cpu"), Machine.here()), 0, recorder)
    job = Job(task, session)
    job.prepare()
    train(job)
    session.close()
    return Loop(recorder.step_ends, job.stepper.replica.model)


def calibrate(target_ms: float) -> int:
    """The batch with which a hand-written step takes about `target_ms` on this machine when it is idle."""
    batch, step_ms = 1, _undisturbed_ms(1)
    while step_ms < target_ms and batch < _LARGEST_BATCH:
        smaller, smaller_ms = batch, step_ms
        batch *= 2
        step_ms = _undisturbed_ms(batch)
        if step_ms >= target_ms:
            return round(smaller + (batch - smaller) * (target_ms - smaller_ms) / (step_ms - smaller_ms))
    return batch


class _StepEnds(Recorder):
    """The worker's recorder, which also records when each step ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.step_ends: list[float] = []

    def step(self, position: Position, *details: Any) -> None:
        super().step(position, *details)
        self.step_ends.append(time.perf_counter())


def _step_ms(loop: Callable[[Workload], Loop], work: Workload) -> Callable[[], float]:
    def measure() -> float:
        gc.collect()
        return 1e3 * quantile(loop(work).step_times(), 0.5)

    return measure


def _undisturbed_ms(batch: int) -> float:
    return 1e3 * min(by_hand(make_workload(batch, _CALIBRATION_STEPS)).step_times())
