"""Lion: the sign of a momentum, found by program search."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, check

__all__ = ["Lion"]


class Lion(ByParameter):
    """The sign of a momentum: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, 2023.

    w <- w - lr (sign(b1 m + (1 - b1) g) + decay w);  m <- b2 m + (1 - b2) g
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1))
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above."""
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum, (beta1, beta2) = state["momentum"], group["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
