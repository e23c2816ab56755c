"""Yogi: Adam whose rates cannot rise quickly."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, count_step, settings_like_adams

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
        super().__init__(params, settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are without the bias of the first steps."""
        steps = count_step(weight, state, "mean", "square")
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        beta1, beta2 = group["betas"]
        squares = gradient.square()
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].addcmul_((state["square"] - squares).sign_(), squares, value=beta2 - 1)
        spread = (state["square"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        weight.addcdiv_(state["mean"], spread, value=-group["lr"] / (1 - beta1**steps))
