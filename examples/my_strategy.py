"""A strategy of your own: workers average one part of the model at a time, in turn.

syncline train lenet --workers 2 --data digits --strategy "examples/my_strategy.py:OnePartAtATime(parts=4)"

Peaks of traffic become small and even: each exchange moves a quarter of the model, and every part is averaged every
`parts * steps` steps. (Streaming DiLoCo, Douillard et al. 2025, does this with an outer optimizer.)
"""

from dataclasses import dataclass

from syncline import FlatParameters, LocalExchange, Method, Replica


@dataclass(frozen=True)
class OnePartAtATime(Method):
    """Goes after --strategy: its settings, what it declares, and how a worker's exchange is made."""

    parts: int = 4
    steps: int = 1

    def exchange(self, replica: Replica) -> "Averaging":
        return Averaging(replica, self)


class Averaging(LocalExchange):
    """What a worker does at the moments of a step. LocalExchange exchanges nothing; override what differs."""

    def __init__(self, replica: Replica, method: OnePartAtATime) -> None:
        super().__init__(replica, method)
        self.flat = FlatParameters(replica.gradients.parameters)
        self.step = replica.step

    def after_update(self, weight: float) -> bool:
        self.step += 1
        if self.step % self.method.steps:
            return False
        model = self.flat.read()
        parts = model.tensor_split(self.method.parts)
        turn = self.step // self.method.steps % self.method.parts
        self.replica.collective.all_reduce_(parts[turn], 1 / self.replica.collective.size)
        self.flat.write(model)
        # All workers must agree on the piggybacked values: the loss, a request to stop. They travel with us.
        self.replica.collective.all_reduce_(self.replica.gradients.piggybacked, weight)
        self.replica.log.exchanged()
        return True  # the piggybacked values are agreed on

    def settle(self) -> None:  # before the model is evaluated or saved: every worker gets the mean of all of it
        model = self.flat.read()
        self.replica.collective.all_reduce_(model, 1 / self.replica.collective.size)
        self.flat.write(model)

    def private_state(self) -> dict:  # for checkpoints: each worker has its own optimizer state
        return {"optimizer": self.replica.optimizer.state_dict()}

    def load_private_state(self, state: dict) -> None:
        self.replica.optimizer.load_state_dict(state["optimizer"])
