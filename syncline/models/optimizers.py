"""Optimizers that torch.optim lacks, as plain torch optimizers.

Each parameter is updated by itself, so a parameter server can step with any part of the parameters. Those that look at
the norm of a whole weight (LARS, LAMB) see the norm of the part that a server keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["LAMB", "LARS", "AdaBelief", "Lion", "Yogi"]


class _ByParameter(Optimizer, ABC):
    """An optimizer whose rule is a function of one parameter, its gradient and what is remembered of it."""

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


class AdaBelief(_ByParameter):
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
        super().__init__(params, _settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and s' are without the bias of the first steps."""
        steps = _count_step(weight, state, "mean", "surprise")
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - beta1)
        difference = gradient - mean
        state["surprise"].mul_(beta2).addcmul_(difference, difference, value=1 - beta2).add_(group["eps"])
        spread = (state["surprise"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**steps))


class LAMB(_ByParameter):
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
        super().__init__(params, _settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are Adam's."""
        steps = _count_step(weight, state, "mean", "square")
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1**steps)
        square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2) / (1 - beta2**steps)
        change = mean / square.sqrt_().add_(group["eps"]) + group["weight_decay"] * weight
        length, step_length = weight.norm(), change.norm()
        trust = torch.where((length > 0) & (step_length > 0), length / step_length, torch.ones_like(length))
        weight.sub_(change * (group["lr"] * trust))


class LARS(_ByParameter):
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
        _check(lr=(lr, 0, math.inf), momentum=(momentum, 0, 1), trust=(trust, 0, math.inf))
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


class Lion(_ByParameter):
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
        _check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1))
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above."""
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum, (beta1, beta2) = state["momentum"], group["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


class Yogi(_ByParameter):
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
        super().__init__(params, _settings_like_adams(lr, betas, eps, weight_decay))

    def update_one(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of the equations above; m' and v' are without the bias of the first steps."""
        steps = _count_step(weight, state, "mean", "square")
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        beta1, beta2 = group["betas"]
        squares = gradient.square()
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].addcmul_((state["square"] - squares).sign_(), squares, value=beta2 - 1)
        spread = (state["square"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        weight.addcdiv_(state["mean"], spread, value=-group["lr"] / (1 - beta1**steps))


def _settings_like_adams(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, float | tuple[float, float]]:
    """The settings of an optimizer that has Adam's, checked."""
    _check(lr=(lr, 0, math.inf), beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1), eps=(eps, 0, math.inf))
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def _count_step(weight: Tensor, state: dict[str, Any], *remembered: str) -> float:
    """How many steps this parameter has taken with this one; before the first, all that is remembered is zero."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state.update({name: torch.zeros_like(weight) for name in remembered})
    state["step"] += 1
    return float(state["step"])


def _check(**bounds: tuple[float, float, float]) -> None:
    """Each of (value, least, below) is in its bounds, or it is said which is not."""
    for name, (value, least, below) in bounds.items():
        if not least <= value < below:
            raise ValueError(f"{name} is {value:g}, but must be at least {least:g} and less than {below:g}")
