"""Building a worker's replica and its exchange for one View.

Here: `build_replica`. Not here: the strategies (`strategies/`), and the state that the replica starts from
(`state_sync.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.compute.batch_norm import synchronize_batch_norm
from syncline.compute.memory import optimizer_slots
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.explain import expected_bytes_per_step
from syncline.strategies.gradients import GradientBuffer
from syncline.telemetry.events import WorkerReady
from syncline.telemetry.strategy_log import StrategyRecorder
from syncline.workers.session import Session
from syncline.workers.train_state import TrainState
from syncline.workers.update import PIGGYBACKED_COUNT


def build_replica(
    session: Session,
    state: TrainState,
    private: dict[str, Any] | None,
    *,
    step: int,
    steps_per_epoch: int,
    clip_norm: float | None = None,
    score: Callable[[], tuple[float, float]] | None = None,
) -> tuple[Replica, Exchange]:
    """Make `state`, after `step` steps, this worker's replica; all members call this together.

    The model is on its device already. `private` is what this worker's strategy kept for itself, if anything. `score`
    evaluates the model on held-out samples, for strategies in which models compete.
    """
    model = state.model
    gradients = _gradient_buffer(session, model)
    if session.has_global_batch_norm:
        synchronize_batch_norm(model, session.collective)
    log = StrategyRecorder(session.recorder, step, session.members)
    log.count_bytes(lambda: session.collective.bytes_sent)
    session.recorder.count_waiting = lambda: session.collective.waited_s
    replica = Replica(
        model,
        state.optimizer,
        gradients,
        session.collective,
        seed=session.plan.seed,
        step=step,
        steps_per_epoch=steps_per_epoch,
        clip_norm=clip_norm,
        score=score,
        open_servers=session.open_servers if session.plan.servers else None,
        log=log,
    )
    exchange = session.strategy.method.exchange(replica)
    session.until_view_ends.callback(exchange.close)
    exchange.begin()
    if private is not None:
        exchange.load_private_state(private)
    if step:
        # One worker may have restored the servers' state: no other may fetch from them before.
        session.collective.barrier()
    log.start()
    _report_ready(session, state)
    return replica, exchange


def _gradient_buffer(session: Session, model: nn.Module) -> GradientBuffer:
    is_flat = session.plan.size > 1 or session.plan.servers > 0
    try:
        return GradientBuffer(model.parameters(), session.collective, PIGGYBACKED_COUNT, is_flat=is_flat)
    except SharedMemoryFull as error:  # raised on all members alike
        session.fall_back_to_process_group(str(error))
        return GradientBuffer(model.parameters(), session.collective, PIGGYBACKED_COUNT, is_flat=is_flat)


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
