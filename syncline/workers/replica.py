"""Building a worker's replica and its exchange for one View.

Here: `build_replicas`. Not here: the strategies (`strategies/`), and the state that the replica starts from
(`state_sync.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.compute.batch_norm import StatisticsExchange, synchronize_batch_norm
from syncline.compute.memory import optimizer_slots
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
) -> list[tuple[Replica, Exchange]]:
    """Make `state`, after `step` steps, this worker's replica, once for each optimizer; all members call this together.

    The model is on its device already. `private` is what this worker's strategy kept for itself, if anything. `score`
    evaluates the model on held-out samples, for strategies in which models compete. `is_settled`: the members have the
    same state, and none of it may be written, because a step is in progress.
    """
    model, collective = state.model, session.collective
    optimizers = own_loop.optimizers if own_loop is not None else [state.optimizer]
    gradients = [_gradient_buffer(session, model, o if own_loop is not None else None) for o in optimizers]
    collective = session.collective  # another one, if shared memory was too small
    if session.has_global_batch_norm:
        synchronize_batch_norm(model, collective, own_loop.statistics if own_loop is not None else None)
    log = StrategyRecorder(session.recorder, step, session.members)
    log.count_bytes(lambda: session.collective.bytes_sent)
    session.recorder.count_waiting = lambda: session.collective.waited_s
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
        exchange = session.strategy.method.exchange(replica)
        session.until_view_ends.callback(exchange.close)
        exchange.begin()
        built.append((replica, exchange))
    if private is not None:
        group_of(built).load_private_state(private)
    if step:
        # One worker may have restored the servers' state: no other may fetch from them before.
        collective.barrier()
    log.start()
    _report_ready(session, state)
    return built


def group_of(built: Sequence[tuple[Replica, Exchange]]) -> Exchange:
    """The exchange of which checkpoints and recovery ask."""
    exchanges = [exchange for _, exchange in built]
    return exchanges[0] if len(exchanges) == 1 else ExchangeGroup(built[0][0], exchanges)


def _gradient_buffer(
    session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> GradientBuffer:
    """For the parameters of `optimizer` in a user's own loop, otherwise for those of the model."""
    is_flat, is_own_loop = session.plan.size > 1 or session.plan.servers > 0, optimizer is not None
    parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else None

    def allocate() -> GradientBuffer:
        return GradientBuffer(
            model.parameters() if parameters is None else parameters,
            session.collective,
            PIGGYBACKED_COUNT,
            is_flat=is_flat,
            keeps_local=is_own_loop,
        )

    try:
        return allocate()
    except SharedMemoryFull as error:  # raised on all members alike
        session.fall_back_to_process_group(str(error))
        return allocate()


def _report_ready(session: Session, state: TrainState) -> None:
    shapes = {name: tuple(p.shape) for name, p in state.model.named_parameters() if p.requires_grad}
    expected = expected_bytes_per_step(
        session.strategy, shapes, workers=session.plan.size, optimizer_slots=optimizer_slots(state.optimizer)
    )
    session.recorder.emit(
        WorkerReady(
            worker_id=session.worker_id,
            pid=os.getpid(),
            parameters=sum(p.numel() for p in state.model.parameters()),
            collective=type(session.collective).__name__,
            expected_bytes_per_step=expected,
        )
    )
