"""Yogi: Adam whose rates cannot rise quickly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, check

__all__ = ["Yogi"]


class Yogi(ByParameter):
    """Adam with additive second moments: Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018.

    m <- b1 m + (1 - b1) g;  v <- v - (1 - b2) sign(v - g^2) g^2;  w <- w - lr m' / (sqrt(v') + eps)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1), eps=(eps, 0, math.inf))
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are without the bias of the first steps."""
        if not state:
            state["step"] = torch.tensor(0.0)
            state["mean"] = torch.zeros_like(weight)
            state["square"] = torch.zeros_like(weight)
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        squares = gradient.square()
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].addcmul_((state["square"] - squares).sign_(), squares, value=beta2 - 1)
        spread = (state["square"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        weight.addcdiv_(state["mean"], spread, value=-group["lr"] / (1 - beta1**steps))
