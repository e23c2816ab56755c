"""Convolutions of channels-last images by compiled code, on a CPU.

Here: the three passes as functions of tensors, each by one of two methods, and `is_applicable`, which says which layers
and inputs they support. The code itself, and why it is fast, is in `convolve.cpp` ("plain" sums of products) and
`winograd.cpp` (fewer products). Not here: which layers use it (`compute/convolutions.py`), and compiling (`build.py`).

torch delegates convolutions to oneDNN. With AVX2 but no AVX-512, oneDNN reaches the processor's peak in the forward
pass of wide layers, but only two thirds of it in weight gradients, and less where channels are not a multiple of 8.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Literal

import torch
from torch import nn

from syncline.compute.kernels.build import call, library

Method = Literal["plain", "winograd"]
_PREFIXES: dict[Method, str] = {"plain": "convolve", "winograd": "winograd"}
"""The prefixes of the compiled functions' names."""


def is_applicable(layer: nn.Conv2d, x: torch.Tensor, method: Method = "plain") -> bool:
    """Whether the kernels support this layer, which has one group and zero padding, with this input."""
    if method == "winograd" and (layer.kernel_size not in ((3, 3), (5, 5)) or layer.stride != (1, 1)):
        return False
    return (
        x.dtype == layer.weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[1] == layer.in_channels
        and x.numel() > 0
        and min(_shape_of(layer, x.shape).output_height, _shape_of(layer, x.shape).output_width) > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and layer.dilation == (1, 1)
        and library() is not None
    )


def forward(
    layer: nn.Conv2d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, method: Method = "plain"
) -> torch.Tensor:
    """The output of the layer."""
    shape = _shape_of(layer, x.shape)
    y = _channels_last(x.shape[0], layer.out_channels, shape.output_height, shape.output_width)
    call(f"{_PREFIXES[method]}_forward", shape, x, _laid_out(weight), bias, y)
    return y


def input_gradient(
    layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, method: Method = "plain"
) -> torch.Tensor:
    """The gradient of the input; `dy` is the gradient of the output."""
    dx = _channels_last(*x.shape)
    call(f"{_PREFIXES[method]}_input_gradient", _shape_of(layer, x.shape), _laid_out(dy), _laid_out(weight), dx)
    return dx


def weight_gradient(
    layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor, method: Method = "plain"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias."""
    dweight, dbias = _channels_last(*layer.weight.shape), torch.empty(layer.out_channels)
    call(f"{_PREFIXES[method]}_weight_gradient", _shape_of(layer, x.shape), x, _laid_out(dy), dweight, dbias)
    return dweight, dbias


class _ConvolutionShape(ctypes.Structure):
    """Mirrors `Shape` in `shape.h`."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "samples", "height", "width", "channels", "outputs",
            "kernel_height", "kernel_width", "row_step", "column_step", "row_padding", "column_padding",
            "output_height", "output_width", "threads",
        )
    )  # fmt: skip


def _shape_of(layer: nn.Conv2d, x: torch.Size) -> _ConvolutionShape:
    assert not isinstance(layer.padding, str), "tunable layers have numeric padding"
    return _make_shape(
        tuple(x), layer.out_channels, layer.kernel_size, layer.stride, layer.padding, torch.get_num_threads()
    )


@functools.lru_cache(maxsize=1024)
def _make_shape(
    x: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, ...],
    step: tuple[int, ...],
    padding: tuple[int, ...],
    threads: int,
) -> _ConvolutionShape:
    samples, channels, *sides = x
    reached = [
        (side + 2 * pad - size) // by + 1 for side, pad, size, by in zip(sides, padding, kernel, step, strict=True)
    ]
    return _ConvolutionShape(samples, *sides, channels, outputs, *kernel, *step, *padding, *reached, threads)


def _channels_last(*shape: int) -> torch.Tensor:
    return torch.empty(shape, memory_format=torch.channels_last)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
