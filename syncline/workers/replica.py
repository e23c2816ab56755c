"""Building a worker's replica and its exchange for one View.

Here: `build_replicas`. Not here: the strategies (`strategies/`), and the state that the replica starts from
(`state_sync.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from syncline.comms.collective import Collective, Solo
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.compute.batch_norm import StatisticsExchange, synchronize_batch_norm
from syncline.compute.memory import optimizer_slots
from syncline.layouts.groups import replica_groups_of
from syncline.layouts.optimizer_size import optimizer_state
from syncline.layouts.spread import ModelSpread
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.explain import expected_bytes_per_step
from syncline.strategies.gradients import GradientBuffer
from syncline.telemetry.events import WorkerReady
from syncline.telemetry.strategy_log import StrategyRecorder
from syncline.workers.exchange_group import ExchangeGroup
from syncline.workers.session import Session
from syncline.workers.train_state import TrainState
from syncline.workers.update import PIGGYBACKED_COUNT


@dataclass(frozen=True)
class OwnLoop:
    """What is special about the replica of a user's own loop."""

    optimizers: Sequence[torch.optim.Optimizer]
    """Each has an exchange of its own, for the parameters in its groups."""
    parameters: Callable[[Collective], Sequence[Sequence[torch.Tensor]]]
    """Those parameters, as all members of the collective agree."""
    statistics: StatisticsExchange
    """How batch norm exchanges its statistics."""


def build_replicas(
    session: Session,
    state: TrainState,
    private: dict[str, Any] | None,
    *,
    step: int,
    steps_per_epoch: int,
    clip_norm: float | None = None,
    score: Callable[[], tuple[float, float]] | None = None,
    own_loop: OwnLoop | None = None,
    is_settled: bool = False,
    spread: ModelSpread | None = None,
) -> list[tuple[Replica, Exchange]]:
    """Make `state`, after `step` steps, this worker's replica, once for each optimizer; all members call this together.

    The model is on its device already. `private` is what this worker's strategy kept for itself, if anything. `score`
    evaluates the model on held-out samples, for strategies in which models compete. `is_settled`: the members have the
    same state, and none of it may be written, because a step is in progress. `spread` says how the model is spread over
    the workers, if they do not hold it whole.
    """
    model, collective = state.model, session.collective
    optimizers = own_loop.optimizers if own_loop is not None else [state.optimizer]
    laid_out = own_loop.parameters(collective) if own_loop is not None else [None]
    gradients = [_gradient_buffer(session, model, parameters) for parameters in laid_out]
    collective = session.collective  # another one, if shared memory was too small
    if session.has_global_batch_norm or (session.has_replica_batch_norm and spread is not None):
        lane = collective if spread is None else _lane_of(session, collective, spread)
        synchronize_batch_norm(model, lane, own_loop.statistics if own_loop and session.has_peers else None)
    log = _log_of(session, step)
    built: list[tuple[Replica, Exchange]] = []
    for optimizer, flat in zip(optimizers, gradients, strict=True):
        replica = Replica(
            model,
            optimizer,
            flat,
            collective,
            seed=session.plan.seed,
            step=step,
            steps_per_epoch=steps_per_epoch,
            clip_norm=clip_norm,
            score=score,
            open_servers=session.open_servers if session.plan.servers else None,
            log=log,
            is_settled=is_settled,
        )
        built.append((replica, _begun_exchange(session, replica, spread, is_loop=own_loop is not None)))
    _count_inside(session, built, spread)
    session.peak_memory.elsewhere = lambda: sum(session.layout.bytes_of_others(exchange) for _, exchange in built)
    if private is not None:
        group_of(built).load_private_state(private)
    if step:
        # One worker may have restored the servers' state: no other may fetch from them before.
        collective.barrier()
    log.start()
    _report_ready(session, state, group_of(built))
    return built


def _begun_exchange(session: Session, replica: Replica, spread: ModelSpread | None, *, is_loop: bool) -> Exchange:
    layout, method = session.layout, session.strategy.method
    exchange = layout.loop_exchange(replica, method) if is_loop else layout.exchange(replica, method, spread)
    session.until_view_ends.callback(exchange.close)
    exchange.begin()
    return exchange


def _log_of(session: Session, step: int) -> StrategyRecorder:
    log = StrategyRecorder(session.recorder, step, session.members)
    log.count_bytes(lambda: session.collective.bytes_sent)
    session.recorder.count_waiting = lambda: session.collective.waited_s
    return log


def group_of(built: Sequence[tuple[Replica, Exchange]]) -> Exchange:
    """The exchange of which checkpoints and recovery ask."""
    exchanges = [exchange for _, exchange in built]
    return exchanges[0] if len(exchanges) == 1 else ExchangeGroup(built[0][0], exchanges)


def rebuild_replica(
    session: Session, replica: Replica, parameters: Sequence[torch.Tensor], step: int
) -> tuple[Replica, Exchange]:
    """Lay out the gradients of a user's own loop anew, for these `parameters`; all members call this together.

    Only for exchanges without a state of their own.
    """
    try:
        gradients = _own_loop_buffer(session, parameters, replica.collective)
    except SharedMemoryFull:  # on all members alike: the sums pass through the collective's staging area
        gradients = _own_loop_buffer(session, parameters, Solo())
    rebuilt = replace(replica, gradients=gradients, step=step, is_settled=True)
    return rebuilt, _begun_exchange(session, rebuilt, None, is_loop=True)


def _gradient_buffer(
    session: Session, model: torch.nn.Module, parameters: Sequence[torch.Tensor] | None
) -> GradientBuffer:
    """For the `parameters` of an optimizer in a user's own loop, otherwise for those of the model."""

    def allocate() -> GradientBuffer:
        if parameters is not None:
            return _own_loop_buffer(session, parameters, session.collective)
        is_flat = _is_flat(session) and session.layout.is_replicated
        return GradientBuffer(model.parameters(), session.collective, PIGGYBACKED_COUNT, is_flat=is_flat)

    try:
        return allocate()
    except SharedMemoryFull as error:  # raised on all members alike
        session.fall_back_to_process_group(str(error))
        return allocate()


def _own_loop_buffer(session: Session, parameters: Sequence[Any], collective: Collective) -> GradientBuffer:
    return GradientBuffer(parameters, collective, PIGGYBACKED_COUNT, is_flat=_is_flat(session), keeps_local=True)


def _is_flat(session: Session) -> bool:
    return session.plan.size > 1 or session.plan.servers > 0


def _lane_of(session: Session, collective: Collective, spread: ModelSpread) -> Collective:
    """Those that compute the same layers on other samples: batch norm's statistics are over all of them.

    Replicas that train by themselves between exchanges have statistics of their own.
    """
    if not session.has_global_batch_norm:
        return replica_groups_of(collective, spread.grid).lane
    if spread.grid.per_team == 1 and spread.grid.workers == collective.size:
        return collective  # without spare workers, which compute nothing
    lane = spread.grid.lane(spread.rank)
    return collective.split(spread.grid.per_team if lane is None else lane)


def _count_inside(session: Session, built: list[tuple[Replica, Exchange]], spread: ModelSpread | None) -> None:
    """Have the recorder count what moves inside a replica, and the waiting between its stages."""
    if spread is not None and spread.grid.replicas == 1:
        session.recorder.count_inside = session.recorder.count_bytes  # there is no other replica to send to
    else:
        session.recorder.count_inside = lambda: sum(session.layout.bytes_inside(exchange) for _, exchange in built)
    if spread is not None and (runner := spread.runner) is not None:
        session.recorder.count_waiting = lambda: session.collective.waited_s + runner.waited_s  # the bubble


def _report_ready(session: Session, state: TrainState, exchange: Exchange) -> None:
    shapes = {name: tuple(p.shape) for name, p in state.model.named_parameters() if p.requires_grad}
    slots = optimizer_slots(state.optimizer)
    expected = expected_bytes_per_step(session.strategy, shapes, workers=session.plan.size, optimizer_slots=slots)
    session.recorder.emit(
        WorkerReady(
            worker_id=session.worker_id,
            pid=os.getpid(),
            parameters=sum(p.numel() for p in state.model.parameters()),
            collective=type(session.collective).__name__,
            expected_bytes_per_step=expected,
            part=session.layout.held_part(exchange, lambda: optimizer_state(state.optimizer)),
            shapes={name: list(shape) for name, shape in shapes.items()} if session.worker_id == 0 else {},
            optimizer_slots=slots,
        )
    )
