"""Updates, every n steps, with everyone: workers train by themselves and combine what they have changed.

Let theta~ be the anchor, which all workers share, and theta_k worker k's parameters n steps later. With w_k its part of
the samples in these steps,

    delta = sum_k w_k (theta_k - theta~)        theta~ <- outer(theta~, delta)        theta_k <- theta~

With the outer optimiser `average` this is parameter averaging (SparkNet, Moritz et al. 2016); averaging the optimisers'
state as well is Deeplearning4j's; block momentum is BMUF (Chen & Huo 2016); Nesterov momentum is DiLoCo (Douillard et
al. 2023). With n = 1, `average` and plain SGD it is `gradients | every(1)`.
"""

from __future__ import annotations

from typing import Any

import torch

from syncline.algorithms.outer import average
from syncline.strategies.combine import Combiner
from syncline.strategies.exchange import Replica, adopt_first
from syncline.strategies.how import How
from syncline.strategies.what import Updates

__all__ = ["CombineUpdates"]


class CombineUpdates:
    """An `Exchange`: local steps, and every n of them an outer one."""

    def __init__(self, replica: Replica, what: Updates, steps: int, how: How) -> None:
        self._replica, self._what, self._steps = replica, what, steps
        self._parameters = replica.gradients.parameters
        self._combiner = Combiner(how, replica.collective)
        self._steps_since = 0
        self._weight_since = 0.0
        self._is_alone = replica.collective.size == 1 and isinstance(what.outer, average)

    def begin(self) -> None:
        """Everybody takes rank 0's parameters; they are the first anchor."""
        adopt_first(self._replica)
        self._anchor = self._flat()
        self._outer_state = dict(self._what.outer.initial_state(self._anchor))
        # Where the collective can, the change lies where it is combined without being copied.
        self._delta = self._replica.collective.allocate(self._anchor.numel(), self._anchor.dtype, self._anchor.device)

    def before_forward(self) -> None:
        """Nothing: this worker's own parameters are what it trains."""

    def before_update(self, weight: float) -> bool:
        """Nothing: this worker applies its own gradients."""
        del weight
        return False

    def after_update(self, weight: float) -> bool:
        """Count the step, and exchange if it is time to."""
        self._steps_since += 1
        self._weight_since += weight
        if self._steps_since < self._steps:
            return False
        riders = self._replica.gradients.riders
        self._replica.collective.sum_(riders, weight)
        self._exchange()
        return True

    def settle(self) -> None:
        """Exchange what was done since the last time."""
        if self._steps_since:
            self._exchange()

    def private_state(self) -> dict[str, Any]:
        """This worker's optimiser, the outer one, and what could not be sent yet."""
        return {
            "optimizer": self._replica.optimizer.state_dict(),
            "outer": dict(self._outer_state),
            "combiner": self._combiner.state(),
        }

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self._replica.optimizer.load_state_dict(state["optimizer"])
        self._outer_state = dict(state["outer"])
        self._combiner.load(state["combiner"])

    def _exchange(self) -> None:
        weight = self._weight_since / self._steps_since
        self._steps_since, self._weight_since = 0, 0.0
        if self._is_alone:
            return  # the mean of one is that one, to the bit
        torch.sub(self._flat(), self._anchor, out=self._delta)
        self._combiner.sum_(self._delta, weight)
        self._anchor, state = self._what.outer.step(self._anchor, self._delta, self._outer_state)
        self._outer_state = dict(state)
        offset = 0
        with torch.no_grad():
            for p in self._parameters:
                p.copy_(self._anchor[offset : offset + p.numel()].view(p.shape))
                offset += p.numel()
        if self._what.optimizer_state:
            self._average_optimizer_state(weight)

    def _average_optimizer_state(self, weight: float) -> None:
        for slots in self._replica.optimizer.state.values():
            for value in slots.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                    self._replica.collective.sum_(value, weight)

    def _flat(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])
