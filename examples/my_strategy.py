"""A strategy of one's own: workers average one part of the model at a time, in turn.

syncline train lenet --workers 2 --data digits --strategy "examples/my_strategy.py:OnePartAtATime(parts=4)"

Peaks of traffic become small and even: each exchange moves a quarter of the model, and every part is averaged every
`parts * steps` steps. (Streaming DiLoCo, Douillard et al. 2025, does this with an outer optimiser.)
"""

from dataclasses import dataclass

from syncline.algorithms.partition import split
from syncline.strategies.exchange import PlainExchange, Replica
from syncline.strategies.flat import FlatParameters


@dataclass(frozen=True)
class OnePartAtATime:
    """What is written after --strategy: its settings, and how a worker's exchange is made."""

    parts: int = 4
    steps: int = 1

    def exchange(self, replica: Replica) -> "Averaging":
        return Averaging(replica, self.parts, self.steps)


class Averaging(PlainExchange):
    """What a worker does at the moments of a step. PlainExchange does nothing at all; we say what is different."""

    def __init__(self, replica: Replica, parts: int, steps: int) -> None:
        super().__init__(replica)
        self.flat = FlatParameters(replica.gradients.parameters)
        self.ranges = split(self.flat.numel, parts)
        self.steps, self.step = steps, replica.step

    def after_update(self, weight: float) -> bool:
        self.step += 1
        if self.step % self.steps:
            return False
        low, high = self.ranges[self.step // self.steps % len(self.ranges)]
        model = self.flat.read()
        self.replica.collective.sum_(model[low:high], 1 / self.replica.collective.size)
        self.flat.write(model)
        # The riders are numbers that all workers must agree on: the loss, a wish to stop. They travel with us.
        self.replica.collective.sum_(self.replica.gradients.riders, weight)
        self.replica.log.exchanged()
        return True  # they have been agreed on

    def settle(self) -> None:  # before the model is evaluated or saved: everybody gets the mean of all of it
        model = self.flat.read()
        self.replica.collective.sum_(model, 1 / self.replica.collective.size)
        self.flat.write(model)

    def private_state(self) -> dict:  # for checkpoints: each worker has an optimiser of its own
        return {"optimizer": self.replica.optimizer.state_dict()}

    def load_private_state(self, state: dict) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
