"""How long it takes to train LeNet on MNIST to a given accuracy: Syncline, against DistributedDataParallel.

Here: real data, two workers with one thread each, and the same model, weights to start from, batches, optimiser and
schedule on both sides; the seed is another one in each round, and the same for both. Every so many steps all workers
together evaluate the model on the test data. What counts is the time of the training steps up to the first evaluation
that is good enough, on the slower of the two workers. Not in it, on either side: evaluating, loading the data,
building, and finding out what is fastest here. Not here: speed alone (`training.py`).
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
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed
from torch import nn

from syncline import zoo
from syncline.algorithms.partition import share as share_of
from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.piped import LIMIT_S, piped
from syncline.comms.barrier import SharedBarrier
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import connect_store, host_store
from syncline.config.run import RunConfig
from syncline.data.named import DataInfo, Split, named
from syncline.data.order import Position, SampleOrder
from syncline.data.source import ArraySource
from syncline.errors import DataError, SynclineError
from syncline.plan.machine import Machine
from syncline.plan.planner import make_plan
from syncline.task import Task
from syncline.telemetry.recorder import Recorder
from syncline.workers.allocator import keep_memory
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.runtime import Runtime

__all__ = ["WAYS", "Heats", "Race", "Reached", "pair", "suites"]

_WORKERS = 2
_BATCH = 128
_LR = 0.05
_BLOCK = 256
_HOST = "127.0.0.1"
_LIMIT_S = 1800.0
"""How long one run may take."""
_WARM_UP_STEPS = 10
_GOAL = 0.5
"""Of the time that DDP takes: at least twice as fast."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """What is trained, and to which accuracies."""

    folder: str
    """Where the data is."""
    data: str = "mnist"
    targets: tuple[float, ...]
    """In ascending order; a run ends with the last one."""
    epochs: int = 4
    every: int = 50
    """So many steps from one evaluation to the next."""
    train_samples: int | None = None
    """Fewer than there are, for a first look."""
    test_samples: int | None = None

    @property
    def info(self) -> DataInfo:
        """What a model needs to know of the data."""
        return named(self.data).info(Path(self.folder))

    def load(self, split: Split) -> ArraySource:
        """Training or test data."""
        count = self.train_samples if split == "train" else self.test_samples
        arrays = named(self.data).load(Path(self.folder), split)
        return ArraySource(*(array[:count] for array in arrays), scale=self.info.scale)


class Reached(NamedTuple):
    """What a run came to."""

    seconds: dict[float, float]
    """Those of the training steps up to each target that was reached, and up to the end under 1."""
    best: float
    steps: int


Pair = Callable[[int, int | None], Reached]
"""Called with a seed, and with a number of steps if the run is to end after so many: a run of both workers."""


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """One suite for each target, all about the same runs."""
    try:
        folder = str(named("mnist").locate(None, None))
    except DataError as error:
        settings.say(f"The time to an accuracy on MNIST is not measured, because the data is not here. {error}")
        return
    race = Race(folder=folder, targets=(0.985, 0.99))
    if settings.quick:
        # An epoch as short as this ends between 96% and 97%.
        race = Race(folder=folder, targets=(0.95,), epochs=1, every=20, train_samples=19_200, test_samples=2_000)
    with ExitStack() as stack:
        heats = {name: Heats(stack.enter_context(pair(race, way)), race) for name, way in WAYS.items()}
        for target in race.targets:
            measured = {name: made.time_to(target) for name, made in heats.items()}
            yield _suite(race, target, measured, is_judged=target == race.targets[-1] and not settings.quick)


class Heats:
    """One contender's runs: each is made once, with a seed of its own, and looked at once for each target."""

    def __init__(self, run: Pair, race: Race) -> None:
        self._run, self._race = run, race
        self._made: list[Reached | Exception] = []

    def time_to(self, target: float) -> Callable[[], float]:
        """A measurement: the next run's time to `target`. The first one is the warm-up, of which nothing is made."""
        heats = itertools.count()

        def measure() -> float:
            number = next(heats)
            if number == len(self._made):
                self._made.append(self._another(number))
            found = self._made[number]
            if isinstance(found, Exception):
                raise found
            if number == 0:
                return found.seconds[1.0]
            if target not in found.seconds:
                raise SynclineError(f"It came to {found.best:.2%} in {found.steps} steps, and not to {target:.1%}.")
            return found.seconds[target]

        return measure

    def _another(self, number: int) -> Reached | Exception:
        try:
            return self._run(number, None if number else _WARM_UP_STEPS)
        except Exception as error:
            return error


def _suite(race: Race, target: float, measured: dict[str, Callable[[], float]], *, is_judged: bool) -> Suite:
    what = {
        "plain DDP": "DistributedDataParallel on gloo as the tutorial writes it.",
        "syncline": "syncline train as it is: what --tune finds, and shared memory.",
    }
    return Suite(
        name=f"accuracy-{100 * target:g}",
        measures=f"Time of training LeNet on MNIST to a test accuracy of {target:.1%}: {_WORKERS} workers with one "
        f"thread each, a batch of {_BATCH} over both, {race.epochs} epoch{'s' * (race.epochs > 1)} at most, evaluated "
        f"every {race.every} steps, which does not count.",
        unit="s",
        baseline="plain DDP",
        contenders=tuple(Contender(name=n, measure=m, what=what[n]) for n, m in measured.items()),
        goals=(Goal(contender="syncline", limit=_GOAL),) if is_judged else (),
    )


# Processes


@contextmanager
def pair(race: Race, way: _Way) -> Iterator[Pair]:
    """Two processes that train together, run after run."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(_WORKERS).total_bytes, "syncline-bench")
    with closing(store), tempfile.TemporaryDirectory(prefix="syncline-bench-") as cache, ExitStack() as stack:
        pipes = [
            stack.enter_context(piped(_rank, race, way, port, control.address, cache, rank)) for rank in range(_WORKERS)
        ]

        def run(seed: int, most_steps: int | None) -> Reached:
            for pipe in pipes:
                pipe.send((seed, most_steps))
            told = [_hear(pipe) for pipe in pipes]
            slowest = {target: max(one.seconds[target] for one in told) for target in told[0].seconds}
            return Reached(slowest, told[0].best, told[0].steps)

        try:
            yield run
        finally:
            # Who waits for one that is gone need not wait any longer.
            SharedBarrier(control.memory, 0, rank=0, size=_WORKERS, spin_s=0.0, timeout_s=LIMIT_S).abort()
            control.close_descriptor()


def _hear(pipe: Connection) -> Reached:
    if not pipe.poll(_LIMIT_S):
        raise SynclineError(f"A run was not over within {_LIMIT_S:g} s.")
    heard = pipe.recv()
    if isinstance(heard, str):
        raise SynclineError(f"In a process of the bench: {heard}")
    reached: Reached = heard
    return reached


def _rank(pipe: Connection, race: Race, way: _Way, port: int, control: str, cache: str, rank: int) -> None:
    torch.set_num_threads(1)
    without_compiler()  # they start faster without it, and train as fast
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["XDG_CACHE_HOME"] = cache  # what --tune found in earlier runs is not for here
    collective = SharedMemory(Segment.attach(control), rank=rank, size=_WORKERS, timeout_s=_LIMIT_S)
    try:
        data = race.load("train"), race.load("test")
        with contextlib.suppress(EOFError):  # the other end of the pipe is closed: it was enough
            while True:
                seed, most_steps = pipe.recv()
                progress = _Progress(race, collective, most_steps, should_stop=pipe.poll)
                with contextlib.suppress(_Over):
                    way(race, data, seed, port, progress)
                pipe.send(progress.reached())
    except Exception as error:
        with contextlib.suppress(OSError):  # perhaps nobody listens any more
            pipe.send(f"{type(error).__name__}: {error}")


class _Over(Exception):
    """There is nothing more to be learned from this run."""


class _Progress:
    """A clock that stands still while a run is evaluated, and what the evaluations found."""

    def __init__(
        self, race: Race, collective: SharedMemory, most_steps: int | None, should_stop: Callable[[], bool]
    ) -> None:
        self._race, self.collective = race, collective
        self._most_steps, self._should_stop = most_steps, should_stop
        self._seconds: dict[float, float] = {}
        self._taken = self._since = self._best = 0.0
        self._steps = 0

    def go(self) -> None:
        """All begin, or go on, at the same time."""
        self.collective.barrier()
        self._since = time.monotonic()

    def after_step(self, step: int, evaluate: Callable[[], float]) -> None:
        """Evaluate if it is time. `_Over` if it was enough."""
        self._steps = step
        if self._should_stop():  # the pipe can be read when its other end is gone: nobody writes to it now
            raise _Over
        if step != self._most_steps and step % self._race.every:
            return
        self._taken += time.monotonic() - self._since
        if step == self._most_steps:
            raise _Over
        accuracy = evaluate()
        self._best = max(self._best, accuracy)
        for target in self._race.targets:
            if accuracy >= target:
                self._seconds.setdefault(target, self._taken)
        if len(self._seconds) == len(self._race.targets):
            raise _Over
        self.go()

    def reached(self) -> Reached:
        """What the run came to."""
        return Reached({**self._seconds, 1.0: self._taken}, self._best, self._steps)


_Data: TypeAlias = tuple[ArraySource, ArraySource]
_Way: TypeAlias = Callable[[Race, _Data, int, int, _Progress], None]


def _ddp(race: Race, data: _Data, seed: int, port: int, progress: _Progress) -> None:
    from torch.nn.parallel import DistributedDataParallel

    rank, (source, test) = progress.collective.rank, data
    if not torch.distributed.is_initialized():
        store, limit = connect_store(_HOST, port, "bench", _LIMIT_S), timedelta(seconds=_LIMIT_S)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=_WORKERS, timeout=limit)
    torch.manual_seed(seed)
    plain = zoo.build("lenet", race.info.input_shape, race.info.classes or 1)
    model = DistributedDataParallel(plain)
    # Optimiser and schedule are those of the model's card, which Syncline takes by itself.
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = SampleOrder(seed=seed, count=len(source), batch=_BATCH)
    steps = race.epochs * order.steps_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LR, total_steps=steps + 1)
    progress.go()
    for share in order.shares(Position(), rank=rank, size=_WORKERS, epochs=race.epochs):
        inputs, targets = source.fetch(share.indices)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        loss.item()
        progress.after_step(share.after.step, lambda: _accuracy(plain, test, rank))


def _accuracy(model: nn.Module, test: ArraySource, rank: int) -> float:
    """Over all test samples, of which each worker takes its part."""
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


def _syncline(race: Race, data: _Data, seed: int, port: int, progress: _Progress) -> None:
    del port
    keep_memory()
    train_data, test = data
    task = Task(model="lenet", data=train_data, test=test).with_defaults()
    config = RunConfig(workers=_WORKERS, batch=_BATCH, epochs=race.epochs, seed=seed, threads=1, evaluate_every=0)
    plan = make_plan(task.facts(), config, Machine.here(), "cpu")
    recorder = _Watched(progress)
    runtime = Runtime(plan, progress.collective.rank, recorder)
    runtime.collective, runtime.members = progress.collective, list(range(_WORKERS))
    recorder.job = job = Job(task, runtime)
    job.enter_view()
    progress.go()
    train(job)


WAYS: dict[str, _Way] = {"plain DDP": _ddp, "syncline": _syncline}
"""How a run is made, by the name of the contender."""


class _Watched(Recorder):
    """The worker's recorder. It hears of every step when all of it is done."""

    job: Job

    def __init__(self, progress: _Progress) -> None:
        super().__init__(progress.collective.rank)
        self._progress = progress

    def step(self, position: Position, *details: Any) -> None:
        super().step(position, *details)
        self.drain()  # nobody else does, and the events would pile up
        self._progress.after_step(position.step, lambda: self._evaluated(position))

    def _evaluated(self, position: Position) -> float:
        self.job.evaluate(position)
        return self.job.metrics["test/accuracy"]
