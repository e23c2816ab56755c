"""LARS: SGD with a rate for each layer, for large batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, check

__all__ = ["LARS"]


class LARS(ByParameter):
    """SGD with layer-wise rates: You et al., Large Batch Training of Convolutional Networks, arXiv:1708.03888, 2017.

    v <- momentum v + lr trust |w| / (|g| + decay |w|) (g + decay w);  w <- w - v
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        check(lr=(lr, 0, math.inf), momentum=(momentum, 0, 1), trust=(trust, 0, math.inf))
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; a weight or gradient of 0 has no rate of its own."""
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        decay, length = group["weight_decay"], weight.norm()
        whole = gradient.norm() + decay * length
        rate = torch.where((length > 0) & (whole > 0), group["trust"] * length / whole, torch.ones_like(length))
        change = (gradient + decay * weight) * (group["lr"] * rate)
        weight.sub_(state["momentum"].mul_(group["momentum"]).add_(change))
