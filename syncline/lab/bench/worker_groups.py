"""Groups of worker processes that train a model with one of several methods, and stay alive between measurements.

Here: `TrainingWorkload` (model and samples), `TrainingMethod` (Syncline, DDP, a hand-written loop), and `worker_group`:
single-threaded processes that train in blocks of steps. Between blocks they wait, so that groups with different methods
take turns without restarting. All methods use the same model, samples, batches and optimizer. Syncline's method is the
worker's own code (`Job` and `train`) on a `SharedMemory` collective, without the telemetry thread and checkpoints. Not
here: which methods are compared (`training.py`, `scaling.py`, `growth.py`).

The time of a block runs from a common start to the end of the slowest process.
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
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import nn

from syncline.comms.barrier import SharedBarrier
from syncline.comms.collective import Collective, Solo
from syncline.comms.segment import ControlLayout, Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.comms.store import host_store
from syncline.compute.allocator import keep_memory
from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.data.assignment import Position
from syncline.data.order import permutation
from syncline.errors import SynclineError
from syncline.lab.bench.child_process import child_process, join_gloo
from syncline.models import zoo
from syncline.planning.machine import Machine
from syncline.planning.planner import make_plan
from syncline.task import Task, sgd
from syncline.telemetry.recorder import Recorder
from syncline.workers.build import build_loss
from syncline.workers.job import Job
from syncline.workers.loop import train
from syncline.workers.quick_start import without_compiler
from syncline.workers.session import Session

_SEED = 0
_LR, _MOMENTUM = 0.01, 0.9
_HOST = "127.0.0.1"
_LIMIT_S = 300.0
"""Timeout of a block; a large model on a busy machine takes a while."""
_ENDLESS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """A model of the zoo, and random samples for it."""

    model: str
    shape: tuple[int, ...]
    """Shape of one sample."""
    batch: int
    """Samples per worker and step."""
    samples: int = 2048
    classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_model(self) -> nn.Module:
        """The same in every process."""
        torch.manual_seed(_SEED)
        return zoo.build(self.model, self.shape, self.classes, **self.options)

    def make_samples(self) -> tuple[torch.Tensor, ...]:
        """Inputs, and targets unless the model reconstructs its input; the same in every process."""
        generator = torch.Generator().manual_seed(_SEED)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        if zoo.card(self.model).target == "input":
            return (inputs,)
        return inputs, torch.randint(self.classes, (self.samples,), generator=generator)

    @property
    def loss(self) -> Spec:
        return Spec(zoo.card(self.model).loss)


@dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """How a worker group trains."""

    kind: Literal["by hand", "DDP", "syncline"]
    is_tuned: bool = False
    """By hand and DDP: channels last, a fused optimizer, and the options of DDP that make it faster."""
    is_in_step: bool = False
    """By hand: a barrier after every step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Syncline: settings that differ from the defaults."""


BY_HAND = TrainingMethod(kind="by hand")
BY_HAND_TUNED = TrainingMethod(kind="by hand", is_tuned=True)
BY_HAND_IN_STEP = TrainingMethod(kind="by hand", is_tuned=True, is_in_step=True)
PLAIN_DDP = TrainingMethod(kind="DDP")
TUNED_DDP = TrainingMethod(kind="DDP", is_tuned=True)
SAME_SETTINGS = TrainingMethod(
    kind="syncline",
    settings={"precision": "float32", "memory_format": "channels-last", "batch_norm": "local"},
)
"""Syncline with the settings of `BY_HAND_TUNED` and `TUNED_DDP`; it may choose the convolution algorithms."""
SAME_KERNELS = TrainingMethod(kind="syncline", settings={**SAME_SETTINGS.settings, "tune": "off"})
"""The same with torch's convolutions, so that only the exchange differs."""


class TimedBlock(NamedTuple):
    """The measurement of one block."""

    seconds: float
    samples: int
    loss: float
    """Mean over the processes at the last step; equal for equivalent methods."""
    peak_bytes: int
    """The largest peak memory of a process so far."""


WorkerGroup = Callable[[int, int], TimedBlock]
"""Called with a number of warm-up steps and a number of measured steps."""


@contextmanager
def worker_group(workload: TrainingWorkload, method: TrainingMethod, size: int) -> Iterator[WorkerGroup]:
    """`size` processes that train together; by hand, independently."""
    store, port = host_store(_HOST)
    control = Segment.create(ControlLayout(size).total_bytes, "syncline-bench")
    with closing(store), tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder, ExitStack() as stack:
        infos = [_ProcessInfo(rank, size, port, control.address, folder) for rank in range(size)]
        pipes = [stack.enter_context(child_process(_rank, workload, method, info)) for info in infos]

        def measure(warm_up: int, steps: int) -> TimedBlock:
            for pipe in pipes:
                pipe.send((warm_up, steps))
            reports = _receive_all(pipes)
            seconds = max(r.end for r in reports) - min(r.start for r in reports)
            loss = sum(r.loss for r in reports) / size
            return TimedBlock(seconds, size * workload.batch * steps, loss, max(r.peak_bytes for r in reports))

        try:
            yield measure
        finally:
            # Release processes that wait for a failed one.
            SharedBarrier(control.memory, 0, rank=0, size=size, spin_s=0.0, timeout_s=_LIMIT_S).abort()
            control.close_descriptor()


def _receive_all(pipes: Sequence[Connection]) -> list[_BlockReport]:
    """One report from each process. Raises as soon as one has failed, without waiting for the others."""
    reports: dict[Connection, _BlockReport] = {}
    while len(reports) < len(pipes):
        ready = [p for p in wait([p for p in pipes if p not in reports], _LIMIT_S) if isinstance(p, Connection)]
        if not ready:
            raise SynclineError(f"A bench process did not respond within {_LIMIT_S:g} s.")
        for pipe in ready:
            try:
                report = pipe.recv()
            except (EOFError, ConnectionError):
                raise SynclineError("A bench process crashed.") from None
            if isinstance(report, str):
                raise SynclineError(f"A bench process failed: {report}")
            reports[pipe] = report
    return list(reports.values())


def samples_per_second(measure: WorkerGroup, warm_up: int, steps: int) -> Callable[[], float]:
    """A contender's measurement: the throughput of all processes together."""

    def measured() -> float:
        block = measure(warm_up, steps)
        return block.samples / block.seconds

    return measured


# Inside a process


class _ProcessInfo(NamedTuple):
    rank: int
    size: int
    port: int
    control: str
    folder: str


class _BlockReport(NamedTuple):
    start: float
    end: float
    loss: float
    peak_bytes: int


def _rank(pipe: Connection, workload: TrainingWorkload, method: TrainingMethod, info: _ProcessInfo) -> None:
    torch.set_num_threads(1)
    without_compiler()  # faster startup, same training speed
    os.environ["XDG_CACHE_HOME"] = info.folder  # ignore what --tune cached in earlier runs
    collective: Collective = Solo()
    if info.size > 1:
        control = Segment.attach(info.control)
        collective = SharedMemory(control, rank=info.rank, size=info.size, timeout_s=_LIMIT_S)
    blocks = _Blocks(pipe, collective)
    loop = {"by hand": _by_hand, "DDP": _ddp, "syncline": _syncline}[method.kind]
    try:
        blocks.receive()  # before building or tuning, which would disturb the group being measured
        loop(workload, method, info, blocks)
    except EOFError:
        pass  # the parent closed the pipe: done
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent may have closed the pipe
            pipe.send(f"{type(error).__name__}: {error}")


class _Blocks:
    """Divides a loop into blocks: warm-up steps, measured steps, a pause until the next block is requested."""

    def __init__(self, pipe: Connection, collective: Collective) -> None:
        self._pipe, self.collective = pipe, collective
        self._warm_up = self._left = 0
        self._start = 0.0

    def receive(self) -> None:
        """Wait for the next request. `EOFError` after the last one."""
        self._warm_up, self._left = self._pipe.recv()

    def begin(self) -> None:
        """Everything is ready for the first step."""
        gc.collect()
        self._start_if_warm()

    def after_step(self, loss: float) -> None:
        if self._warm_up:
            self._warm_up -= 1
            self._start_if_warm()
            return
        self._left -= 1
        if self._left == 0:
            end = time.monotonic()  # the same clock in all processes of a host
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._pipe.send(_BlockReport(self._start, end, loss, peak_bytes))
            self.receive()
            self.begin()

    def _start_if_warm(self) -> None:
        if not self._warm_up:
            self.collective.barrier()
            self._start = time.monotonic()


def _by_hand(workload: TrainingWorkload, method: TrainingMethod, info: _ProcessInfo, blocks: _Blocks) -> None:
    model = _in_memory_format(workload.make_model(), method)
    _loop(model, workload, method, info, blocks)


def _ddp(workload: TrainingWorkload, method: TrainingMethod, info: _ProcessInfo, blocks: _Blocks) -> None:
    from torch.nn.parallel import DistributedDataParallel

    join_gloo(info.port, info.rank, info.size, _LIMIT_S)
    model = _in_memory_format(workload.make_model(), method)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=method.is_tuned, static_graph=method.is_tuned)
    _loop(replica, workload, method, info, blocks)


def _loop(
    model: nn.Module, workload: TrainingWorkload, method: TrainingMethod, info: _ProcessInfo, blocks: _Blocks
) -> None:
    """A hand-written training loop, endless."""
    fused = {"fused": True} if method.is_tuned else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, **fused)
    samples, loss_of = workload.make_samples(), build_loss(workload.loss)
    blocks.begin()
    for index in _shares(workload, info):
        batch = [values.index_select(0, index) for values in samples]
        inputs, targets = batch[0], batch[-1]
        if method.is_tuned and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        if method.is_in_step:
            blocks.collective.barrier()
        blocks.after_step(loss.item())


def _shares(workload: TrainingWorkload, info: _ProcessInfo) -> Iterator[torch.Tensor]:
    """This rank's share of each batch, the same as under Syncline."""
    batch, epoch = info.size * workload.batch, 0
    while True:
        order = torch.from_numpy(permutation(_SEED, epoch, workload.samples))
        for start in range(0, workload.samples - batch + 1, batch):
            yield order[start + info.rank * workload.batch :][: workload.batch]
        epoch += 1


def _in_memory_format(model: nn.Module, method: TrainingMethod) -> nn.Module:
    return model.to(memory_format=torch.channels_last) if method.is_tuned else model  # type: ignore[call-overload]


def _syncline(workload: TrainingWorkload, method: TrainingMethod, info: _ProcessInfo, blocks: _Blocks) -> None:
    """A worker of `syncline train`, without a coordinator."""
    keep_memory()
    task = Task(
        model=partial(zoo.build, workload.model, workload.shape, workload.classes, **workload.options),
        data=workload.make_samples(),
        loss=workload.loss,
        optimizer=sgd(lr=_LR, momentum=_MOMENTUM),
        metrics=(),
    )
    config = RunConfig(
        workers=info.size, batch=info.size * workload.batch, epochs=_ENDLESS, seed=_SEED, threads=1, evaluate_every=0,
        **method.settings,
    )  # fmt: skip
    plan = make_plan(task.facts(), config.replace(device="cpu"), Machine.here())
    session = Session(plan, info.rank, _InBlocks(info.rank, blocks))
    session.collective, session.members = blocks.collective, list(range(info.size))
    job = Job(task.with_defaults(), session)
    job.prepare()
    blocks.begin()
    train(job)


class _InBlocks(Recorder):
    """The worker's recorder; called after every step."""

    def __init__(self, rank: int, blocks: _Blocks) -> None:
        super().__init__(rank)
        self._blocks = blocks

    def step(self, position: Position, samples: int, batch: int, loss: float | None, *details: Any) -> None:
        super().step(position, samples, batch, loss, *details)
        self.drain()  # there is no telemetry thread that would
        self._blocks.after_step(math.nan if loss is None else loss)
