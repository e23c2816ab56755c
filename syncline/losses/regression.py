"""Losses for numbers: output and target have the same shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

__all__ = ["charbonnier", "cosine_distance", "log_cosh", "mean_percentage", "quantile", "squared_log"]


def log_cosh(input: Tensor, target: Tensor) -> Tensor:  # the names are torch's, here and below
    """log(cosh(error)): squared where the error is small, absolute where it is large."""
    error = (input - target).abs()
    return (error + softplus(-2 * error) - math.log(2)).mean()


def quantile(input: Tensor, target: Tensor, q: float = 0.5) -> Tensor:
    """The loss whose best output is a quantile: Koenker & Bassett, Regression Quantiles, 1978."""
    error = target - input
    return torch.maximum(q * error, (q - 1) * error).mean()


def squared_log(input: Tensor, target: Tensor) -> Tensor:
    """The squared difference of log(1 + x): for amounts of very different sizes, none below 0."""
    return (input.clamp(min=0).log1p() - target.log1p()).square().mean()


def mean_percentage(input: Tensor, target: Tensor, eps: float = 1e-8) -> Tensor:
    """The error as a part of the target."""
    return ((input - target).abs() / target.abs().clamp(min=eps)).mean()


def charbonnier(input: Tensor, target: Tensor, eps: float = 1e-3) -> Tensor:
    """sqrt(error^2 + eps^2), a smooth absolute error: Charbonnier et al., ICIP 1994."""
    return ((input - target).square() + eps**2).sqrt().mean()


def cosine_distance(input: Tensor, target: Tensor, dim: int = 1) -> Tensor:
    """1 - cosine of the angle between output and target."""
    return (1 - cosine_similarity(input, target, dim=dim)).mean()
