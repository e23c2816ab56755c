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

__all__ = ["Exchange", "Replica"]


@dataclass(frozen=True)
class Replica:
    """One worker's copy of what is trained, and its line to the others."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradients: GradientBuffer
    collective: Collective


class Exchange(Protocol):
    """What a strategy does, and when. All workers reach each moment of each step in the same order."""

    def begin(self) -> None:
        """Before the first step: bring all replicas to the same state."""

    def before_forward(self) -> None:
        """Before a step's forward pass."""

    def before_update(self, weight: float) -> None:
        """The local gradients are complete; `weight` is this worker's part of the step's samples.

        Afterwards the gradient buffer holds what the optimiser is to apply, and its riders the weighted sum over all
        workers.
        """

    def after_update(self) -> None:
        """The optimiser has stepped."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside model and optimiser."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from `state_dict`."""
