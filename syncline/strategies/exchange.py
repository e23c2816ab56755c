"""The seam between a training step and a strategy: what a strategy does at the named moments of a step.

Here: the `Exchange` protocol and `Replica`, the worker's copy that it works on. Not here: the strategies themselves
(one file each) and who calls the moments (`workers/step.py`, for the built-in loop and for `optimizer.step()` alike).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from syncline.comms.collective import Collective
from syncline.strategies.gradients import GradientBuffer

__all__ = ["Exchange", "Replica", "adopt_first"]


@dataclass(frozen=True)
class Replica:
    """One worker's copy of what is trained, and its line to the others."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    collective: Collective


class Exchange(Protocol):
    """What a strategy does, and when. All workers reach each moment of each step in the same order.

    The riders of the gradient buffer are numbers on which all workers must agree (the loss, a wish to stop). They
    travel with whatever the strategy exchanges; where nothing is exchanged in a step, they wait for the next.
    """

    def begin(self) -> None:
        """Before the first step: bring all replicas to the same state."""

    def before_forward(self) -> None:
        """Before a step's forward pass."""

    def before_update(self, weight: float) -> bool:
        """The local gradients are complete; `weight` is this worker's part of the step's samples.

        Afterwards the gradient buffer holds what the optimiser is to apply. True if the riders now hold the weighted
        sum over all workers.
        """

    def after_update(self, weight: float) -> bool:
        """The optimiser has stepped. True if the riders now hold the weighted sum over all workers."""

    def settle(self) -> None:
        """Give every replica the shared state, before it is evaluated or saved."""

    def private_state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold for this worker alone, beside the model and optimiser of the first; or None."""

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Take up a state from `private_state`."""


def adopt_first(replica: Replica) -> None:
    """Give every replica the first worker's parameters and buffers."""
    for tensor in [*replica.model.parameters(), *replica.model.buffers()]:
        replica.collective.broadcast_(tensor.detach())
