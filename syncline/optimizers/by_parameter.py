"""What these optimisers have in common: each parameter is updated by itself.

So a parameter server can step with any part of the parameters. Those that look at the norm of a whole weight (LARS,
LAMB) see the norm of the part that a server keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ByParameter", "check", "count_step", "settings_like_adams"]


class ByParameter(Optimizer, ABC):
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

    @abstractmethod
    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `weight` and `state` in place."""


def settings_like_adams(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, float | tuple[float, float]]:
    """The settings of an optimiser that has Adam's, checked."""
    check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1), eps=(eps, 0, math.inf))
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def count_step(weight: Tensor, state: dict[str, Any], *remembered: str) -> float:
    """How many steps this parameter has taken with this one; before the first, all that is remembered is zero."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state.update({name: torch.zeros_like(weight) for name in remembered})
    state["step"] += 1
    return float(state["step"])


def check(**bounds: tuple[float, float, float]) -> None:
    """Each of (value, least, below) is in its bounds, or it is said which is not."""
    for name, (value, least, below) in bounds.items():
        if not least <= value < below:
            raise ValueError(f"{name} is {value:g}, but must be at least {least:g} and less than {below:g}")
