"""Telling a network that does not see order where in the sequence each step is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["SinePositions"]


class SinePositions(nn.Module):
    """Adds sines of the position to (N, T, F): Vaswani et al., Attention Is All You Need, arXiv:1706.03762, 2017."""

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """input + PE, with PE[t, 2i] = sin(t / 10000^(2i/F)) and PE[t, 2i+1] = cos(t / 10000^(2i/F))"""
        steps, features = input.shape[1:]
        even = torch.arange(0, features, 2, device=input.device)
        angles = torch.arange(steps, device=input.device)[:, None] * torch.exp(even * (-math.log(10000.0) / features))
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :features]
        return input + waves.to(input.dtype)
