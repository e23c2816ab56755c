"""Into how many micro-batches a worker divides its share of a step.

Here: `MicroBatches`: as many as the plan says, or more if a memory limit requires it. The number is determined again in
every View, because shares grow when the number of workers shrinks. Not here: how much memory a sample takes
(`compute/memory.py`), and what follows from it (`compute/memory_use.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from torch.nn.modules.batchnorm import _BatchNorm

from syncline.compute.batch_norm import has_global_batch_norm
from syncline.compute.memory import agree_on_use, extra_memory, measure_use
from syncline.compute.memory_use import MemoryUse, Pieces, pieces_within
from syncline.data.order import Share
from syncline.strategies.exchange import Replica
from syncline.telemetry.events import InfoMessage
from syncline.workers.session import Session
from syncline.workers.spreading import pipeline_micro_batches

BLOCK = 256
"""How many samples are evaluated at once, if memory allows."""


class MicroBatches:
    """The micro-batches of a share. `dry_run(samples)` does a forward and a backward pass without side effects."""

    def __init__(self, session: Session, dry_run: Callable[[int], None]) -> None:
        self._session, self._dry_run = session, dry_run
        self._use: MemoryUse | None = None
        self._count = 1
        self._must_be_equal = False
        self.at_once = BLOCK
        """How many samples are evaluated at a time."""

    def divide(self, replica: Replica) -> None:
        """Determine the number of micro-batches in the current View; all members call this together."""
        plan = self._session.plan
        self._count, self.at_once = plan.accumulate, BLOCK
        self._must_be_equal = has_global_batch_norm(replica.model)
        self._model = replica.model
        limit = plan.memory_limit_bytes
        if limit is None or not self._session.layout.is_replicated:
            return  # with a layout, bytes were counted before the start (`layouts/forecast.py`)
        share = -(-plan.batch // self._session.place.grid.shares)
        self._use = agree_on_use(self._session.collective, self._use, lambda: self._measure(replica, share, limit))
        found = pieces_within(limit, self._use, share, plan.accumulate)
        self._count, self.at_once = found.count, min(BLOCK, found.samples)
        self._report(found, replica)

    def of(self, share: Share) -> int:
        """The number for `share`. With global batch norm all workers have the same number, and none of them empty."""
        if self._session.layout.pipeline is not None:
            return pipeline_micro_batches(self._session.layout.pipeline, len(share.indices), self._model)
        if self._count == 1 or not self._must_be_equal:
            return self._count
        return min(self._count, max(1, share.batch // self._session.place.grid.shares))

    def _measure(self, replica: Replica, share: int, limit_bytes: int) -> MemoryUse:
        collective = self._session.collective
        return measure_use(
            self._dry_run,
            replica.model,
            share=share,
            batch=self._session.plan.batch,
            limit_bytes=limit_bytes,
            more=extra_memory(replica.model, replica.optimizer, collective),
            collective=collective,
            device=self._session.device,
        )

    def _report(self, found: Pieces, replica: Replica) -> None:
        if self._session.rank != 0:
            return
        self._session.recorder.emit(InfoMessage(message=found.describe(), details={"memory": asdict(found)}))
        is_finer = found.count > self._session.plan.accumulate
        if is_finer and any(isinstance(m, _BatchNorm) for m in replica.model.modules()):
            self._session.warn(
                "Batch norm computes its statistics on one micro-batch at a time, so --memory-limit changes the result "
                "of this model slightly."
            )
