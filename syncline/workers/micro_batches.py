"""In how many pieces a worker computes its share of a step.

Here: `MicroBatches`: as many as the plan says, or more if a limit of memory demands it; found anew in every View,
because shares grow when workers are lost. Not here: what memory a sample takes (`memory.py`), and what follows from it
(`plan/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from torch.nn.modules.batchnorm import _BatchNorm

from syncline.data.order import Share
from syncline.plan.memory import MemoryUse, Pieces, pieces_within
from syncline.strategies.exchange import Replica
from syncline.telemetry.events import Noted
from syncline.workers.batch_norm import has_global_batch_norm
from syncline.workers.evaluate import BLOCK
from syncline.workers.memory import agreed_use, measure_use, needed_besides
from syncline.workers.runtime import Runtime

__all__ = ["MicroBatches"]


class MicroBatches:
    """The pieces of a share. `try_out(samples)` takes a forward and a backward pass, of which nothing remains."""

    def __init__(self, runtime: Runtime, try_out: Callable[[int], None]) -> None:
        self._runtime, self._try_out = runtime, try_out
        self._use: MemoryUse | None = None
        self._count = 1
        self._are_equally_many = False
        self.at_once = BLOCK
        """How many samples are evaluated at a time."""

    def enter_view(self, replica: Replica) -> None:
        """Find out how many pieces the present members need. All of them call this together."""
        plan = self._runtime.plan
        self._count, self.at_once = plan.accumulate, BLOCK
        self._are_equally_many = has_global_batch_norm(replica.model)
        limit = plan.memory_limit_bytes
        if limit is None:
            return
        share = -(-plan.batch // plan.size)
        self._use = agreed_use(self._runtime.collective, self._use, lambda: self._measure(replica, share, limit))
        found = pieces_within(limit, self._use, share, plan.accumulate)
        self._count, self.at_once = found.count, min(BLOCK, found.samples)
        self._tell(found, replica)

    def of(self, share: Share) -> int:
        """Workers whose batch norm waits for the others have equally many, and nobody has an empty one."""
        if self._count == 1 or not self._are_equally_many:
            return self._count
        return min(self._count, max(1, share.batch // self._runtime.plan.size))

    def _measure(self, replica: Replica, share: int, limit_bytes: int) -> MemoryUse:
        collective = self._runtime.collective
        return measure_use(
            self._try_out,
            replica.model,
            share=share,
            batch=self._runtime.plan.batch,
            limit_bytes=limit_bytes,
            more=needed_besides(replica.model, replica.optimizer, collective),
            collective=collective,
            device=self._runtime.device,
        )

    def _tell(self, found: Pieces, replica: Replica) -> None:
        if self._runtime.rank != 0:
            return
        self._runtime.recorder.emit(Noted(message=found.in_words(), details={"memory": asdict(found)}))
        is_finer = found.count > self._runtime.plan.accumulate
        if is_finer and any(isinstance(m, _BatchNorm) for m in replica.model.modules()):
            self._runtime.warn(
                "Batch norm takes its statistics from one micro-batch at a time, so --memory-limit changes the result "
                "of this model a little."
            )
