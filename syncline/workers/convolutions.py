"""Convolutions of which some passes are computed in another way than torch's, where that is faster.

Here: `choose`, which says how the layers of a model compute, `candidates`, which finds those that have a choice, and
each pass in each way, for whoever compares them. Not here: measuring which way is faster (`compare_layers.py`),
what decides (`plan/tuning.py`), and the compiled code (`kernels/`).

A convolution has three passes: forward, and the gradients of its input and of its weight. torch leaves them to oneDNN.
The other ways are compiled code, for all of them, with all products of a convolution or with fewer (Winograd's
method), and for the weight gradient a product of matrices. With the rows of D the gradient of each output pixel, and
the rows of X the patch of the input that this pixel looks at,

    dW = D' X,        D: (pixels, channels out),   X: (pixels, patch)

oneDNN never writes X down. On processors without AVX-512 that costs more than it saves where images are small and
channels many, as at the end of a ResNet, or where there is one channel, as at the beginning of LeNet: there, oneDNN
takes two to three times as long as writing X down and multiplying. Which way is fastest differs from layer to layer.
The values are the same, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from syncline.kernels import convolve
from syncline.plan.tuning import Pass, Way, Ways

__all__ = ["candidates", "choose", "compute", "fits", "suits"]

_METHODS: dict[Way, convolve.Method] = {"compiled": "plain", "winograd": "winograd"}
"""The ways that are compiled code."""
_MOST_PATCHES_BYTES = 64 * 2**20
"""Patches that take more are not written down: that memory is not for us to take, and it would be slow."""


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """The layers for which there is a choice, with their names."""
    for name, module in model.named_modules():
        if type(module) in (nn.Conv2d, _Chosen) and _is_plain(module):
            yield name, module


def choose(model: nn.Module, ways: Mapping[str, Ways]) -> None:
    """Let these layers of `model` compute in these ways, and all others be torch's own.

    The layers are changed in place: parameters, hooks and the keys of `state_dict` stay what they are. Where another
    way makes no sense (other devices, other precisions, no gradients wanted, no compiler) they compute as torch does.
    """
    for name, module in candidates(model):
        module.__dict__.pop(_WAYS, None)
        module.__class__ = nn.Conv2d
        if name in ways:
            module.__dict__[_WAYS] = ways[name]
            module.__class__ = _Chosen


def suits(layer: nn.Conv2d, x: torch.Tensor, *, needs_gradients: bool = True) -> bool:
    """Whether another way than torch's makes sense for this input."""
    return (
        x.dim() == 4
        and x.dtype == layer.weight.dtype == torch.float32
        and x.device.type == "cpu"
        and (torch.is_grad_enabled() or not needs_gradients)
        and not torch.is_autocast_enabled("cpu")
    )


def fits(layer: nn.Conv2d, x: torch.Tensor, which: Pass, way: Way, *, samples: int | None = None) -> bool:
    """Whether this way is there for this pass of a layer that it `suits`, with other `samples` than those of x."""
    if way in _METHODS:
        return convolve.suits(layer, x, _METHODS[way])
    if way == "matrices":
        size = torch.Size((x.shape[0] if samples is None else samples, *x.shape[1:]))
        return which == "weight" and _patches_bytes(layer, size) <= _MOST_PATCHES_BYTES
    return True


def compute(layer: nn.Conv2d, which: Pass, way: Way, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """What one pass gives: the output, or the gradient of input or weight. `dy` is the gradient of the output."""
    if which == "forward":
        return _forward(layer, way, x, layer.weight, layer.bias)
    if which == "input":
        return _input_gradient(layer, way, x, dy, layer.weight)
    return _weight_gradients(layer, way, x, dy, layer.weight, needs_bias=layer.bias is not None)[0]


# Each pass in each way


def _forward(
    layer: nn.Conv2d, way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if way in _METHODS:
        return convolve.forward(layer, x, weight, bias, _METHODS[way])
    return nn.functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)


def _input_gradient(
    layer: nn.Conv2d, way: Way, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    if way in _METHODS:
        return convolve.input_gradient(layer, x, dy, weight, _METHODS[way])
    return _backward_of_torch(layer, x, dy, weight, (True, False, False))[0]


def _weight_gradients(
    layer: nn.Conv2d, way: Way, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *, needs_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Those of weight and bias."""
    if way in _METHODS:
        return convolve.weight_gradient(layer, x, dy, _METHODS[way])
    if way == "matrices":
        return _by_matrices(layer, x, dy), dy.sum((0, 2, 3)) if needs_bias else None
    _, dweight, dbias = _backward_of_torch(layer, x, dy, weight, (False, True, needs_bias))
    return dweight, dbias


def _by_matrices(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    out = dy.shape[1]
    rows = dy.permute(0, 2, 3, 1).reshape(-1, out)  # a view, if the image lies channels-last
    product = rows.t() @ _patches(layer, x, dy.shape[2], dy.shape[3])
    return product.view(out, *layer.kernel_size, x.shape[1]).permute(0, 3, 1, 2)


def _patches(layer: nn.Conv2d, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """For each pixel of the output, the part of `x` that it looks at, in the order (row, column, channel)."""
    (row_pad, column_pad), (row_step, column_step) = _pair(layer.padding), layer.stride
    image = x.permute(0, 2, 3, 1)
    if row_pad or column_pad:
        image = nn.functional.pad(image, (0, 0, column_pad, column_pad, row_pad, row_pad))
    image = image.contiguous()
    by_sample, by_row, by_column, by_channel = image.stride()
    (rows, columns), (row_gap, column_gap) = layer.kernel_size, layer.dilation
    windows = image.as_strided(
        (x.shape[0], height, width, rows, columns, x.shape[1]),
        (by_sample, by_row * row_step, by_column * column_step, by_row * row_gap, by_column * column_gap, by_channel),
    )
    return windows.reshape(x.shape[0] * height * width, -1)  # a copy, unless a patch is one pixel


def _backward_of_torch(
    layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, weight and bias."""
    step, padding, gap = list(layer.stride), list(_pair(layer.padding)), list(layer.dilation)
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dy, x, weight, [layer.out_channels], step, padding, gap, False, [0, 0], 1, list(wanted)
    )
    return dx, dweight, dbias


# Layers


_WAYS = "_syncline_ways"


class _Chosen(nn.Conv2d):
    """A convolution that computes in other ways. Objects get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """What torch gives, up to the order of sums."""
        if not suits(self, input):
            return super().forward(input)
        output: torch.Tensor = _Convolve.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's own layer: how it computes is decided by who trains it."""
        del protocol
        return _torchs_own, (), {name: value for name, value in self.__dict__.items() if name != _WAYS}


def _torchs_own() -> nn.Conv2d:
    """An empty layer for unpickling, which then restores its state."""
    return nn.Conv2d.__new__(nn.Conv2d)


def _way(layer: nn.Conv2d, x: torch.Tensor, which: Pass) -> Way:
    """The one that was chosen, if it is there for this input."""
    ways: Ways = layer.__dict__[_WAYS]
    way = ways.of(which)
    return way if fits(layer, x, which, way) else "torch"


class _Convolve(torch.autograd.Function):
    """y = x * W + b."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: nn.Conv2d
    ) -> torch.Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return _forward(layer, _way(layer, x, "forward"), x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each gradient that is needed."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if x.is_contiguous(memory_format=torch.channels_last):
            dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _input_gradient(layer, _way(layer, x, "input"), x, dy, weight) if needs_x else None
        dweight = dbias = None
        if needs_weight:
            way = _way(layer, x, "weight")
            dweight, dbias = _weight_gradients(layer, way, x, dy, weight, needs_bias=needs_bias)
        elif needs_bias:
            dbias = dy.sum((0, 2, 3))
        return dx, dweight, dbias if needs_bias else None, None


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _patches_bytes(layer: nn.Conv2d, x: torch.Size) -> int:
    height, width = _output_sides(layer, x)
    return 4 * x[0] * height * width * x[1] * layer.kernel_size[0] * layer.kernel_size[1]


def _output_sides(layer: nn.Conv2d, x: torch.Size) -> tuple[int, int]:
    height, width = (
        (side + 2 * padding - gap * (kernel - 1) - 1) // step + 1
        for side, padding, gap, kernel, step in zip(
            x[2:], _pair(layer.padding), layer.dilation, layer.kernel_size, layer.stride, strict=True
        )
    )
    return height, width


def _pair(padding: Any) -> tuple[int, int]:
    rows, columns = padding
    return rows, columns
