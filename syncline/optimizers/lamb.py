"""LAMB: Adam with a rate for each layer, for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, count_step, settings_like_adams

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
        super().__init__(params, settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are Adam's."""
        steps = count_step(weight, state, "mean", "square")
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1**steps)
        square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2) / (1 - beta2**steps)
        change = mean / square.sqrt_().add_(group["eps"]) + group["weight_decay"] * weight
        length, step_length = weight.norm(), change.norm()
        trust = torch.where((length > 0) & (step_length > 0), length / step_length, torch.ones_like(length))
        weight.sub_(change * (group["lr"] * trust))
