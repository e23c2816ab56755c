"""Convolutions that use another algorithm than torch's for some passes, where that is faster.

Here: `tunable_convolutions` finds the layers that have a choice, `use_algorithms` sets it, and `run_pass` runs one pass
by one algorithm, for comparison. Not here: measuring (`compare_layers.py`), deciding (`tuning.py`), and the compiled
code (`kernels/`).

A convolution has three passes: forward, and the gradients of its input and of its weight. torch delegates them to
oneDNN. The alternatives are compiled code for all three, direct or with fewer products (Winograd), and for the weight
gradient a matrix product (im2col). With the gradient of each output pixel as a row of D, and the input patch that this
pixel depends on as a row of X,

    dW = D' X,        D: (pixels, channels out),   X: (pixels, patch)

oneDNN never materializes X. On processors without AVX-512 that costs more than it saves where images are small and
channels many, as at the end of a ResNet, or where there is one channel, as at the beginning of LeNet: there, oneDNN
takes two to three times as long as materializing X and multiplying. Which algorithm is fastest differs from layer to
layer. The values are the same, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from syncline.compute.forward_scope import ForwardScope
from syncline.compute.kernels import convolve
from syncline.compute.tuning import Algorithm, Algorithms, Pass

_METHODS: dict[Algorithm, convolve.Method] = {"compiled": "plain", "winograd": "winograd"}
"""The algorithms that are compiled code."""
_MOST_PATCHES_BYTES = 64 * 2**20
"""The largest X that is materialized: more would compete with the model for memory, and be slow."""


def tunable_convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """The layers that can use other algorithms, by name."""
    for name, module in model.named_modules():
        if is_convolution_of_torch(module) and _is_plain(module):
            yield name, module


def is_convolution_of_torch(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a layer computes what `nn.Conv2d` does, by any algorithm."""
    return type(module) in (nn.Conv2d, _TunedConv2d)


def use_algorithms(
    model: nn.Module, algorithms: Mapping[str, Algorithms], *, scope: ForwardScope | None = None
) -> None:
    """Use these algorithms for these layers of `model`, and torch's for all others.

    The layers are changed in place: parameters, hooks and the keys of `state_dict` stay the same. Where an algorithm is
    not applicable (other devices, other precisions, no gradients needed, no compiler) the layer falls back to torch.
    With a `scope`, all layers take and return channels-last images inside of it, and are torch's own outside.
    """
    for name, module in tunable_convolutions(model):
        module.__dict__.pop(_ALGORITHMS, None)
        module.__dict__.pop(_SCOPE, None)
        module.__class__ = nn.Conv2d
        if name in algorithms or scope is not None:
            module.__dict__[_ALGORITHMS] = algorithms.get(name, Algorithms())
            module.__dict__[_SCOPE] = scope
            module.__class__ = _TunedConv2d


def is_applicable(layer: nn.Conv2d, x: torch.Tensor, *, needs_gradients: bool = True) -> bool:
    """Whether other algorithms than torch's are worth considering for this input."""
    return (
        x.dim() == 4
        and x.dtype == layer.weight.dtype == torch.float32
        and x.device.type == "cpu"
        and (torch.is_grad_enabled() or not needs_gradients)
        and not torch.is_autocast_enabled("cpu")
    )


def supports(
    layer: nn.Conv2d, x: torch.Tensor, which: Pass, algorithm: Algorithm, *, samples: int | None = None
) -> bool:
    """Whether `algorithm` supports this pass for inputs like x, with another number of `samples` if given."""
    if algorithm in _METHODS:
        return convolve.is_applicable(layer, x, _METHODS[algorithm])
    if algorithm == "matrices":
        size = torch.Size((x.shape[0] if samples is None else samples, *x.shape[1:]))
        return which == "weight" and _patches_bytes(layer, size) <= _MOST_PATCHES_BYTES
    return True


def run_pass(layer: nn.Conv2d, which: Pass, algorithm: Algorithm, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The result of one pass: the output, or the gradient of input or weight. `dy` is the gradient of the output."""
    if which == "forward":
        return _forward(layer, algorithm, x, layer.weight, layer.bias)
    if which == "input":
        return _input_gradient(layer, algorithm, x, dy, layer.weight)
    return _weight_gradients(layer, algorithm, x, dy, layer.weight, needs_bias=layer.bias is not None)[0]


# Each pass by each algorithm


def _forward(
    layer: nn.Conv2d, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if algorithm in _METHODS:
        return convolve.forward(layer, x, weight, bias, _METHODS[algorithm])
    return nn.functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)


def _input_gradient(
    layer: nn.Conv2d, algorithm: Algorithm, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    if algorithm in _METHODS:
        return convolve.input_gradient(layer, x, dy, weight, _METHODS[algorithm])
    return _backward_of_torch(layer, x, dy, weight, (True, False, False))[0]


def _weight_gradients(
    layer: nn.Conv2d, algorithm: Algorithm, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, *, needs_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias."""
    if algorithm in _METHODS:
        return convolve.weight_gradient(layer, x, dy, _METHODS[algorithm])
    if algorithm == "matrices":
        return _by_matrices(layer, x, dy), dy.sum((0, 2, 3)) if needs_bias else None
    _, dweight, dbias = _backward_of_torch(layer, x, dy, weight, (False, True, needs_bias))
    return dweight, dbias


def _by_matrices(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    out = dy.shape[1]
    rows = dy.permute(0, 2, 3, 1).reshape(-1, out)  # a view, if the image is channels-last
    product = rows.t() @ _patches(layer, x, dy.shape[2], dy.shape[3])
    return product.view(out, *layer.kernel_size, x.shape[1]).permute(0, 3, 1, 2)


def _patches(layer: nn.Conv2d, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """For each output pixel, the patch of `x` that it depends on, in the order (row, column, channel)."""
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


_ALGORITHMS = "_syncline_algorithms"
_SCOPE = "_syncline_scope"


class _TunedConv2d(nn.Conv2d):
    """A convolution that uses other algorithms. Instances get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """The same result as torch's, up to the order of sums."""
        scope: ForwardScope | None = self.__dict__[_SCOPE]
        if not is_applicable(self, input) or (scope is not None and not scope.is_active):
            return super().forward(input)
        if scope is not None:
            input = _channels_last(input)
        output: torch.Tensor = _Convolve.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return output

    def _get_name(self) -> str:
        return nn.Conv2d.__name__  # where a user prints the model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's layer: algorithms are chosen for each machine anew."""
        del protocol
        kept = {name: value for name, value in self.__dict__.items() if name not in (_ALGORITHMS, _SCOPE)}
        return object.__new__, (nn.Conv2d,), kept  # nothing of Syncline's: the file may be loaded without it


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same images in channels-last memory.

    Those of one channel are so already, but their strides must say it, or torch returns contiguous ones.
    """
    if x.shape[1] == 1:
        return x.reshape(x.shape[0], *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def _algorithm(layer: nn.Conv2d, x: torch.Tensor, which: Pass) -> Algorithm:
    """The chosen algorithm, if it supports this input; otherwise torch's."""
    algorithms: Algorithms = layer.__dict__[_ALGORITHMS]
    algorithm = algorithms.of(which)
    return algorithm if supports(layer, x, which, algorithm) else "torch"


class _Convolve(torch.autograd.Function):
    """y = x * W + b."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: nn.Conv2d
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return _forward(layer, _algorithm(layer, x, "forward"), x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # second derivatives are wanted, which only torch's own functions have
            wanted = (needs_x, needs_weight, needs_bias)
            return *_backward_of_torch(layer, x, dy, weight, wanted), None
        if x.is_contiguous(memory_format=torch.channels_last):
            dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _input_gradient(layer, _algorithm(layer, x, "input"), x, dy, weight) if needs_x else None
        dweight = dbias = None
        if needs_weight:
            algorithm = _algorithm(layer, x, "weight")
            dweight, dbias = _weight_gradients(layer, algorithm, x, dy, weight, needs_bias=needs_bias)
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
