"""Layers that torch.nn lacks: joins of branches, reshaping, noise and positional encoding.

    layer = "add"
    from = ["first", "previous"]

A join takes any number of inputs. Joins broadcast as torch does, and a shape mismatch raises torch's own error. Noise
layers act in training only. Not here: the names of all layers (`models/catalog/layers.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError

__all__ = [
    "Add",
    "Average",
    "Concat",
    "DropPath",
    "GaussianNoise",
    "Last",
    "MatMul",
    "Maximum",
    "Mean",
    "Minimum",
    "Multiply",
    "Permute",
    "Reshape",
    "SinePositions",
    "Squeeze",
    "Stack",
    "Subtract",
    "Unsqueeze",
]

JOINS = ("Add", "Concat", "MatMul", "Maximum", "Mean", "Minimum", "Multiply", "Stack", "Subtract")
"""The layers that join branches."""


class _Join(nn.Module):
    """Combines its inputs two by two, from the first to the last."""

    combine: Callable[[Tensor, Tensor], Tensor]

    def forward(self, *inputs: Tensor) -> Tensor:
        return functools.reduce(self.combine, inputs)


class Add(_Join):
    """The sum of the inputs, element by element: a residual connection."""

    combine = staticmethod(operator.add)


class Subtract(_Join):
    """The first input less the others, element by element."""

    combine = staticmethod(operator.sub)


class Multiply(_Join):
    """The product of the inputs, element by element: a gate."""

    combine = staticmethod(operator.mul)


class Mean(Add):
    """The mean of the inputs, element by element."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs) / len(inputs)


class Maximum(_Join):
    """The largest of the inputs, element by element."""

    combine = staticmethod(torch.maximum)


class Minimum(_Join):
    """The smallest of the inputs, element by element."""

    combine = staticmethod(torch.minimum)


class MatMul(_Join):
    """The matrix product of the inputs."""

    combine = staticmethod(torch.matmul)


class _AlongDim(nn.Module):
    """A layer with a dimension as its only setting."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Concat(_AlongDim):
    """Concatenates the inputs along an existing dimension, by default the channels."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__(dim)

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, dim=self.dim)


class Stack(Concat):
    """Stacks the inputs along a new dimension."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack(inputs, dim=self.dim)


class Last(nn.Module):
    """The last step of a sequence, (N, T, ...) to (N, ...): what follows a recurrent layer in a classifier."""

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        return input[:, -1]


class Permute(nn.Module):
    """The dimensions of each sample in another order: permute(2, 1) makes (N, T, F) to (N, F, T)."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.permute` does, with the batch first."""
        return input.permute(0, *self.dims)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.dims))


class Reshape(nn.Module):
    """The numbers of each sample in another shape; one size may be -1, which means what is left."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.reshape` does, with the batch first."""
        return input.reshape(len(input), *self.shape)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


class Average(nn.Module):
    """The mean over some dimensions: over time with average(1), over the pixels of an image with average([2, 3])."""

    def __init__(self, dim: int | Sequence[int], keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.keepdim = tuple(dim) if isinstance(dim, Sequence) else dim, keepdim

    def forward(self, input: Tensor) -> Tensor:
        return input.mean(dim=self.dim, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Squeeze(_AlongDim):
    """Without a dimension of size 1."""

    def forward(self, input: Tensor) -> Tensor:
        return input.squeeze(self.dim)


class Unsqueeze(_AlongDim):
    """With another dimension, of size 1."""

    def forward(self, input: Tensor) -> Tensor:
        return input.unsqueeze(self.dim)


class GaussianNoise(nn.Module):
    """Adds normal noise in training: Bishop, Training with Noise is Equivalent to Tikhonov Regularization, 1995."""

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        if std < 0:
            raise ConfigError(f"std is {std:g}, but must be 0 or more.")
        self.std = std

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        return input + self.std * torch.randn_like(input) if self.training else input

    def extra_repr(self) -> str:
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
        # Drawn by dropout, so that it is the same for a sample on whichever worker it is.
        return input * nn.functional.dropout(input.new_ones(len(input), *[1] * (input.dim() - 1)), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class SinePositions(nn.Module):
    """Adds sines of the position to (N, T, F): Vaswani et al., Attention Is All You Need, arXiv:1706.03762, 2017."""

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """input + PE, with PE[t, 2i] = sin(t / 10000^(2i/F)) and PE[t, 2i+1] = cos(t / 10000^(2i/F))"""
        steps, features = input.shape[1:]
        even = torch.arange(0, features, 2, device=input.device)
        angles = torch.arange(steps, device=input.device)[:, None] * torch.exp(even * (-math.log(10000.0) / features))
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :features]
        return input + waves.to(input.dtype)
