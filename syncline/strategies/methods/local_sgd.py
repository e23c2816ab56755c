"""Updates, every n steps, with everyone: workers train by themselves and combine what they have changed.

Let theta~ be the anchor, which all workers share, and theta_k worker k's parameters n steps later. With w_k its part of
the samples in these steps,

    delta = sum_k w_k (theta_k - theta~)        theta~ <- outer(theta~, delta)        theta_k <- theta~

With the outer optimizer `average` this is parameter averaging (SparkNet, Moritz et al. 2016); averaging the optimizers'
state as well is Deeplearning4j's; block momentum is BMUF (Chen & Huo 2016); Nesterov momentum is DiLoCo (Douillard et
al. 2023). With n = 1, `average` and plain SGD it is `gradients | every(1)`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.compute.outer import average, elastic
from syncline.strategies.answers import Answers, text_of
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.how import Exact, Int8, WithCodec
from syncline.strategies.lazy import flat, serialize, torch
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, every
from syncline.strategies.traffic import Pattern, Traffic
from syncline.strategies.what import Updates
from syncline.strategies.when import Every
from syncline.strategies.whom import Everyone

if TYPE_CHECKING:
    from syncline.comms.collective import Collective


@dataclass(frozen=True)
class LocalSGD(AnswersMethod):
    """updates | every(n) | everyone, with any codec; exact if the optimizers' state is averaged, too."""

    what: Updates
    when: Every
    whom: Everyone
    how: WithCodec

    title = "Local SGD"
    because: ClassVar[Mapping[str, str]] = {
        "what": "An all-reduce sums gradients or averages updates; whole models compete in pairs.",
        "when": "An all-reduce needs all workers at the same step.",
        "whom": "Averaging updates needs all workers at once.",
        "how": "PowerSGD follows the gradients' matrices from one step to the next; updates are many steps apart.",
    }
    fits_inside_group = fits_across_groups = fits_between_replicas = True
    recovery: ClassVar[Recovery] = "merge"

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        del answers
        return {"what": Updates(), "when": Every(10), "whom": Everyone(), "how": Int8()}[question]

    def misfit(self) -> Misfit | None:
        if type(self.what.outer) is elastic:
            because = "Elastic averaging ties each worker to a center, and a server must hold the center."
            return Misfit("what", because, {"what": Updates(optimizer_state=self.what.optimizer_state)})
        if self.what.optimizer_state and self.how != Exact():
            because = (
                f"The optimizers' state keeps running sums, in which the errors of {text_of(self.how)} would add up. "
                "Leave out optimizer_state, or send it exactly."
            )
            return Misfit("how", because, {"how": Exact()})
        return None

    @property
    def steps(self) -> int:
        return self.when.steps

    @property
    def averages_optimizer(self) -> bool:
        return self.what.optimizer_state

    @property
    def committed(self) -> str:
        return "If a worker fails, the others average early; its steps since the last average are repeated."

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        if workers == 1:
            return 0.0
        state = model.exact_bytes * optimizer_slots if self.what.optimizer_state else 0
        return (model.encoded_bytes(self.how) + state) / self.steps

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        if workers == 1:
            return ()
        pattern: Pattern = "all-reduce" if self.how == Exact() else "all-gather"
        sent = float(model.encoded_bytes(self.how))
        state = float(model.exact_bytes * optimizer_slots) if self.what.optimizer_state else 0.0
        updates = Traffic(pattern=pattern, sent_bytes=sent, every=self.steps, encoding=self.how)
        if not state:
            return (updates,)
        return updates, Traffic(pattern="all-reduce", sent_bytes=state, every=self.steps)

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """What was last agreed on, the exchanged buffer, and the outer optimizer's momentum."""
        del optimizer_slots
        return 2.0 if type(self.what.outer) is average else 3.0

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        lines = [
            f"{every(self.steps)} all workers average what they have changed since the last time.",
            f"The outer optimizer {self.what.outer!r} applies the average.",
        ]
        if self.what.optimizer_state:
            lines.append("The optimizers' state is averaged, too.")
        return [*lines, f"Each worker sends {model.amount(self.how, self.steps)}."]

    def exchange(self, replica: Replica) -> LocalSGDExchange:
        return LocalSGDExchange(replica, self)


_PLACE = struct.Struct("<Qd")  # the step of the last exchange, the weight since


class LocalSGDExchange(LocalExchange):
    """An `Exchange`: local steps, and every n of them an outer one."""

    def __init__(self, replica: Replica, method: LocalSGD) -> None:
        super().__init__(replica, method)
        self._at = self._exchanged_at = replica.step
        self._what, self._steps = method.what, method.steps
        self._flat = flat.FlatParameters(replica.gradients.parameters, what="updates")
        shapes = [p.shape for p in self._flat.parameters]
        self._reducer = method.how.reducer(replica.collective, shapes, replica.seed)
        self._steps_since = 0
        self._weight_since = 0.0
        self._is_alone = replica.collective.size == 1 and type(method.what.outer) is average

    def begin(self) -> None:
        """Broadcast rank 0's parameters; they are the first anchor."""
        super().begin()
        self._anchor = self._flat.read()
        self._outer_state = dict(self._what.outer.initial_state(self._anchor))
        # Where the collective can, the change lies where it is combined without being copied.
        self._delta = self.replica.collective.allocate(self._flat.numel, self._flat.dtype, self._flat.device)

    def after_update(self, weight: float) -> bool:
        """Count the step, and exchange if it is time to."""
        self._at += 1
        self._steps_since += 1
        self._weight_since += weight
        if self._steps_since < self._steps:
            return False
        self.replica.collective.all_reduce_(self.replica.gradients.piggybacked, weight)
        self.settle()
        return True

    def agree(self) -> None:
        self.settle()

    def take_from_leader(self) -> None:
        super().take_from_leader()
        self._anchor = self._flat.read()

    def settle(self) -> None:
        """Exchange the updates since the last time."""
        if self._steps_since:
            self.combine(self._weight_since / self._steps_since, round=0)
            self._steps_since, self._weight_since, self._exchanged_at = 0, 0.0, self._at

    def combine(self, weight: float, round: int) -> None:
        """Exchange now; `weight` is this worker's part of the samples since the last time."""
        del round
        if self._is_alone:
            return  # the mean of one is that one, to the bit
        torch.sub(self._flat.read(), self._anchor, out=self._delta)
        own = self._delta.clone() if self.replica.log.wants_disagreement() else None
        self._reducer.all_reduce_(self._delta, weight)
        apart = None
        if own is not None:  # the parameters are the anchor and the change, so the anchor drops out of their difference
            center = torch.linalg.vector_norm(self._anchor + self._delta).clamp_min(1e-12)
            apart = float(torch.linalg.vector_norm(own - self._delta) / center)
        self._anchor, state = self._what.outer.step(self._anchor, self._delta, self._outer_state)
        self._outer_state = dict(state)
        self._flat.write(self._anchor)
        if self._what.optimizer_state:
            self._average_optimizer_state(weight)
        self.replica.log.exchanged(disagreement=apart)

    def committed_steps(self) -> dict[int, int] | None:
        """Of the others, the steps up to the last exchange."""
        size, rank = self.replica.collective.size, self.replica.collective.rank
        return {**dict.fromkeys(range(size), self._exchanged_at), rank: self._at}

    def merge(self, survivors: Collective) -> None:
        """Exchange early, among the survivors. One that missed the end of the last exchange takes its result first."""
        places = [_PLACE.unpack(data) for data in survivors.all_gather(_PLACE.pack(self._exchanged_at, self._weight()))]
        last = max(at for at, _ in places)
        anchor, outer = self._anchor, dict(self._outer_state)
        if any(at != last for at, _ in places):
            source = next(rank for rank, (at, _) in enumerate(places) if at == last)
            anchor = anchor.clone()
            survivors.broadcast_(anchor, source)
            outer = serialize.load_state(survivors.all_gather(serialize.dump_state(dict(outer)))[source])
        is_behind = self._exchanged_at != last  # all that it had done was in that exchange
        weights = [weight if at == last else 0.0 for at, weight in places]
        total = sum(weights)
        delta = torch.zeros_like(anchor) if is_behind else self._flat.read() - anchor
        if total:
            survivors.all_reduce_(delta, weights[survivors.rank] / total)
            anchor, state = self._what.outer.step(anchor, delta, outer)
            outer = dict(state)
        survivors.barrier()  # from here on no failure can leave this half done
        self._anchor, self._outer_state = anchor, outer
        self._flat.write(self._anchor)
        self._steps_since, self._weight_since = 0, 0.0
        self._exchanged_at = max(last, self._exchanged_at)

    def replacement_state(self) -> dict[str, Any] | None:
        """As this worker's, without the residual."""
        return {**self.private_state(), "reducer": {**self._reducer.state(), "residual": None}}

    def _weight(self) -> float:
        """This worker's part of the samples since the last exchange."""
        return self._weight_since / self._steps_since if self._steps_since else 0.0

    def private_state(self) -> dict[str, Any]:
        """This worker's optimizer, the outer optimizer's state, and the residual."""
        return {
            "optimizer": self.replica.optimizer.state_dict(),
            "outer": dict(self._outer_state),
            "reducer": self._reducer.state(),
        }

    def load_private_state(self, state: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
        self._outer_state = dict(state["outer"])
        self._reducer.load(state["reducer"])

    def _average_optimizer_state(self, weight: float) -> None:
        for value in state_in_common(self.replica.optimizer, self.replica.collective):
            self.replica.collective.all_reduce_(value, weight)


def state_in_common(optimizer: torch.optim.Optimizer, collective: Collective) -> list[torch.Tensor]:
    """What the optimizer remembers of each number, in the same order on every worker; nothing unless all have it.

    A worker whose every loss so far was NaN has not stepped yet, and so has nothing to remember.
    """
    found = [
        value
        for slots in optimizer.state.values()
        for value in slots.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    ]
    return found if len(set(collective.all_gather(b"%d" % len(found)))) == 1 else []


def adopt_optimizer(optimizer: torch.optim.Optimizer, collective: Collective) -> None:
    """Give every worker the first one's optimizer: its state and its settings."""
    if collective.size == 1:
        return
    first = collective.all_gather(serialize.dump_state(optimizer.state_dict()) if collective.rank == 0 else b"")[0]
    if collective.rank != 0:
        optimizer.load_state_dict(serialize.load_state(first))
