"""Short trainings with workers as threads, for trying out and testing strategies.

Here: `train_on_threads`, which trains a small model under any strategy with the very step, meeting and exchange code of
real runs (`workers/update.py`, `strategies/`), only that workers, and parameter servers, are threads of this process.
Not here: what a strategy must promise (`strategy_contract.py`).

    trial = train_on_threads("sparknet(tau=5)", workers=3, steps=20)
    assert trial.is_equal_everywhere
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.data.assignment import Position
from syncline.data.order import SampleOrder
from syncline.strategies.brackets import Contested
from syncline.strategies.exchange import Exchange, NoLog, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.method import Method
from syncline.strategies.reading import read_strategy
from syncline.strategies.switching import AnyStrategy
from syncline.telemetry.recorder import Recorder
from syncline.testing.threads import run_on_threads, servers_on_threads
from syncline.workers.update import PIGGYBACKED_COUNT, Updater

__all__ = ["Problem", "RecordingLog", "Trial", "linear_problem", "train_on_threads"]

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Problem:
    """Something to train: a model, how it is optimized, and samples."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    inputs: torch.Tensor
    targets: torch.Tensor
    batch: int
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.mse_loss


def linear_problem(
    *, samples: int = 64, features: int = 6, batch: int = 16, lr: float = 0.05, momentum: float = 0.0, seed: int = 0
) -> Problem:
    """Linear regression without noise: strategies that work come close to a loss of zero."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    truth = torch.randn(features, 2, generator=generator)

    def make_model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            return nn.Sequential(nn.Linear(features, 5), nn.Linear(5, 2))

    return Problem(make_model, lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum), inputs, inputs @ truth, batch)


class RecordingLog(NoLog):
    """A `StrategyLog` that remembers."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.bytes_received = 0
        self.disagreements: list[float] = []
        self.staleness: dict[int, int] = {}
        self.contests: list[dict[str, Any]] = []
        self.switches: list[tuple[int, str]] = []
        self.counters: list[Callable[[], int]] = []

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: Mapping[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None:
        self.exchanges += 1
        self.bytes_received += bytes_received
        if disagreement is not None:
            self.disagreements.append(disagreement)
        for value, count in (staleness or {}).items():
            self.staleness[value] = self.staleness.get(value, 0) + count

    def read_old(self, steps: int) -> None:
        self.staleness[steps] = self.staleness.get(steps, 0) + 1

    def contest(self, met: Contested) -> None:
        self.contests.append(asdict(met))

    def switched(self, step: int, strategy: str) -> None:
        self.switches.append((step, strategy))

    def count_bytes(self, counter: Callable[[], int]) -> None:
        self.counters.append(counter)

    @property
    def bytes_sent(self) -> int:
        """What all counters say together."""
        return sum(counter() for counter in self.counters)

    def wants_disagreement(self) -> bool:
        """Always, so that this path is tried, too."""
        return True


@dataclass
class Trial:
    """The result of a training: by rank, the shared model at the end, and what was logged."""

    shared: list[torch.Tensor] = field(default_factory=list)
    """The parameters inside `Exchange.shared`, at the end."""
    own: list[torch.Tensor] = field(default_factory=list)
    """The parameters outside of it."""
    losses: list[float] = field(default_factory=list)
    """The shared model's loss on all samples."""
    steps: list[int] = field(default_factory=list)
    """How many steps each worker has done."""
    states: list[dict[str, Any] | None] = field(default_factory=list)
    """Each worker's private state at the end."""
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    """The shared model's state."""
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    logs: list[RecordingLog] = field(default_factory=list)
    saved: Trial | None = None
    """How things stood when they were saved on the way, if they were."""
    was_asynchronous: bool = False
    """Whether, at least for a time, each worker went at its own pace."""

    @property
    def is_equal_everywhere(self) -> bool:
        """Whether all workers had the same shared model, bit by bit."""
        return all(torch.equal(self.shared[0], other) for other in self.shared[1:])


class _Board:
    """Requests to stop and calls for meetings, shared by workers that are threads."""

    def __init__(self, stop: Mapping[int, int]) -> None:
        self.stop = stop
        self.called = -1
        self.steps: dict[int, int] = {}


class _Requests:
    def __init__(self, board: _Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def stop_requested(self) -> bool:
        return self._rank in self._board.stop and self._board.steps.get(self._rank, 0) >= self._board.stop[self._rank]

    def save_requested(self) -> bool:
        return False

    def call_meeting(self, number: int) -> None:
        self._board.called = max(self._board.called, number)

    def meeting_called(self, number: int) -> bool:
        return self._board.called >= number


def train_on_threads(
    strategy: AnyStrategy | str,
    workers: int,
    *,
    steps: int,
    problem: Problem | None = None,
    seed: int = 0,
    stop: Mapping[int, int] | None = None,
    before_step: Callable[[int, int], None] | None = None,
    start: Trial | None = None,
    save: int | None = None,
    clip_norm: float | None = None,
) -> Trial:
    """Train for `steps` steps, or until all have agreed to stop.

    `stop` maps a rank to the step after which it requests to stop; `before_step(rank, step)` is called first thing in
    each step, to slow a worker down, say; `start` resumes from an earlier trial's end. After `save` steps, counted from
    the very first, the state is saved as a checkpoint would, for `start` later, and the training continues.
    """
    strategy = read_strategy(strategy) if isinstance(strategy, str) else strategy
    method = strategy.method  # made once: threads that all load a user's file at the same time would see half of it
    problem = problem or linear_problem()
    board = _Board(stop or {})
    trial = Trial(logs=[RecordingLog() for _ in range(workers)])
    # Here and not in the threads: they would draw from one stream of random numbers, in any order.
    models = [problem.make_model() for _ in range(workers)]
    with _servers(method.servers, workers) as open_servers:
        worker = _Worker(
            method, problem, models, steps, seed, board, before_step, start, save, clip_norm, open_servers, trial.logs
        )
        runs = run_on_threads(workers, worker.run, timeout_s=_TIMEOUT_S)
    _fill(trial, [run.end for run in runs])
    trial.was_asynchronous = any(run.was_asynchronous for run in runs)
    if save is not None and all(run.saved is not None for run in runs):
        trial.saved = _fill(Trial(logs=trial.logs), [run.saved for run in runs if run.saved is not None])
    return trial


@dataclass(frozen=True)
class _Snapshot:
    """How things stand with one worker."""

    shared: torch.Tensor
    own: torch.Tensor
    loss: float
    steps: int
    state: dict[str, Any] | None
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


@dataclass
class _Run:
    """What became of one worker."""

    end: _Snapshot
    saved: _Snapshot | None
    was_asynchronous: bool


def _fill(trial: Trial, snapshots: list[_Snapshot]) -> Trial:
    trial.shared = [each.shared for each in snapshots]
    trial.own = [each.own for each in snapshots]
    trial.losses = [each.loss for each in snapshots]
    trial.steps = [each.steps for each in snapshots]
    trial.states = [each.state for each in snapshots]
    trial.optimizers = [each.optimizer for each in snapshots]
    trial.model = snapshots[0].model
    return trial


@dataclass(frozen=True)
class _Worker:
    method: Method
    problem: Problem
    models: list[nn.Module]
    steps: int
    seed: int
    board: _Board
    before_step: Callable[[int, int], None] | None
    start: Trial | None
    save: int | None
    clip_norm: float | None
    open_servers: Callable[[int], Any] | None
    logs: list[RecordingLog]

    def run(self, collective: Collective) -> _Run:
        rank, problem = collective.rank, self.problem
        order = SampleOrder(seed=self.seed, count=len(problem.inputs), batch=problem.batch)
        model = self.models[rank]
        optimizer = problem.make_optimizer(model.parameters())
        position = Position()
        if self.start is not None:
            model.load_state_dict(self.start.model)
            # A copy: torch takes the tensors as they are, and threads would step with the same ones.
            optimizer.load_state_dict(copy.deepcopy(self.start.optimizers[0]))
            for _ in range(self.start.steps[0]):
                position = position.after(min(problem.batch, order.count - position.cursor), order.count)
        gradients = GradientBuffer(model.parameters(), collective, PIGGYBACKED_COUNT, is_flat=True)
        log = self.logs[rank]
        log.count_bytes(lambda: collective.bytes_sent)
        replica = Replica(
            model,
            optimizer,
            gradients,
            collective,
            seed=self.seed,
            step=position.step,
            steps_per_epoch=order.steps_per_epoch,
            clip_norm=self.clip_norm,
            score=lambda: (self._loss(model, slice(rank, None, collective.size)), 0.0),
            log=log,
        )
        if self.open_servers is not None:
            open_servers = self.open_servers
            replica = replace(replica, open_servers=lambda: open_servers(rank))
        exchange = self.method.exchange(replica)
        exchange.begin()
        if self.start is not None:
            saved = self.start.states[rank]
            if saved is not None:
                exchange.load_private_state(copy.deepcopy(saved))
            collective.barrier()
        update = Updater(
            replica, exchange, Recorder(rank), requests=_Requests(self.board, rank), clip_norm=self.clip_norm
        )
        with closing(exchange):
            return self._train(replica, exchange, update, order, position)

    def _train(
        self, replica: Replica, exchange: Exchange, update: Updater, order: SampleOrder, start: Position
    ) -> _Run:
        rank, size = replica.collective.rank, replica.collective.size
        done = start.step
        saved: _Snapshot | None = None
        was_asynchronous = exchange.is_asynchronous
        for share in order.shares(start, rank=rank, size=size):
            if self.before_step is not None:
                self.before_step(rank, share.position.step)
            exchange.before_forward()
            replica.gradients.zero_()
            loss = 0.0
            if len(share.indices):
                index = torch.from_numpy(share.indices)
                value = self.problem.loss(replica.model(self.problem.inputs[index]), self.problem.targets[index])
                value.backward()  # type: ignore[no-untyped-call]  # torch's own
                loss = float(value.detach())
            after = share.position.after(share.batch, order.count)
            is_last = after.step == start.step + self.steps
            is_save = after.step == self.save
            is_together = after.cursor == 0 or is_last or is_save
            outcome = update(share.weight, loss, step=after.step, is_together=is_together)
            done = after.step
            was_asynchronous = was_asynchronous or exchange.is_asynchronous
            self.board.steps[rank] = done
            if is_save:
                saved = self._snapshot(replica, exchange, done)
            if outcome.stop or is_last:
                break
        update.meet(done)
        return _Run(self._snapshot(replica, exchange, done), saved, was_asynchronous)

    def _snapshot(self, replica: Replica, exchange: Exchange, done: int) -> _Snapshot:
        flat = FlatParameters(replica.gradients.parameters)
        with exchange.shared():
            shared, loss = flat.read(), self._loss(replica.model, slice(None))
            model = {name: value.clone() for name, value in replica.model.state_dict().items()}
            state = copy.deepcopy(exchange.private_state())
        own, optimizer = flat.read(), copy.deepcopy(replica.optimizer.state_dict())
        return _Snapshot(shared, own, loss, done, state, model, optimizer)

    def _loss(self, model: nn.Module, part: slice) -> float:
        with torch.no_grad():
            return float(self.problem.loss(model(self.problem.inputs[part]), self.problem.targets[part]))


@contextmanager
def _servers(shards: int, workers: int) -> Iterator[Callable[[int], Any] | None]:
    """A function that connects the worker of a rank, once, to parameter servers; None if none are needed."""
    if shards == 0:
        yield None
        return
    with servers_on_threads(shards, workers, timeout_s=_TIMEOUT_S) as connect, ExitStack() as clients:
        yield cache(lambda rank: clients.enter_context(closing(connect(rank))))
