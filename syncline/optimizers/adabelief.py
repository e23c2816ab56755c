"""AdaBelief: long steps where gradients are as expected."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.optimizers.by_parameter import ByParameter, count_step, settings_like_adams

__all__ = ["AdaBelief"]


class AdaBelief(ByParameter):
    """Adam by the surprise of gradients: Zhuang et al., AdaBelief Optimizer, arXiv:2010.07468, 2020.

    m <- b1 m + (1 - b1) g;  s <- b2 s + (1 - b2) (g - m)^2 + eps;  w <- w - lr (m' / (sqrt(s') + eps) + decay w)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and s' are without the bias of the first steps."""
        steps = count_step(weight, state, "mean", "surprise")
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - beta1)
        difference = gradient - mean
        state["surprise"].mul_(beta2).addcmul_(difference, difference, value=1 - beta2).add_(group["eps"])
        spread = (state["surprise"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**steps))
