"""Softmax regression: one linear layer on the flattened input. The softmax is part of the loss, not of the model."""

from __future__ import annotations

import math

from torch import nn

__all__ = ["build"]


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One weight for each pair of input value and class, and one bias for each class."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
