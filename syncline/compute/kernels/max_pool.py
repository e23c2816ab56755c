"""Max pooling of channels-last images by compiled code, for one thread of a CPU.

Here: forward and backward as functions of tensors, and `is_applicable`: windows must be adjacent and not overlap. The
code itself is in `max_pool.cpp`. Not here: which layers use it (`compute/pooling.py`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from syncline.compute.kernels.build import call, library

_MOST_POSITIONS = 127
"""The most positions in a window: a position is stored as a signed byte."""


def is_applicable(layer: nn.MaxPool2d, x: torch.Tensor) -> bool:
    """Whether the kernels support this layer with this input."""
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
        and height * width <= _MOST_POSITIONS
        and x.shape[2] >= height
        and x.shape[3] >= width
    ) and library() is not None


def forward(layer: nn.MaxPool2d, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the layer, and the position of the maximum in each window."""
    height, width = _window(layer)
    size = (*x.shape[:2], x.shape[2] // height, x.shape[3] // width)
    y = torch.empty(size, memory_format=torch.channels_last)
    positions = torch.empty(size, dtype=torch.int8, memory_format=torch.channels_last)
    call("max_pool_forward", _shape_of(layer, x.shape), x, y, positions)
    return y, positions


def input_gradient(layer: nn.MaxPool2d, x: torch.Size, dy: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The gradient of the input, whose size was `x`."""
    dx = torch.empty(x, memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    call("max_pool_input_gradient", _shape_of(layer, x), dy, positions, dx)
    return dx


def indices_of(layer: nn.MaxPool2d, x: torch.Size, positions: torch.Tensor) -> torch.Tensor:
    """The positions as torch counts them: in the whole image, row by row."""
    height, width = _window(layer)
    tops = height * torch.arange(positions.shape[2]).view(-1, 1)
    lefts = width * torch.arange(positions.shape[3])
    inside = positions.long()
    return (tops + inside // width) * x[3] + lefts + inside % width


class _PoolShape(ctypes.Structure):
    """Mirrors `PoolShape` in `max_pool.cpp`."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("samples", "height", "width", "channels", "window_height", "window_width")
    )


def _shape_of(layer: nn.MaxPool2d, x: torch.Size) -> _PoolShape:
    samples, channels, height, width = x
    return _PoolShape(samples, height, width, channels, *_window(layer))


def _window(layer: nn.MaxPool2d) -> tuple[int, int]:
    return _pair(layer.kernel_size)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (value, value) if isinstance(value, int) else value
    return rows, columns
