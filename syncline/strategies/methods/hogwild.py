"""Gradients, at any time, into one copy in shared memory: Hogwild! (Recht, Re, Wright & Niu 2011).

All workers train the same numbers. Worker k reads theta as it is, computes g_k on its samples, and its own optimizer
writes into theta, while others may be reading and writing, too; there is no lock and no exchange:

    theta <- theta - lr (n_k / N) g_k            momentum, if any, is the worker's own

The weight n_k / N makes each sample count as much as in a synchronous step over N samples. An update may be computed
from a mixture of older and newer numbers, and of two writes to one number at the same moment one can be lost; the paper
shows that this hardly matters as long as it is rare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.strategies.answers import text_of
from syncline.strategies.exchange import Exchange, LocalExchange, Replica
from syncline.strategies.how import Exact
from syncline.strategies.lazy import flat, torch
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, RunConditions
from syncline.strategies.methods.allreduce import exact_all_reduce
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Gradients
from syncline.strategies.when import Async
from syncline.strategies.whom import Memory

if TYPE_CHECKING:
    from syncline.comms.collective import Collective


@dataclass(frozen=True)
class Hogwild(AnswersMethod):
    """gradients | async | memory | exact."""

    what: Gradients
    when: Async
    whom: Memory
    how: Exact

    title = "Hogwild"
    because: ClassVar[Mapping[str, str]] = {
        "what": "There is one copy of the parameters for all workers, so none has updates of its own to combine.",
        "when": "Workers that share memory write each gradient at once, and see each other's at once.",
        "whom": "The workers write into one copy of the parameters in shared memory.",
        "how": "Through shared memory nothing is sent, so there is nothing to encode.",
    }
    is_asynchronous = True
    needs_shared_memory = fits_inside_group = True
    recovery: ClassVar[Recovery] = "merge"

    def misfit(self) -> Misfit | None:
        if self.when != Async():
            because = f"Workers that share memory write and read in every step, so {text_of(self.when)} has no meaning."
            return Misfit("when", because, {"when": Async()})
        return None

    @property
    def committed(self) -> str:
        return "If a worker fails, every update that it has finished writing counts."

    def without_shared_memory(self, run: RunConditions) -> str:
        both = "h2o, which shares memory inside each host and combines updates between hosts, or "
        server = "server-async, which does the same through a server"
        return f"{both if run.hosts > 1 and run.shares_memory else ''}{server}"

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del model, workers, optimizer_slots
        return 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del model, workers, optimizer_slots
        return ()

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del model, workers
        return [
            "All workers train one copy of the parameters in shared memory, each at its own pace: after each backward "
            "pass a worker writes its update there, without a lock and without waiting.",
            "Nothing is sent.",
        ]

    def exchange(self, replica: Replica) -> Exchange:
        return exact_all_reduce(replica) if replica.collective.size == 1 else HogwildExchange(replica, self)


class HogwildExchange(LocalExchange):
    """An `Exchange` in which nothing is sent: the replicas' parameters are one and the same memory."""

    def __init__(self, replica: Replica, method: Hogwild) -> None:
        super().__init__(replica, method)
        self._flat = flat.FlatParameters(replica.gradients.parameters, what="hogwild")
        self._step = replica.step

    def begin(self) -> None:
        """Move all replicas' parameters into shared memory, with rank 0's values."""
        super().begin()
        collective = self.replica.collective
        self._memory = collective.allocate_shared(self._flat.numel, self._flat.dtype)
        if collective.rank == 0:
            self._flat.read(self._memory)
        # How many updates each worker has begun, and how many it has finished, where all can see it.
        self._begun, self._finished = collective.allocate_shared(2 * collective.size, torch.int64).view(2, -1)
        collective.barrier()
        self._flat.move_to(self._memory)

    def before_update(self, weight: float) -> bool:
        """Let each sample count as in a step of all workers together."""
        gradients = [p.grad for p in self._flat.parameters if p.grad is not None]
        if weight != 1.0 and gradients:
            torch._foreach_mul_(gradients, weight)
        return False

    def update(self) -> None:
        """Let the optimizer write into shared memory."""
        rank = self.replica.collective.rank
        self._begun[rank] += 1
        super().update()
        self._finished[rank] += 1
        self.replica.log.exchanged()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers are here, so none writes; none leaves before all have read."""
        yield
        self.replica.collective.barrier()

    def settle(self) -> None:
        """Give every worker a copy of its own."""
        self.replica.collective.barrier()
        self._flat.move_to(self._memory.clone())
        self.replica.collective.barrier()

    def after_update(self, weight: float) -> bool:
        """Count the step, also if there was nothing to write in it."""
        del weight
        self._step += 1
        self._finished[self.replica.collective.rank] = self._step - self.replica.step
        return False

    def take_from_leader(self) -> None:
        self.replica.collective.barrier()  # the leader has written where all workers see it

    def committed_steps(self) -> dict[int, int] | None:
        """All finished updates. Of one that its worker was writing when it failed, some numbers may be there, too."""
        return {rank: self.replica.step + count for rank, count in enumerate(self._finished.tolist())}

    def merge(self, survivors: Collective) -> None:
        """No worker writes any more: all take what is in the memory now."""
        survivors.barrier()
        self._flat.write(self._memory)

    def replacement_state(self) -> dict[str, Any] | None:
        return self.private_state()

    def close(self) -> None:
        """From now on this worker's parameters are its own."""
        self._flat.leave_memory()

    def private_state(self) -> dict[str, Any]:
        """This worker's optimizer: the momentum is its own."""
        return {"optimizer": self.replica.optimizer.state_dict()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
