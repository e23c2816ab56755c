"""Joins: several branches become one.

    layer = "add"
    from = ["first", "previous"]

Here: modules of any number of inputs. They broadcast as torch does, and a mistake in shapes is torch's own error.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor, nn

__all__ = ["Add", "Concat", "MatMul", "Maximum", "Mean", "Minimum", "Multiply", "Stack", "Subtract"]


class Add(nn.Module):
    """The sum of the inputs, element by element: a residual connection."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """x1 + x2 + ..."""
        return functools.reduce(operator.add, inputs)


class Subtract(nn.Module):
    """The first input less the others, element by element."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """x1 - x2 - ..."""
        return functools.reduce(operator.sub, inputs)


class Multiply(nn.Module):
    """The product of the inputs, element by element: a gate."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """x1 * x2 * ..."""
        return functools.reduce(operator.mul, inputs)


class Mean(nn.Module):
    """The mean of the inputs, element by element."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """(x1 + x2 + ...) / how many"""
        return functools.reduce(operator.add, inputs) / len(inputs)


class Maximum(nn.Module):
    """The largest of the inputs, element by element."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """max(x1, x2, ...)"""
        return functools.reduce(torch.maximum, inputs)


class Minimum(nn.Module):
    """The smallest of the inputs, element by element."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """min(x1, x2, ...)"""
        return functools.reduce(torch.minimum, inputs)


class MatMul(nn.Module):
    """The matrix product of the inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """x1 @ x2 @ ..."""
        return functools.reduce(torch.matmul, inputs)


class Concat(nn.Module):
    """The inputs one after the other along a dimension that they have: channels, unless told otherwise."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Tensor:
        """As `torch.cat` does."""
        return torch.cat(inputs, dim=self.dim)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"


class Stack(nn.Module):
    """The inputs one after the other along a new dimension."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Tensor:
        """As `torch.stack` does."""
        return torch.stack(inputs, dim=self.dim)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"
