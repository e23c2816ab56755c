"""Losses that torch.nn lacks: functions of output and target that return the mean over the samples.

For classification, outputs are logits (N, classes, ...) and targets class indices (N, ...). For regression, output and
target have the same shape. Not here: the names of all losses (`models/catalog/losses.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot, softplus

__all__ = [
    "charbonnier",
    "cosine_distance",
    "dice",
    "focal",
    "generalized_cross_entropy",
    "jaccard",
    "log_cosh",
    "mean_percentage",
    "quantile",
    "squared_hinge",
    "squared_log",
    "tversky",
]


def mean_output(input: Tensor, target: Tensor) -> Tensor:
    """The mean of what the model returns: for models that compute an error per sample themselves."""
    del target
    return input.mean()


def focal(input: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:  # the names are torch's, here and below
    """Cross entropy with less weight on well-classified samples: Lin et al., arXiv:1708.02002, 2017."""
    entropy = cross_entropy(input, target, reduction="none")
    return ((1 - (-entropy).exp()) ** gamma * entropy).mean()


def generalized_cross_entropy(input: Tensor, target: Tensor, q: float = 0.7) -> Tensor:
    """(1 - p^q) / q, robust to label noise: Zhang & Sabuncu, arXiv:1805.07836, 2018."""
    probability = (-cross_entropy(input, target, reduction="none")).exp()
    return ((1 - probability**q) / q).mean()


def squared_hinge(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    """The squared hinge loss against every other class: Tang, arXiv:1306.0239, 2013."""
    right = input.gather(1, target.unsqueeze(1))
    lacks = (margin - right + input).clamp(min=0).square()
    others = ~_classes(input, target).bool()
    return (lacks * others).sum(1).mean()


def tversky(input: Tensor, target: Tensor, alpha: float = 0.5, beta: float = 0.5, eps: float = 1e-6) -> Tensor:
    """1 - overlap, with weights for false positives and false negatives: Salehi et al., arXiv:1706.05721, 2017."""
    chances, truth = input.softmax(1).flatten(2 if input.dim() > 2 else 1), _classes(input, target)
    truth = truth.flatten(2 if input.dim() > 2 else 1).to(chances.dtype)
    over = -1 if input.dim() > 2 else 1  # the places of an image, or the classes of a single answer
    both = (chances * truth).sum(over)
    false, missed = (chances * (1 - truth)).sum(over), ((1 - chances) * truth).sum(over)
    return (1 - (both + eps) / (both + alpha * false + beta * missed + eps)).mean()


def dice(input: Tensor, target: Tensor, eps: float = 1e-6) -> Tensor:
    """1 - twice the overlap over the sum of both: Milletari et al., V-Net, arXiv:1606.04797, 2016."""
    return tversky(input, target, 0.5, 0.5, eps)


def jaccard(input: Tensor, target: Tensor, eps: float = 1e-6) -> Tensor:
    """1 - the overlap over the union: Rahman & Wang, Optimizing Intersection-Over-Union, 2016."""
    return tversky(input, target, 1.0, 1.0, eps)


def _classes(input: Tensor, target: Tensor) -> Tensor:
    """One-hot targets along dimension 1."""
    return torch.movedim(one_hot(target, input.shape[1]), -1, 1)


def log_cosh(input: Tensor, target: Tensor) -> Tensor:
    """log(cosh(error)): squared where the error is small, absolute where it is large."""
    error = (input - target).abs()
    return (error + softplus(-2 * error) - math.log(2)).mean()


def quantile(input: Tensor, target: Tensor, q: float = 0.5) -> Tensor:
    """The pinball loss, minimized by a quantile: Koenker & Bassett, Regression Quantiles, 1978."""
    error = target - input
    return torch.maximum(q * error, (q - 1) * error).mean()


def squared_log(input: Tensor, target: Tensor) -> Tensor:
    """The squared difference of log(1 + x): for non-negative targets of very different magnitudes."""
    return (input.clamp(min=0).log1p() - target.log1p()).square().mean()


def mean_percentage(input: Tensor, target: Tensor, eps: float = 1e-8) -> Tensor:
    """The absolute error relative to the target."""
    return ((input - target).abs() / target.abs().clamp(min=eps)).mean()


def charbonnier(input: Tensor, target: Tensor, eps: float = 1e-3) -> Tensor:
    """sqrt(error^2 + eps^2), a smooth absolute error: Charbonnier et al., ICIP 1994."""
    return ((input - target).square() + eps**2).sqrt().mean()


def cosine_distance(input: Tensor, target: Tensor, dim: int = 1) -> Tensor:
    """1 - cosine of the angle between output and target."""
    return (1 - cosine_similarity(input, target, dim=dim)).mean()
