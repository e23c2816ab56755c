"""What these optimisers have in common: each parameter is updated by itself.

So a parameter server can step with any part of the parameters. Those that look at the norm of a whole weight (LARS,
LAMB) see the norm of the part that a server keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ByParameter", "check"]


class ByParameter(Optimizer):
    """An optimiser whose rule is a function of one parameter, its gradient and what is remembered of it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.is_sparse:
                        raise RuntimeError(f"{type(self).__name__} does not take sparse gradients")
                    self.update_one(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `weight` and `state` in place."""
        raise NotImplementedError


def check(**bounds: tuple[float, float, float]) -> None:
    """Each of (value, least, below) is in its bounds, or it is said which is not."""
    for name, (value, least, below) in bounds.items():
        if not least <= value < below:
            raise ValueError(f"{name} is {value:g}, but must be at least {least:g} and less than {below:g}")
