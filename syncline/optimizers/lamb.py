"""LAMB: Adam with a rate for each layer, for large batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, check

__all__ = ["LAMB"]


class LAMB(ByParameter):
    """Adam with layer-wise rates: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, 2019.

    r = m' / (sqrt(v') + eps) + decay w;  w <- w - lr (|w| / |r|) r
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1), eps=(eps, 0, math.inf))
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are Adam's."""
        if not state:
            state["step"] = torch.tensor(0.0)
            state["mean"] = torch.zeros_like(weight)
            state["square"] = torch.zeros_like(weight)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1**steps)
        square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2) / (1 - beta2**steps)
        change = mean / square.sqrt_().add_(group["eps"]) + group["weight_decay"] * weight
        length, step_length = weight.norm(), change.norm()
        trust = torch.where((length > 0) & (step_length > 0), length / step_length, torch.ones_like(length))
        weight.sub_(change * (group["lr"] * trust))
