"""Updates, mixed with neighbors only: gossip. No worker ever talks to all the others.

Each worker steps by itself, and every n steps its parameters x_i are replaced by a mean of its own and its neighbors',
with the weights W of the topology (`comms/mixing.py`):

    x_i <- sum_j W_ij (x_j - lr g_j)

W is doubly stochastic, so the mean over all workers moves exactly as if all workers had averaged (D-PSGD, Lian et al.
2017; GossipGraD, Daily et al. 2018), and what the workers disagree on shrinks by the spectral gap of W each time.

Here: `GossipExchange`, all at the same time, and `SeparateModels`, what it shares with `asynchronous_gossip.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.compute.outer import average
from syncline.strategies.answers import text_of
from syncline.strategies.exchange import Exchange, LocalExchange, Replica
from syncline.strategies.how import Exact
from syncline.strategies.lazy import flat, mixing, torch
from syncline.strategies.method import AnswersMethod, Method, Misfit, ModelShapes, Recovery, every, size
from syncline.strategies.methods.allreduce import exact_all_reduce
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Updates
from syncline.strategies.when import Every
from syncline.strategies.whom import Neighbors

if TYPE_CHECKING:
    from syncline.comms.collective import Collective

_MOST_COUNTED = 512


@dataclass(frozen=True)
class Gossip(AnswersMethod):
    """updates | every(n) | neighbors | exact, with the outer optimizer `average`."""

    what: Updates
    when: Every
    whom: Neighbors
    how: Exact

    title = "Gossip"
    because: ClassVar[Mapping[str, str]] = {
        "what": "Neighbors that exchange gradients never bring their parameters together, and drift apart.",
        "when": "Neighbors have no count of each other's steps: a server keeps one.",
        "whom": "Each worker averages with its neighbors.",
        "how": "Neighbors average parameters, and the error of a lossy encoding would go straight into them.",
    }
    has_separate_models = fits_across_groups = fits_between_replicas = True
    recovery: ClassVar[Recovery] = "merge"

    def misfit(self) -> Misfit | None:
        return gossip_misfit(self.what)

    @property
    def steps(self) -> int:
        return self.when.steps

    @property
    def committed(self) -> str:
        return "If a worker fails, the others average their models; its steps since it last gossiped are repeated."

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del optimizer_slots
        return model.exact_bytes * self._receivers(workers) / self.steps if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        count = self._receivers(workers)
        sent = model.exact_bytes * count
        return (Traffic(pattern="peers", sent_bytes=sent, every=self.steps, waits="peers", receivers=count),)

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """The buffer that is mixed, and a neighbor's model."""
        del optimizer_slots
        return 2.0

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        count = self._receivers(workers)
        others = "1 other" if count == 1 else f"{count:.3g} others"
        per_step = f" ({size(model.exact_bytes * count / self.steps)} per step)" if self.steps > 1 else ""
        return [
            f"{every(self.steps)} every worker averages its parameters with those of its neighbors on the graph "
            f"'{self.whom.topology}'.",
            f"Each worker sends {size(model.exact_bytes)} to {others}{per_step} for {model.numel:,} parameters.",
        ]

    def exchange(self, replica: Replica) -> Exchange:
        return exact_all_reduce(replica) if replica.collective.size == 1 else GossipExchange(replica, self)

    def _receivers(self, workers: int) -> float:
        """To how many others a worker sends its model in one round, as a mean."""
        if workers > _MOST_COUNTED:  # only simulated runs have more; a count either stays, or grows with the workers
            half, most = (self._receivers(count) for count in (_MOST_COUNTED // 2, _MOST_COUNTED))
            return most if half == most else most * workers / _MOST_COUNTED
        weights = mixing.TOPOLOGIES[self.whom.topology](range(workers))
        return sum(len(mixing.receivers(weights, rank)) for rank in range(workers)) / workers


def gossip_misfit(what: Updates) -> Misfit | None:
    """What is wrong with updates that neighbors are to exchange, if anything."""
    if type(what.outer) is not average:
        because = f"Neighbors average with each other; there is no common point that {text_of(what.outer)} could move."
        return Misfit("what", because, {"what": Updates()})
    if what.optimizer_state:
        because = "The optimizers' state is averaged over everyone, not with a few neighbors."
        return Misfit("what", because, {"what": Updates()})
    return None


_LOOK_EVERY = 50
"""Disagreement is measured once in so many exchanges: it costs an all-reduce."""


class SeparateModels(LocalExchange):
    """What both kinds of gossip share: every worker has a model of its own; the shared model is the mean."""

    def __init__(self, replica: Replica, method: Method) -> None:
        super().__init__(replica, method)
        self._flat = flat.FlatParameters(replica.gradients.parameters, what="gossip")
        self._own: torch.Tensor | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The mean of all models; afterwards every worker has its own again."""
        self._own = self._flat.read()
        self._flat.write(self._mean())
        try:
            yield
        finally:
            self._restore(self._own)
            self._own = None

    def settle(self) -> None:
        """The mean of all models."""
        self._flat.write(self._mean())

    def merge(self, survivors: Collective) -> None:
        """The mean of the survivors' models, for good: new neighbors start equal."""
        mean = self._flat.read()
        survivors.all_reduce_(mean, 1.0 / survivors.size)
        survivors.barrier()  # from here on no failure can leave this half done
        self._flat.write(mean)

    def replacement_state(self) -> dict[str, Any] | None:
        return self.private_state()

    def private_state(self) -> dict[str, Any]:
        """This worker's own model and optimizer."""
        own = self._own if self._own is not None else self._flat.read()
        return {"optimizer": self.replica.optimizer.state_dict(), "own": own.clone()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
        self._flat.write(state["own"].to(self._flat.device))

    def _mean(self) -> torch.Tensor:
        mean = self._flat.read()
        with self.replica.log.outside():
            self.replica.collective.all_reduce_(mean, 1.0 / self.replica.collective.size)
        return mean

    def _restore(self, own: torch.Tensor) -> None:
        self._flat.write(own)


class GossipExchange(SeparateModels):
    """An `Exchange`: after every n steps each worker mixes its model with its neighbors'."""

    def __init__(self, replica: Replica, method: Gossip) -> None:
        super().__init__(replica, method)
        self._topology, self._steps = mixing.TOPOLOGIES[method.whom.topology], method.steps
        self._step = self._mixed_at = replica.step

    def committed_steps(self) -> dict[int, int] | None:
        """Of the others, what they had when this worker last mixed."""
        size, rank = self.replica.collective.size, self.replica.collective.rank
        return {**dict.fromkeys(range(size), self._mixed_at), rank: self._step}

    def begin(self) -> None:
        super().begin()
        self._x = self.replica.collective.allocate(self._flat.numel, self._flat.dtype, self._flat.device)

    def after_update(self, weight: float) -> bool:
        """Mix, if it is time to; the piggybacked values travel to everyone."""
        self._step += 1
        if self._step % self._steps:
            return False
        self.combine(1.0, self._step // self._steps - 1)
        self.replica.collective.all_reduce_(self.replica.gradients.piggybacked, weight)
        return True

    def combine(self, weight: float, round: int) -> None:
        """Mix now, for the `round`-th time."""
        del weight
        collective = self.replica.collective
        self._flat.read(self._x)
        apart = None
        if round % _LOOK_EVERY == 0 and collective.size > 1:
            apart = flat.distance(self._x, self._mean())
        collective.mix_(self._x, self._topology(range(collective.size), round, self.replica.seed))
        self._flat.write(self._x)
        self._mixed_at = self._step
        self.replica.log.exchanged(disagreement=apart)
