"""Processes that train a model in one of several ways, and stay alive between measurements.

Here: `Work` (what is trained), `Way` (how), and `crew`: so many processes, one thread each, that train block by block.
Between two blocks they wait, so that crews that train in different ways can take turns without starting again. All ways
have the same model, samples, batches and optimiser. Syncline's is the worker's own code (`Job` and `train`) with a
`SharedMemory` collective; not there: the thread that sends telemetry to the driver, and checkpoints. Not here: who is
compared with whom (`training.py`, `scaling.py`, `growth.py`).

A block's time is from a common start to the end of the slowest process.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import nn

from syncline import zoo
from syncline.bench.piped import piped
from syncline.comms.barrier import SharedBarrier
from syncline.comms.collective import Collective, Solo
from syncline.comms.layout import ControlLayout
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import connect_store, host_store
from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.data.order import Position, permutation
from syncline.errors import SynclineError
from syncline.plan.machine import Machine
from syncline.plan.planner import make_plan
from syncline.task import Task, sgd
from syncline.telemetry.recorder import Recorder
from syncline.workers.allocator import keep_memory
from syncline.workers.build import build_loss
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.runtime import Runtime

__all__ = [
    "BY_HAND", "BY_HAND_IN_STEP", "BY_HAND_TUNED", "PLAIN_DDP", "SAME_KERNELS", "SAME_SETTINGS", "TUNED_DDP", "Block",
    "Crew", "Way", "Work", "crew", "samples_a_second",
]  # fmt: skip

_SEED = 0
_LR, _MOMENTUM = 0.01, 0.9
_HOST = "127.0.0.1"
_LIMIT_S = 300.0
"""How long a block is waited for: a large model on a busy machine takes a while."""
_ENDLESS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model of the zoo and random samples for it."""

    model: str
    shape: tuple[int, ...]
    """Of one sample."""
    batch: int
    """Samples of one worker in one step."""
    samples: int = 2048
    classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_model(self) -> nn.Module:
        """The same in every process."""
        torch.manual_seed(_SEED)
        return zoo.build(self.model, self.shape, self.classes, **self.options)

    def make_samples(self) -> tuple[torch.Tensor, ...]:
        """Inputs, and targets unless the model is to give back its input; the same in every process."""
        generator = torch.Generator().manual_seed(_SEED)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        if zoo.card(self.model).target == "input":
            return (inputs,)
        return inputs, torch.randint(self.classes, (self.samples,), generator=generator)

    @property
    def loss(self) -> Spec:
        """The model's own."""
        return Spec(zoo.card(self.model).loss)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a crew trains."""

    kind: Literal["by hand", "DDP", "syncline"]
    is_tuned: bool = False
    """By hand and DDP: channels last, a fused optimiser, and the options of DDP that make it faster."""
    is_in_step: bool = False
    """By hand: nobody begins a step before all have done the last one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Syncline: those that are not left at their defaults."""


BY_HAND = Way(kind="by hand")
BY_HAND_TUNED = Way(kind="by hand", is_tuned=True)
BY_HAND_IN_STEP = Way(kind="by hand", is_tuned=True, is_in_step=True)
PLAIN_DDP = Way(kind="DDP")
TUNED_DDP = Way(kind="DDP", is_tuned=True)
SAME_SETTINGS = Way(
    kind="syncline",
    settings={"precision": "float32", "memory_format": "channels-last", "batch_norm": "local"},
)
"""What `BY_HAND_TUNED` and `TUNED_DDP` do, done by Syncline; it may choose how convolutions are computed."""
SAME_KERNELS = Way(kind="syncline", settings={**SAME_SETTINGS.settings, "tune": "off"})
"""The same with torch's convolutions: what is left is how workers exchange."""


class Block(NamedTuple):
    """What a crew did."""

    seconds: float
    samples: int
    loss: float
    """Of the last step, over all processes: ways that do the same have the same."""
    peak_bytes: int
    """The most memory that one of the processes has had so far."""


Crew = Callable[[int, int], Block]
"""Called with so many steps to warm up and so many that are measured."""


@contextmanager
def crew(work: Work, way: Way, size: int) -> Iterator[Crew]:
    """`size` processes that train together; by hand, each for itself."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(size).total_bytes, "syncline-bench")
    with closing(store), tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder, ExitStack() as stack:
        places = [_Place(rank, size, port, control.address, folder) for rank in range(size)]
        pipes = [stack.enter_context(piped(_rank, work, way, place)) for place in places]

        def measure(warm_up: int, steps: int) -> Block:
            for pipe in pipes:
                pipe.send((warm_up, steps))
            heard = _hear_all(pipes)
            seconds = max(told.end for told in heard) - min(told.start for told in heard)
            loss = sum(told.loss for told in heard) / size
            return Block(seconds, size * work.batch * steps, loss, max(told.peak_bytes for told in heard))

        try:
            yield measure
        finally:
            # Who waits for one that is gone need not wait any longer.
            SharedBarrier(control.memory, 0, rank=0, size=size, spin_s=0.0, timeout_s=_LIMIT_S).abort()
            control.close_descriptor()


def _hear_all(pipes: Sequence[Connection]) -> list[_Told]:
    """What all of them tell. When one is gone, or complains, the others are not waited for."""
    told: dict[Connection, _Told] = {}
    while len(told) < len(pipes):
        ready = [p for p in wait([p for p in pipes if p not in told], _LIMIT_S) if isinstance(p, Connection)]
        if not ready:
            raise SynclineError(f"A process of the bench gave no answer within {_LIMIT_S:g} s.")
        for pipe in ready:
            try:
                heard = pipe.recv()
            except (EOFError, ConnectionError):
                raise SynclineError("A process of the bench has crashed.") from None
            if isinstance(heard, str):
                raise SynclineError(f"In a process of the bench: {heard}")
            told[pipe] = heard
    return list(told.values())


def samples_a_second(measure: Crew, warm_up: int, steps: int) -> Callable[[], float]:
    """A contender's measurement: the speed of all processes together."""

    def measured() -> float:
        block = measure(warm_up, steps)
        return block.samples / block.seconds

    return measured


# Inside a process


class _Place(NamedTuple):
    rank: int
    size: int
    port: int
    control: str
    folder: str


class _Told(NamedTuple):
    start: float
    end: float
    loss: float
    peak_bytes: int


def _rank(pipe: Connection, work: Work, way: Way, place: _Place) -> None:
    torch.set_num_threads(1)
    without_compiler()  # they start faster without it, and train as fast
    os.environ["XDG_CACHE_HOME"] = place.folder  # what --tune found in earlier runs is not for here
    collective: Collective = Solo()
    if place.size > 1:
        control = Segment.attach(place.control)
        collective = SharedMemory(control, rank=place.rank, size=place.size, timeout_s=_LIMIT_S)
    blocks = _Blocks(pipe, collective)
    loop = {"by hand": _by_hand, "DDP": _ddp, "syncline": _syncline}[way.kind]
    try:
        blocks.hear()  # first: nobody builds, or finds out what is fastest, while others are measured
        loop(work, way, place, blocks)
    except EOFError:
        pass  # the other end of the pipe is closed: it was enough
    except Exception as error:
        with contextlib.suppress(OSError):  # perhaps nobody listens any more
            pipe.send(f"{type(error).__name__}: {error}")


class _Blocks:
    """Divides a loop into blocks: steps to warm up, steps that are measured, a pause until more are wanted."""

    def __init__(self, pipe: Connection, collective: Collective) -> None:
        self._pipe, self.collective = pipe, collective
        self._warm_up = self._left = 0
        self._start = 0.0

    def hear(self) -> None:
        """Wait until steps are wanted. `EOFError` if no more will be."""
        self._warm_up, self._left = self._pipe.recv()

    def begin(self) -> None:
        """All is ready for the first step."""
        gc.collect()
        self._start_if_warm()

    def after_step(self, loss: float) -> None:
        """A step is done."""
        if self._warm_up:
            self._warm_up -= 1
            self._start_if_warm()
            return
        self._left -= 1
        if self._left == 0:
            end = time.monotonic()  # one clock for all processes of a host
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._pipe.send(_Told(self._start, end, loss, peak_bytes))
            self.hear()
            self.begin()

    def _start_if_warm(self) -> None:
        if not self._warm_up:
            self.collective.barrier()
            self._start = time.monotonic()


def _by_hand(work: Work, way: Way, place: _Place, blocks: _Blocks) -> None:
    """Every process for itself."""
    model = _in_memory_format(work.make_model(), way)
    _loop(model, work, way, place, blocks)


def _ddp(work: Work, way: Way, place: _Place, blocks: _Blocks) -> None:
    from torch.nn.parallel import DistributedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = connect_store(_HOST, place.port, "bench", _LIMIT_S)
    limit = timedelta(seconds=_LIMIT_S)
    torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=limit)
    model = _in_memory_format(work.make_model(), way)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=way.is_tuned, static_graph=way.is_tuned)
    _loop(replica, work, way, place, blocks)


def _loop(model: nn.Module, work: Work, way: Way, place: _Place, blocks: _Blocks) -> None:
    """The loop that people write, without end."""
    fused = {"fused": True} if way.is_tuned else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, **fused)
    samples, loss_of = work.make_samples(), build_loss(work.loss)
    blocks.begin()
    for index in _shares(work, place):
        batch = [values.index_select(0, index) for values in samples]
        inputs, targets = batch[0], batch[-1]
        if way.is_tuned and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        if way.is_in_step:
            blocks.collective.barrier()
        blocks.after_step(loss.item())


def _shares(work: Work, place: _Place) -> Iterator[torch.Tensor]:
    """This rank's part of each batch, the same as under Syncline."""
    batch, epoch = place.size * work.batch, 0
    while True:
        order = torch.from_numpy(permutation(_SEED, epoch, work.samples))
        for start in range(0, work.samples - batch + 1, batch):
            yield order[start + place.rank * work.batch :][: work.batch]
        epoch += 1


def _in_memory_format(model: nn.Module, way: Way) -> nn.Module:
    return model.to(memory_format=torch.channels_last) if way.is_tuned else model  # type: ignore[call-overload]


def _syncline(work: Work, way: Way, place: _Place, blocks: _Blocks) -> None:
    """What a worker of `syncline train` does, without a coordinator."""
    keep_memory()
    task = Task(
        model=partial(zoo.build, work.model, work.shape, work.classes, **work.options),
        data=work.make_samples(),
        loss=work.loss,
        optimizer=sgd(lr=_LR, momentum=_MOMENTUM),
        metrics=(),
    )
    config = RunConfig(
        workers=place.size, batch=place.size * work.batch, epochs=_ENDLESS, seed=_SEED, threads=1, evaluate_every=0,
        **way.settings,
    )  # fmt: skip
    plan = make_plan(task.facts(), config, Machine.here(), "cpu")
    runtime = Runtime(plan, place.rank, _InBlocks(place.rank, blocks))
    runtime.collective, runtime.members = blocks.collective, list(range(place.size))
    job = Job(task.with_defaults(), runtime)
    job.enter_view()
    blocks.begin()
    train(job)


class _InBlocks(Recorder):
    """The worker's recorder. It hears of every step when all of it is done."""

    def __init__(self, rank: int, blocks: _Blocks) -> None:
        super().__init__(rank)
        self._blocks = blocks

    def step(self, position: Position, samples: int, batch: int, loss: float | None, *details: Any) -> None:
        super().step(position, samples, batch, loss, *details)
        self.drain()  # nobody else does, and the events would pile up
        self._blocks.after_step(math.nan if loss is None else loss)
