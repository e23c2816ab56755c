"""Updates, averaged with one other at a time and at any time: AD-PSGD (Lian, Zhang, Zhang & Liu 2018).

Every second worker, whenever it has done a step, averages with one of the others, chosen at random, which need not even
notice. That needs memory that both can reach: x_j is averaged where it lies, under a lock that lasts as long as one
averaging. Not here: gossip in step (`gossip.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from syncline.strategies.answers import text_of
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.how import Exact
from syncline.strategies.lazy import flat, lock, mixing, torch
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, RunConditions, size
from syncline.strategies.methods.allreduce import exact_all_reduce
from syncline.strategies.methods.gossip import Gossip, SeparateModels, gossip_misfit
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Updates
from syncline.strategies.when import Async
from syncline.strategies.whom import Neighbors

if TYPE_CHECKING:
    from syncline.comms.collective import Collective


@dataclass(frozen=True)
class AsynchronousGossip(AnswersMethod):
    """updates | async | neighbors | exact, with the outer optimizer `average`."""

    what: Updates
    when: Async
    whom: Neighbors
    how: Exact

    title = "Asynchronous gossip"
    because: ClassVar[Mapping[str, str]] = Gossip.because
    has_separate_models = needs_shared_memory = True
    is_asynchronous = True
    recovery: ClassVar[Recovery] = "merge"

    def misfit(self) -> Misfit | None:
        if self.when != Async():
            because = f"Two neighbors average, which is push and fetch in one, so {text_of(self.when)} has no meaning."
            return Misfit("when", because, {"when": Async()})
        return gossip_misfit(self.what)

    @property
    def committed(self) -> str:
        return "If a worker fails, the others average their models; its steps that no other has averaged are repeated."

    def without_shared_memory(self, run: RunConditions) -> str:
        del run
        return f"\"gossip(topology='{self.whom.topology}')\", in which all workers average at the same step"

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        """Every second worker, after each of its steps, sends its model to another and takes that one's."""
        del optimizer_slots
        return 2 * model.exact_bytes * -(-workers // 2) / workers if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        active = -(-workers // 2) / workers
        return (Traffic(pattern="peers", sent_bytes=2.0 * model.exact_bytes, waits="nobody", senders=active),)

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        return [
            "Each worker trains a model of its own at its own pace; after each of its steps every second worker "
            "averages its parameters with those of another worker, drawn at random.",
            f"Such an average moves {size(model.exact_bytes)} from one to the other and as many back.",
        ]

    def exchange(self, replica: Replica) -> Exchange:
        return exact_all_reduce(replica) if replica.collective.size == 1 else AsynchronousGossipExchange(replica, self)


_LOCK_TIMEOUT_S = 60.0


class AsynchronousGossipExchange(SeparateModels):
    """An `Exchange`: each worker at its own pace; every second one averages with another after each of its steps."""

    def __init__(self, replica: Replica, method: AsynchronousGossip) -> None:
        super().__init__(replica, method)
        self._bytes = 0
        replica.log.count_bytes(lambda: self._bytes)

    def begin(self) -> None:
        """Move all replicas' parameters into memory that the others can reach."""
        super().begin()
        collective, numel = self.replica.collective, self._flat.numel
        memory = collective.allocate_shared(numel * collective.size, self._flat.dtype)
        self._models = [memory[r * numel : (r + 1) * numel] for r in range(collective.size)]
        lock_memory = collective.allocate_shared(lock.LOCK_BYTES * collective.size, torch.uint8)
        if collective.rank == 0:
            for rank in range(collective.size):
                lock.SharedLock.initialize(lock_memory, rank * lock.LOCK_BYTES)
        collective.barrier()
        self._locks = [lock.SharedLock(lock_memory, rank * lock.LOCK_BYTES) for rank in range(collective.size)]
        # Of each worker, the steps it has done, and those that another one has in its model, too.
        self._done, self._known = collective.allocate_shared(2 * collective.size, torch.int64).view(2, -1)
        self._x = self._models[collective.rank]
        self._flat.read(self._x)
        self._flat.move_to(self._x)
        self._step = self.replica.step
        active, _ = mixing.bipartite(range(collective.size))
        self._is_active = collective.rank in active and collective.size > 1
        collective.barrier()

    def update(self) -> None:
        """Let the optimizer write while no other worker averages."""
        with self._locks[self.replica.collective.rank].held(_LOCK_TIMEOUT_S):
            super().update()

    def merge(self, survivors: Collective) -> None:
        """The mean of the survivors' models; until they stopped, they may have averaged into each other's."""
        survivors.barrier()
        self._flat.write(self._x)
        super().merge(survivors)

    def committed_steps(self) -> dict[int, int] | None:
        """Of the others, what was averaged into another model."""
        known = {rank: self.replica.step + count for rank, count in enumerate(self._known.tolist())}
        return {**known, self.replica.collective.rank: self._step}

    def after_update(self, weight: float) -> bool:
        """An active worker averages with a passive one."""
        del weight
        self._step += 1
        self._done[self.replica.collective.rank] = self._step - self.replica.step
        if not self._is_active:
            return False
        collective, log = self.replica.collective, self.replica.log
        other = mixing.choose_passive(collective.rank, range(collective.size), self._step, self.replica.seed)
        assert other is not None, "an active worker has a partner"
        mine, theirs = self._x, self._models[other]
        with ExitStack() as locks:
            for rank in sorted((collective.rank, other)):  # always in the same order, so that there is no deadlock
                locks.enter_context(self._locks[rank].held(_LOCK_TIMEOUT_S))
            apart = flat.distance(mine, theirs) / 2 if log.wants_disagreement() else None
            mean = torch.add(mine, theirs).mul_(0.5)
            mine.copy_(mean)
            theirs.copy_(mean)
            for rank in (collective.rank, other):
                self._known[rank] = self._done[rank]
        self._bytes += 2 * mine.nbytes  # its own model to the other one, and the other one's to it
        log.exchanged(disagreement=apart)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The mean of all models. All workers are here, so none averages."""
        collective = self.replica.collective
        collective.barrier()
        with super().shared():
            yield
        collective.barrier()

    def close(self) -> None:
        """From now on this worker's parameters are its own."""
        self._flat.leave_memory()

    def settle(self) -> None:
        """A copy of its own for every worker, with the mean."""
        self.replica.collective.barrier()
        mean = self._mean()
        self.replica.collective.barrier()
        self._flat.move_to(mean)
