"""Max pooling of channels-last images by compiled code, for one thread of a CPU.

Here: forward and backward as functions of tensors, and `suits`, which says for what there is such code: windows that
lie side by side. The code itself is in `max_pool.cpp`. Not here: which layers use it (`workers/max_pooling.py`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from syncline.kernels.build import call, library

__all__ = ["forward", "input_gradient", "suits"]

_MOST_PLACES = 127
"""In a window: a place is a signed byte."""


def suits(layer: nn.MaxPool2d, x: torch.Tensor) -> bool:
    """Whether there is code for this layer and this input."""
    height, width = _window(layer)
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() == 4
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and _pair(layer.stride if layer.stride is not None else layer.kernel_size) == (height, width)
        and _pair(layer.padding) == (0, 0)
        and _pair(layer.dilation) == (1, 1)
        and not layer.ceil_mode
        and not layer.return_indices
        and height * width <= _MOST_PLACES
        and x.shape[2] >= height
        and x.shape[3] >= width
    ) and library() is not None


def forward(layer: nn.MaxPool2d, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer gives out, and at which place of each window it was."""
    height, width = _window(layer)
    size = (*x.shape[:2], x.shape[2] // height, x.shape[3] // width)
    y = torch.empty(size, memory_format=torch.channels_last)
    places = torch.empty(size, dtype=torch.int8, memory_format=torch.channels_last)
    call("max_pool_forward", _shape_of(layer, x.shape), x, y, places)
    return y, places


def input_gradient(layer: nn.MaxPool2d, x: torch.Size, dy: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The gradient of what went in, which was of size `x`."""
    dx = torch.empty(x, memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    call("max_pool_input_gradient", _shape_of(layer, x), dy, places, dx)
    return dx


class _Shape(ctypes.Structure):
    """As `PoolShape` in `max_pool.cpp`."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("samples", "height", "width", "channels", "window_height", "window_width")
    )


def _shape_of(layer: nn.MaxPool2d, x: torch.Size) -> _Shape:
    samples, channels, height, width = x
    return _Shape(samples, height, width, channels, *_window(layer))


def _window(layer: nn.MaxPool2d) -> tuple[int, int]:
    return _pair(layer.kernel_size)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (value, value) if isinstance(value, int) else value
    return rows, columns
