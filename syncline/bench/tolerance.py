"""What fault tolerance costs per step while nothing fails.

Here: the built-in loop with everything that it does in case somebody is lost, against the same loop without: signs of
life and telemetry from a thread of its own to a coordinator in a process of its own, which judges them; running
statistics kept until the step counts; the account of used samples and its way into the ledger; a look for another View,
and for scripted faults, in each step. Both are in one process, in turn, one worker, one thread, the same model with
batch norm, data and order: they end with the same parameters, bit by bit. Not in the comparison: checkpoints, which
every careful loop makes.

A step's time is the mean over a block of steps, so that what happens only now and then counts.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from torch import nn

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.overhead import Workload, as_in_a_worker, calibrate, make_workload
from syncline.comms.control import Ticket
from syncline.config.run import RunConfig
from syncline.data.order import SampleOrder, Share
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.planner import make_plan
from syncline.task import Task, sgd
from syncline.telemetry.recorder import Recorder
from syncline.workers.course import Course
from syncline.workers.job import Job
from syncline.workers.link import Link
from syncline.workers.loop import train
from syncline.workers.runtime import Runtime

__all__ = ["run", "suites"]

Clock = Callable[[], float]

_STEP_MS = 10.0
_STEPS = 50
_GOAL = 1.01
_LIMIT_S = 30.0
_NO_CHECKPOINT_S = 1e9


class _Timed(Course):
    """Notes when each step ended."""

    def __init__(self, runtime: Runtime, order: SampleOrder, clock: Clock) -> None:
        super().__init__(runtime, order, epochs=1)
        self._clock = clock
        self.step_ends: list[float] = []

    def tell_how_it_went_on(self) -> None:
        """The last thing that is done in a step."""
        super().tell_how_it_went_on()
        self.step_ends.append(self._clock())


class _Careful(_Timed):
    """The way of a worker among others, though it is alone here."""

    @property
    def can_be_interrupted(self) -> bool:
        """As if there were others to be lost."""
        return True


class _Careless(_Timed):
    """The same way, if nobody could ever be lost."""

    @property
    def can_be_interrupted(self) -> bool:
        """Never."""
        return False

    def look_up(self) -> None:
        """There is nothing to see."""

    def advance(self, share: Share) -> None:
        """Go on, without an account."""
        self.position = share.after


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """By the clock on the wall, and by the processor's, which minds less what else the machine does."""
    with as_in_a_worker(), tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        batch = calibrate(_STEP_MS)
        settings.say(f"A step of about {_STEP_MS:g} ms: a batch of {batch}.")
        work, folder = make_workload(batch, _STEPS), Path(name)
        rounds = 4 if settings.quick else 10
        yield _suite("tolerance", "Time", work, folder, time.perf_counter, rounds)
        yield _suite("tolerance-cpu", "Processor time, of all threads,", work, folder, time.process_time, rounds)


def _suite(name: str, what: str, work: Workload, folder: Path, clock: Clock, rounds: int) -> Suite:
    """With and without, and one of them twice: how far it is from itself shows what can be told apart."""
    with_it, without = (_step_ms(work, folder, clock, is_on=is_on) for is_on in (True, False))
    return Suite(
        name=name,
        measures=f"{what} per step of an MLP with batch norm on a batch of {work.batch}, one process, one thread: the "
        f"mean of {_STEPS} steps.",
        unit="ms",
        baseline="off",
        contenders=(
            Contender(name="off", measure=without, what="As if nobody could be lost."),
            Contender(
                name="on",
                measure=with_it,
                what="As it is: signs of life, ledger, what is needed to take a step back.",
            ),
            Contender(name="off, again", measure=without, what="The same as the first: shows the noise."),
        ),
        goals=(Goal(contender="on", limit=_GOAL),),
        rounds_per_repeat=rounds,
    )


def run(work: Workload, run_dir: Path, clock: Clock, *, is_on: bool) -> tuple[list[float], nn.Module]:
    """When each step ended, by `clock`, and the model that it came to."""
    task = Task(model=_Net, data=(work.inputs, work.targets), optimizer=sgd(lr=0.01, momentum=0.9)).with_defaults()
    config = RunConfig(
        workers=1, epochs=1, batch=work.batch, seed=0, threads=1, evaluate_every=0, checkpoint_every_s=_NO_CHECKPOINT_S
    )
    plan = make_plan(task.facts(), config, Machine.here(), "cpu")
    if not is_on:
        return _train(task, Runtime(plan, 0, Recorder(0)), _Careless, clock)
    with _coordinator(plan, run_dir) as ticket, closing(Link(ticket, os.getpid())) as link:
        return _train(task, Runtime.connected(link), _Careful, clock)


class _Net(nn.Sequential):
    """An MLP with batch norm, whose running statistics a step changes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip


def _train(task: Task, runtime: Runtime, course: type[_Timed], clock: Clock) -> tuple[list[float], nn.Module]:
    runtime.enter_view()
    job = Job(task, runtime)
    job.course = timed = course(runtime, job.course.order, clock)
    job.enter_view()
    train(job)
    timed.tell_used()
    runtime.close()
    return timed.step_ends, job.trained.model


@contextmanager
def _coordinator(plan: Plan, run_dir: Path) -> Iterator[Ticket]:
    """A coordinator in a process of its own, and the ticket of its one worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.bench.scripts.tolerance_coordinator", str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    try:
        process.stdin.write(json.dumps(plan.to_dict()) + "\n")
        process.stdin.flush()
        yield msgspec.json.decode(process.stdout.readline(), type=Ticket)
        process.stdin.close()
        process.wait(_LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _step_ms(work: Workload, folder: Path, clock: Clock, *, is_on: bool) -> Callable[[], float]:
    def measure() -> float:
        gc.collect()
        with tempfile.TemporaryDirectory(dir=folder) as run_dir:
            ends, _ = run(work, Path(run_dir), clock, is_on=is_on)
        return 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)

    return measure
