"""Initializers by name: those of torch.nn.init, and some that it lacks.

Here: functions that fill a weight in place, drawing from torch's generator. Not here: which weights of a layer they
fill (`models/declared/weights.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Fill = Callable[..., Tensor]

ALIASES = {
    "glorot_uniform": "xavier_uniform",
    "glorot_normal": "xavier_normal",
    "he_uniform": "kaiming_uniform",
    "he_normal": "kaiming_normal",
    "identity": "eye",
}
"""Other names for the same thing."""

_TRUNCATED_STD = 0.87962566103423978
"""The standard deviation of a standard normal distribution that is truncated at two of them."""


@functools.cache
def table() -> dict[str, Fill]:
    """All of them by name, without torch's underscore at the end."""
    of_torch = {
        name.removesuffix("_"): function
        for name, function in vars(nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }
    own = (lecun_normal, lecun_uniform, variance_scaling, delta_orthogonal)
    return {**of_torch, **{function.__name__: function for function in own}}


@torch.no_grad()
def variance_scaling(
    tensor: Tensor,
    scale: float = 1.0,
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in",
    distribution: Literal["truncated_normal", "normal", "uniform"] = "truncated_normal",
) -> Tensor:
    """Weights of variance scale / fan, from a distribution of choice: He et al., arXiv:1502.01852, 2015."""
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(tensor)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    if mode not in fans:
        raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(map(repr, fans))}")
    std = math.sqrt(scale / fans[mode])
    if distribution == "uniform":
        return tensor.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std)
    if distribution == "normal":
        return tensor.normal_(0, std)
    if distribution == "truncated_normal":
        whole = std / _TRUNCATED_STD
        return nn.init.trunc_normal_(tensor, 0, whole, -2 * whole, 2 * whole)
    raise ValueError(f"distribution is {distribution!r}, but must be 'truncated_normal', 'normal' or 'uniform'")


def lecun_normal(tensor: Tensor) -> Tensor:
    """Normal weights of variance 1 / fan_in, cut off at two deviations: LeCun et al., Efficient BackProp, 1998."""
    return variance_scaling(tensor, 1.0, "fan_in", "truncated_normal")


def lecun_uniform(tensor: Tensor) -> Tensor:
    """Uniform weights of variance 1 / fan_in: LeCun et al., Efficient BackProp, 1998."""
    return variance_scaling(tensor, 1.0, "fan_in", "uniform")


@torch.no_grad()
def delta_orthogonal(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """An orthogonal matrix at the center of a kernel, 0 elsewhere: Xiao et al., arXiv:1806.05393, 2018."""
    if tensor.dim() < 3:
        raise ValueError("delta_orthogonal is for the kernels of convolutions")
    tensor.zero_()
    center = [n // 2 for n in tensor.shape[2:]]
    matrix = torch.empty(tensor.shape[:2], dtype=tensor.dtype, device=tensor.device)
    middle = tensor
    for place in center:
        middle = middle.select(2, place)
    middle.copy_(nn.init.orthogonal_(matrix, gain))
    return tensor
