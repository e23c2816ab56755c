"""Regularizers by name: penalties, which add to the loss, and constraints, which always hold.

Here: both as functions of one weight. Not here: which weights have one (`models/declared/weights.py`), and adding
penalties to the loss (`workers/forward.py`). Dropout and noise are layers.

A penalty is added to the loss of every training batch, so it acts under every strategy, and is not part of a test
loss. A constraint is a parametrization (torch.nn.utils.parametrize): the optimizer updates an unconstrained weight, and
the layer uses its projection. So it holds exactly, also between exchanges and for weights on parameter servers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Penalty = Callable[..., Tensor]


def l1(weight: Tensor, strength: float = 0.01) -> Tensor:
    """Strength times the sum of absolute weights: many become 0. Tibshirani, The Lasso, 1996."""
    return strength * weight.abs().sum()


def l2(weight: Tensor, strength: float = 0.01) -> Tensor:
    """Strength times the sum of squared weights: all stay small. Hoerl & Kennard, Ridge Regression, 1970."""
    return strength * weight.square().sum()


def elastic_net(weight: Tensor, l1: float = 0.01, l2: float = 0.01) -> Tensor:
    """The sum of an l1 and an l2 penalty: Zou & Hastie, Regularization via the Elastic Net, 2005."""
    return l1 * weight.abs().sum() + l2 * weight.square().sum()


def group_lasso(weight: Tensor, strength: float = 0.01) -> Tensor:
    """An l1 penalty on the norms of whole outputs, which are switched off together: Yuan & Lin, 2006."""
    rows = weight.flatten(1)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return strength * math.sqrt(rows.shape[1]) * lengths.sum()


def orthogonality(weight: Tensor, strength: float = 0.01) -> Tensor:
    """The squared distance of W Wt (or Wt W) from the identity: Brock et al., arXiv:1609.07093, 2016."""
    matrix = weight.flatten(1)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    identity = torch.eye(len(matrix), dtype=weight.dtype, device=weight.device)
    return strength * (matrix @ matrix.T - identity).square().sum()


def spectral(weight: Tensor, strength: float = 0.01) -> Tensor:
    """Half the square of the largest singular value: Yoshida & Miyato, arXiv:1705.10941, 2017."""
    largest: Tensor = torch.linalg.matrix_norm(weight.flatten(1), 2)
    return strength / 2 * largest.square()


class MaxNorm(nn.Module):
    """No output has weights of a norm above c: Srivastava et al., Dropout, JMLR 15, 2014."""

    def __init__(self, c: float = 2.0) -> None:
        super().__init__()
        if c <= 0:
            raise ValueError(f"c is {c:g}, but must be more than 0")
        self.c = c

    def forward(self, weight: Tensor) -> Tensor:
        """Scale down weights whose norm is above c."""
        norms = _norms(weight)
        return weight * (self.c / norms.clamp(min=self.c))


class UnitNorm(nn.Module):
    """The weights of every output have norm 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / _norms(weight).clamp(min=torch.finfo(weight.dtype).tiny)


class NonNegative(nn.Module):
    """No weight is below 0."""

    def forward(self, weight: Tensor) -> Tensor:
        """The absolute value, whose gradient, unlike relu's, does not die."""
        return weight.abs()


@functools.cache
def penalties() -> dict[str, Penalty]:
    """The terms of the loss by name."""
    return {f.__name__: f for f in (l1, l2, elastic_net, group_lasso, orthogonality, spectral)}


@functools.cache
def constraints() -> dict[str, Callable[..., Any]]:
    """The constraints by name, as functions of a module, the name of its weight, and options."""
    own = {"max_norm": MaxNorm, "unit_norm": UnitNorm, "non_negative": NonNegative}
    of_torch = nn.utils.parametrizations
    return {
        **{name: functools.partial(_parametrized, kind) for name, kind in own.items()},
        "weight_norm": of_torch.weight_norm,
        "spectral_norm": of_torch.spectral_norm,
        "orthogonal": of_torch.orthogonal,
    }


def _parametrized(kind: type[nn.Module], module: nn.Module, name: str, *arguments: Any, **options: Any) -> None:
    nn.utils.parametrize.register_parametrization(module, name, kind(*arguments, **options))


def _norms(weight: Tensor) -> Tensor:
    """Of the weights of each output."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())), keepdim=True)
    return norms
