"""Averages over images whose gradients lie in memory as the images do.

Here: `keep_format`, which lets the averaging layers of a model do so. Not here: which memory format that is
(`tuning.py`).

The gradient of an average over the whole image is one number for each channel, which torch writes out as a contiguous
image, also where images lie channels-last. In a ResNet that gradient goes along all shortcuts, up to the first layer;
at each of them it meets one that lies the other way round, and is copied or read with large strides. Turned around
once, where it begins, it stays so. The values are the same, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["keep_format"]


def keep_format(model: nn.Module) -> None:
    """Let the averages over images in `model` give gradients in the memory format of their input."""
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d:
            module.__class__ = _KeepsFormat


class _KeepsFormat(nn.AdaptiveAvgPool2d):
    """Torch's layer, but for the way back. Objects get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Torch's own."""
        if input.requires_grad and input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            input.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return super().forward(input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's own layer: how it computes is decided by who trains it."""
        del protocol
        return _torchs_own, (), self.__dict__


def _channels_last(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def _torchs_own() -> nn.AdaptiveAvgPool2d:
    """An empty layer for unpickling, which then restores its state."""
    return nn.AdaptiveAvgPool2d.__new__(nn.AdaptiveAvgPool2d)
