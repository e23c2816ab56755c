"""What the built-in loop costs per step, against the same loop written by hand.

Here: both loops in one process, in turn, one worker, one thread, the same model, data and order: they end with the same
parameters, bit by bit. The built-in loop is the real one (`workers/loop.py` with a `Job`), alone with a `Solo`
collective. Not in the comparison: the thread that sends telemetry to the driver five times a second, and checkpoints.

A step's time is the median over a block of steps, from the end of one step to the end of the next.
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

from syncline import zoo
from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.statistics import quantile
from syncline.config.run import RunConfig
from syncline.data.order import Position, permutation
from syncline.plan.machine import Machine
from syncline.plan.planner import make_plan
from syncline.task import Task, sgd
from syncline.telemetry.recorder import Recorder
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.runtime import Runtime

__all__ = [
    "Loop", "Workload", "as_in_a_worker", "built_in", "by_hand", "calibrate", "make_workload", "suite_for", "suites",
]  # fmt: skip

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
    """What both loops do: one epoch of `steps` full batches of an MLP."""

    inputs: torch.Tensor
    targets: torch.Tensor
    batch: int

    @property
    def steps(self) -> int:
        """How many steps one pass is."""
        return len(self.inputs) // self.batch


@dataclass(frozen=True)
class Loop:
    """A pass over the work: when each step ended, and the model it came to."""

    step_ends: list[float]
    model: nn.Module

    def step_times(self) -> list[float]:
        """Seconds from the end of one step to the end of the next, the first few left out."""
        times = [after - before for before, after in itertools.pairwise(self.step_ends)]
        return times[min(_WARM_UP_STEPS, len(times) - 1) :]


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """A step of 10 ms, which the goal is about, and one of 1 ms, where every microsecond shows."""
    with as_in_a_worker():
        for target_ms, steps, goal in ((10.0, 20, _GOAL), (1.0, 100, None)):
            batch = calibrate(target_ms)
            settings.say(f"A step of about {target_ms:g} ms: a batch of {batch}.")
            yield suite_for(
                f"overhead-{target_ms:g}ms",
                make_workload(batch, steps),
                goal=goal,
                rounds_per_repeat=4 if settings.quick else 10,
            )


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """One thread, and optimisers without torch's compiler: both loops profit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    without_compiler()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def suite_for(name: str, work: Workload, *, goal: float | None = None, rounds_per_repeat: int = 1) -> Suite:
    """Both loops on `work`, and one of them twice: how far a loop is from itself shows what can be told apart.

    Many rounds of few steps: the shorter a round is, the more alike is the machine for all who take part in it.
    """
    return Suite(
        name=name,
        measures=f"Time per step of an MLP (784-256-128-10) on a batch of {work.batch}, one process, one thread: "
        f"the median of {work.steps} steps.",
        unit="ms",
        baseline="by hand",
        contenders=(
            Contender(
                name="by hand", measure=_step_ms(by_hand, work), what="A training loop as PyTorch's tutorial writes it."
            ),
            Contender(
                name="syncline",
                measure=_step_ms(built_in, work),
                what="The built-in loop of syncline train, one worker.",
            ),
            Contender(
                name="by hand, again", measure=_step_ms(by_hand, work), what="The same as the first: shows the noise."
            ),
        ),
        goals=(Goal(contender="syncline", limit=goal),) if goal else (),
        rounds_per_repeat=rounds_per_repeat,
    )


def make_workload(batch: int, steps: int) -> Workload:
    """Random samples for so many steps."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs = torch.randn(batch * steps, *_INPUTS, generator=generator)
    targets = torch.randint(_CLASSES, (batch * steps,), generator=generator)
    targets[0] = _CLASSES - 1  # the number of classes is seen from the data
    return Workload(inputs, targets, batch)


def by_hand(work: Workload) -> Loop:
    """The loop that people write."""
    torch.manual_seed(_SEED)
    model = zoo.build("mlp", _INPUTS, _CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)
    batches = torch.from_numpy(permutation(_SEED, 0, len(work.inputs))).view(work.steps, work.batch)
    step_ends = []
    for index in batches:
        inputs, targets = work.inputs.index_select(0, index), work.targets.index_select(0, index)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
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
    runtime = Runtime(make_plan(task.facts(), config, Machine.here(), "cpu"), 0, recorder)
    job = Job(task, runtime)
    job.enter_view()
    train(job)
    runtime.close()
    return Loop(recorder.step_ends, job.replica.model)


def calibrate(target_ms: float) -> int:
    """The batch at which a step written by hand takes about `target_ms` on this machine when nobody else uses it."""
    batch, step_ms = 1, _undisturbed_ms(1)
    while step_ms < target_ms and batch < _LARGEST_BATCH:
        smaller, smaller_ms = batch, step_ms
        batch *= 2
        step_ms = _undisturbed_ms(batch)
        if step_ms >= target_ms:
            return round(smaller + (batch - smaller) * (target_ms - smaller_ms) / (step_ms - smaller_ms))
    return batch


class _StepEnds(Recorder):
    """The worker's recorder, which also notes when each step ended."""

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
