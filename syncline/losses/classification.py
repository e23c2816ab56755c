"""Losses for classes: outputs are logits (N, classes, ...), targets class numbers (N, ...)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

__all__ = ["dice", "focal", "generalized_cross_entropy", "jaccard", "squared_hinge", "tversky"]


def focal(input: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:  # the names are torch's, here and below
    """Cross entropy with less weight on what is right already: Lin et al., arXiv:1708.02002, 2017."""
    entropy = cross_entropy(input, target, reduction="none")
    return ((1 - (-entropy).exp()) ** gamma * entropy).mean()


def generalized_cross_entropy(input: Tensor, target: Tensor, q: float = 0.7) -> Tensor:
    """(1 - p^q) / q, which bears wrong labels: Zhang & Sabuncu, arXiv:1805.07836, 2018."""
    probability = (-cross_entropy(input, target, reduction="none")).exp()
    return ((1 - probability**q) / q).mean()


def squared_hinge(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    """The squared lack of margin over every other class: Tang, arXiv:1306.0239, 2013."""
    right = input.gather(1, target.unsqueeze(1))
    lacks = (margin - right + input).clamp(min=0).square()
    others = ~_classes(input, target).bool()
    return (lacks * others).sum(1).mean()


def tversky(input: Tensor, target: Tensor, alpha: float = 0.5, beta: float = 0.5, eps: float = 1e-6) -> Tensor:
    """1 - overlap, with a weight each for false and missed ones: Salehi et al., arXiv:1706.05721, 2017."""
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
    """The targets as 0 and 1 for every class, along dimension 1."""
    return torch.movedim(one_hot(target, input.shape[1]), -1, 1)
