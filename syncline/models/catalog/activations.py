"""Activations by name: torch.nn's own."""

from __future__ import annotations

import functools

import torch
from torch import nn


@functools.cache
def table() -> dict[str, type[nn.Module]]:
    """Functions of one tensor; MultiheadAttention, which torch keeps beside them, is a layer."""
    names = torch.nn.modules.activation.__all__
    return {name: getattr(nn, name) for name in names if name != "MultiheadAttention"}
