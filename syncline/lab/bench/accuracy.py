"""Time to train LeNet on MNIST to a given accuracy: Syncline beside DistributedDataParallel.

Here: real data, two workers with one thread each, and the same model, initial weights, batches, optimizer and schedule
on both sides; the seed changes from round to round and is the same for both. All workers together evaluate the model on
the test data at regular intervals. Measured is the time of the training steps up to the first evaluation that reaches
the target, on the slower worker. Not measured on either side: evaluation, data loading, model building and tuning. Not
here: throughput alone (`training.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed
from torch import nn

from syncline.comms.barrier import SharedBarrier
from syncline.comms.segment import ControlLayout, Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import host_store
from syncline.compute.allocator import keep_memory
from syncline.compute.partition import share as share_of
from syncline.config.run import RunConfig
from syncline.data.assignment import Position
from syncline.data.named import DataInfo, Split, named
from syncline.data.order import SampleOrder
from syncline.data.source import ArraySource
from syncline.errors import DataError, SynclineError
from syncline.lab.bench.child_process import LIMIT_S, child_process, join_gloo
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.models import zoo
from syncline.planning.machine import Machine
from syncline.planning.planner import make_plan
from syncline.task import Task
from syncline.telemetry.recorder import Recorder
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.session import Session

_WORKERS = 2
_BATCH = 128
_LR = 0.05
_BLOCK = 256
_HOST = "127.0.0.1"
_LIMIT_S = 1800.0
"""Maximum duration of one run."""
_WARM_UP_STEPS = 10
_GOAL = 0.5
"""Goal: half of DDP's time, at least twice as fast."""


@dataclass(frozen=True, kw_only=True)
class AccuracyWorkload:
    """The data, and the accuracies to reach."""

    folder: str
    """The folder with the data."""
    data: str = "mnist"
    targets: tuple[float, ...]
    """In ascending order; a run ends with the last one."""
    epochs: int = 4
    every: int = 50
    """Steps between evaluations."""
    train_samples: int | None = None
    """Fewer than available, for a quick bench."""
    test_samples: int | None = None

    @property
    def info(self) -> DataInfo:
        return named(self.data).info(Path(self.folder))

    def load(self, split: Split) -> ArraySource:
        count = self.train_samples if split == "train" else self.test_samples
        arrays = named(self.data).load(Path(self.folder), split)
        return ArraySource(*(array[:count] for array in arrays), scale=self.info.scale)


class Reached(NamedTuple):
    """The result of a run."""

    seconds: dict[float, float]
    """Training time up to each target reached; the key 1 has the total."""
    best: float
    steps: int


Pair = Callable[[int, int | None], Reached]
"""Called with a seed and, optionally, a maximum number of steps: a run of both workers."""


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite per target, all on the same runs."""
    try:
        folder = str(named("mnist").locate(None, None))
    except DataError as error:
        settings.say(f"The time to an accuracy on MNIST is not measured: the data is missing. {error}")
        return
    workload = AccuracyWorkload(folder=folder, targets=(0.985, 0.99))
    if settings.quick:
        # Such a short epoch ends between 96% and 97%.
        workload = AccuracyWorkload(
            folder=folder, targets=(0.95,), epochs=1, every=20, train_samples=19_200, test_samples=2_000
        )
    with ExitStack() as stack:
        attempts = {name: Attempts(stack.enter_context(pair(workload, method))) for name, method in METHODS.items()}
        for target in workload.targets:
            measured = {name: made.time_to(target) for name, made in attempts.items()}
            yield _suite(workload, target, measured, is_judged=target == workload.targets[-1] and not settings.quick)


class Attempts:
    """One contender's runs. Each runs once, with its own seed, and yields a time for each target."""

    def __init__(self, run: Pair) -> None:
        self._run = run
        self._made: list[Reached | Exception] = []

    def time_to(self, target: float) -> Callable[[], float]:
        """A measurement: the next run's time to `target`. The first one is the warm-up and does not count."""
        numbers = itertools.count()

        def measure() -> float:
            number = next(numbers)
            if number == len(self._made):
                self._made.append(self._another(number))
            found = self._made[number]
            if isinstance(found, Exception):
                raise found
            if number == 0:
                return found.seconds[1.0]
            if target not in found.seconds:
                raise SynclineError(f"The run reached {found.best:.2%} in {found.steps} steps, not {target:.1%}.")
            return found.seconds[target]

        return measure

    def _another(self, number: int) -> Reached | Exception:
        try:
            return self._run(number, None if number else _WARM_UP_STEPS)
        except Exception as error:
            return error


def _suite(
    workload: AccuracyWorkload, target: float, measured: dict[str, Callable[[], float]], *, is_judged: bool
) -> Suite:
    what = {
        "plain DDP": "DistributedDataParallel on gloo, as in PyTorch's tutorial.",
        "syncline": "syncline train with defaults: tuned convolutions and shared memory.",
    }
    return Suite(
        name=f"accuracy-{100 * target:g}",
        measures=f"Time to train LeNet on MNIST to a test accuracy of {target:.1%}: {_WORKERS} workers with one "
        f"thread each, global batch {_BATCH}, at most {workload.epochs} epoch{'s' * (workload.epochs > 1)}, evaluated "
        f"every {workload.every} steps; evaluation does not count.",
        unit="s",
        baseline="plain DDP",
        contenders=tuple(Contender(name=n, measure=m, what=what[n]) for n, m in measured.items()),
        goals=(Goal(contender="syncline", limit=_GOAL),) if is_judged else (),
    )


# Processes


@contextmanager
def pair(workload: AccuracyWorkload, method: _Method) -> Iterator[Pair]:
    """Two processes that train together, run after run."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(_WORKERS).total_bytes, "syncline-bench")
    with closing(store), tempfile.TemporaryDirectory(prefix="syncline-bench-") as cache, ExitStack() as stack:
        pipes = [
            stack.enter_context(child_process(_rank, workload, method, port, control.address, cache, rank))
            for rank in range(_WORKERS)
        ]

        def run(seed: int, most_steps: int | None) -> Reached:
            for pipe in pipes:
                pipe.send((seed, most_steps))
            reports = [_receive(pipe) for pipe in pipes]
            slowest = {target: max(one.seconds[target] for one in reports) for target in reports[0].seconds}
            return Reached(slowest, reports[0].best, reports[0].steps)

        try:
            yield run
        finally:
            # Release processes that wait for a failed one.
            SharedBarrier(control.memory, 0, rank=0, size=_WORKERS, spin_s=0.0, timeout_s=LIMIT_S).abort()
            control.close_descriptor()


def _receive(pipe: Connection) -> Reached:
    if not pipe.poll(_LIMIT_S):
        raise SynclineError(f"A run did not end within {_LIMIT_S:g} s.")
    report: Reached | str = pipe.recv()
    if isinstance(report, str):
        raise SynclineError(f"A bench process failed: {report}")
    return report


def _rank(
    pipe: Connection, workload: AccuracyWorkload, method: _Method, port: int, control: str, cache: str, rank: int
) -> None:
    torch.set_num_threads(1)
    without_compiler()  # faster startup, same training speed
    os.environ["XDG_CACHE_HOME"] = cache  # ignore what --tune cached in earlier runs
    collective = SharedMemory(Segment.attach(control), rank=rank, size=_WORKERS, timeout_s=_LIMIT_S)
    try:
        data = workload.load("train"), workload.load("test")
        with contextlib.suppress(EOFError):  # the parent closed the pipe: done
            while True:
                seed, most_steps = pipe.recv()
                clock = _TrainingClock(workload, collective, most_steps, should_stop=pipe.poll)
                with contextlib.suppress(_Done):
                    method(workload, data, seed, port, clock)
                pipe.send(clock.reached())
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent may have closed the pipe
            pipe.send(f"{type(error).__name__}: {error}")


class _Done(Exception):
    """The run has reached all targets, or its last step."""


class _TrainingClock:
    """Measures training time without evaluations, and keeps the accuracies reached."""

    def __init__(
        self,
        workload: AccuracyWorkload,
        collective: SharedMemory,
        most_steps: int | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._workload, self.collective = workload, collective
        self._most_steps, self._should_stop = most_steps, should_stop
        self._seconds: dict[float, float] = {}
        self._taken = self._since = self._best = 0.0
        self._steps = 0

    def start(self) -> None:
        """All workers start, or continue, at the same time."""
        self.collective.barrier()
        self._since = time.monotonic()

    def after_step(self, step: int, evaluate: Callable[[], float]) -> None:
        """Evaluate at regular intervals. `_Done` after the last target."""
        self._steps = step
        if self._should_stop():  # the pipe becomes readable when the parent closes it
            raise _Done
        if step != self._most_steps and step % self._workload.every:
            return
        self._taken += time.monotonic() - self._since
        if step == self._most_steps:
            raise _Done
        accuracy = evaluate()
        self._best = max(self._best, accuracy)
        for target in self._workload.targets:
            if accuracy >= target:
                self._seconds.setdefault(target, self._taken)
        if len(self._seconds) == len(self._workload.targets):
            raise _Done
        self.start()

    def reached(self) -> Reached:
        return Reached({**self._seconds, 1.0: self._taken}, self._best, self._steps)


_Data: TypeAlias = tuple[ArraySource, ArraySource]
_Method: TypeAlias = Callable[[AccuracyWorkload, _Data, int, int, _TrainingClock], None]


def _ddp(workload: AccuracyWorkload, data: _Data, seed: int, port: int, clock: _TrainingClock) -> None:
    from torch.nn.parallel import DistributedDataParallel

    rank, (source, test) = clock.collective.rank, data
    if not torch.distributed.is_initialized():
        join_gloo(port, rank, _WORKERS, _LIMIT_S)
    torch.manual_seed(seed)
    plain = zoo.build("lenet", workload.info.input_shape, workload.info.classes or 1)
    model = DistributedDataParallel(plain)
    # Optimizer and schedule of the model's card, which Syncline uses by default.
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = SampleOrder(seed=seed, count=len(source), batch=_BATCH)
    steps = workload.epochs * order.steps_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LR, total_steps=steps + 1)
    clock.start()
    for share in order.shares(Position(), rank=rank, size=_WORKERS, epochs=workload.epochs):
        inputs, targets = source.fetch(share.indices)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        loss.item()
        clock.after_step(share.after.step, lambda: _accuracy(plain, test, rank))


def _accuracy(model: nn.Module, test: ArraySource, rank: int) -> float:
    """Over all test samples; each worker evaluates its share."""
    model.eval()
    low, high = share_of(len(test), _WORKERS, rank)
    correct = torch.zeros(1)
    with torch.inference_mode():
        for start in range(low, high, _BLOCK):
            inputs, targets = test.fetch(range(start, min(start + _BLOCK, high)))
            correct += (model(inputs).argmax(1) == targets).sum()
    model.train()
    torch.distributed.all_reduce(correct)
    return float(correct) / len(test)


def _syncline(workload: AccuracyWorkload, data: _Data, seed: int, port: int, clock: _TrainingClock) -> None:
    del port
    keep_memory()
    train_data, test = data
    task = Task(model="lenet", data=train_data, test=test).with_defaults()
    config = RunConfig(workers=_WORKERS, batch=_BATCH, epochs=workload.epochs, seed=seed, threads=1, evaluate_every=0)
    plan = make_plan(task.facts(), config.replace(device="cpu"), Machine.here())
    recorder = _ClockedRecorder(clock)
    session = Session(plan, clock.collective.rank, recorder)
    session.collective, session.members = clock.collective, list(range(_WORKERS))
    recorder.job = job = Job(task, session)
    job.prepare()
    clock.start()
    train(job)


METHODS: dict[str, _Method] = {"plain DDP": _ddp, "syncline": _syncline}
"""By the name of the contender."""


class _ClockedRecorder(Recorder):
    """The worker's recorder; called after every step."""

    job: Job

    def __init__(self, clock: _TrainingClock) -> None:
        super().__init__(clock.collective.rank)
        self._clock = clock

    def step(self, position: Position, *details: Any) -> None:
        super().step(position, *details)
        self.drain()  # there is no telemetry thread that would
        self._clock.after_step(position.step, lambda: self._evaluated(position))

    def _evaluated(self, position: Position) -> float:
        self.job.evaluate(position)
        return self.job.metrics["test/accuracy"]
