"""Layers that disturb what passes through them in training, and do nothing in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError

__all__ = ["DropPath", "GaussianNoise"]


class GaussianNoise(nn.Module):
    """Adds normal noise in training: Bishop, Training with Noise is Equivalent to Tikhonov Regularization, 1995."""

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        if std < 0:
            raise ConfigError(f"std is {std:g}, but must be 0 or more.")
        self.std = std

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """input + std * noise"""
        return input + self.std * torch.randn_like(input) if self.training else input

    def extra_repr(self) -> str:
        """How much."""
        return f"std={self.std}"


class DropPath(nn.Module):
    """Leaves out a branch for some samples in training: Huang et al., Deep Networks with Stochastic Depth, 2016."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"p is {p:g}, but must be at least 0 and less than 1.")
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """0 with probability p, else input / (1 - p): the same on average."""
        if not self.training or self.p == 0:
            return input
        keeps = input.new_empty(len(input), *[1] * (input.dim() - 1)).bernoulli_(1 - self.p)
        return input * keeps / (1 - self.p)

    def extra_repr(self) -> str:
        """How often."""
        return f"p={self.p}"
