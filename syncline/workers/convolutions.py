"""Convolutions whose weight gradients are a product of matrices, where that is faster than torch's own way.

Here: `by_matrices`, which says which layers of a model do so, `candidates`, which finds those that could, and the two
ways to compute the gradient, for whoever compares them. Not here: measuring which way is faster (`calibrate.py`), and
what becomes of it (`tuning.py`).

With the rows of D the gradient of each output pixel, and the rows of X the patch of the input that this pixel looks at,

    dW = D' X,        D: (pixels, channels out),   X: (pixels, patch)

torch leaves that to oneDNN, which never writes X down. On processors without AVX-512 that costs more than it saves
where images are small and channels many, as at the end of a ResNet, or where there is one channel, as at the beginning
of LeNet: there, oneDNN takes two to three times as long as writing X down and multiplying. Elsewhere oneDNN is faster,
so it is measured layer by layer. The values are the same, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = ["by_matrices", "candidates", "gradient_by_matrices", "gradient_by_torch", "suits"]

_MOST_PATCHES_BYTES = 64 * 2**20
"""Patches that take more are not written down: that memory is not for us to take, and it would be slow."""


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """The layers that could, with their names."""
    for name, module in model.named_modules():
        if type(module) in (nn.Conv2d, _ByMatrices) and _is_plain(module):
            yield name, module


def by_matrices(model: nn.Module, names: Collection[str]) -> None:
    """Let these layers of `model` multiply matrices, and all others be torch's own.

    The layers are changed in place: parameters, hooks and the keys of `state_dict` stay what they are. Where a gradient
    by matrices makes no sense (other devices, other precisions, no gradients wanted) they compute as torch does.
    """
    for name, module in candidates(model):
        module.__class__ = _ByMatrices if name in names else nn.Conv2d


def suits(layer: nn.Conv2d, x: torch.Tensor, *, needs_gradients: bool = True) -> bool:
    """Whether such a layer would multiply matrices for this input."""
    return (
        x.dim() == 4
        and x.dtype == layer.weight.dtype == torch.float32
        and x.device.type == "cpu"
        and (torch.is_grad_enabled() or not needs_gradients)
        and not torch.is_autocast_enabled("cpu")
        and _patches_bytes(layer, x.shape) <= _MOST_PATCHES_BYTES
    )


def gradient_by_torch(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of the layer's weight, as torch computes it."""
    return _backward_of_torch(layer, x, dy, (False, True))[1]


def gradient_by_matrices(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The same, as a product of matrices."""
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


class _ByMatrices(nn.Conv2d):
    """A convolution with the other gradient. Objects get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """As torch does; only the way back is another."""
        if not suits(self, input):
            return super().forward(input)
        output: torch.Tensor = _Convolve.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's own layer: how it computes is decided by who trains it."""
        del protocol
        return _torchs_own, (), self.__dict__


def _torchs_own() -> nn.Conv2d:
    """An empty layer for unpickling, which then restores its state."""
    return nn.Conv2d.__new__(nn.Conv2d)


class _Convolve(torch.autograd.Function):
    """y = x * W + b, with the gradient of W by matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: nn.Conv2d
    ) -> torch.Tensor:
        """Torch's."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return nn.functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each gradient that is needed."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if x.is_contiguous(memory_format=torch.channels_last):
            dy = dy.contiguous(memory_format=torch.channels_last)
        return (
            _backward_of_torch(ctx.layer, x, dy, (True, False), weight)[0] if needs_x else None,
            gradient_by_matrices(ctx.layer, x, dy) if needs_weight else None,
            dy.sum((0, 2, 3)) if needs_bias else None,
            None,
        )


def _backward_of_torch(
    layer: nn.Conv2d,
    x: torch.Tensor,
    dy: torch.Tensor,
    wanted: tuple[bool, bool],
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of input and weight."""
    weight = layer.weight if weight is None else weight
    step, padding, gap = list(layer.stride), list(_pair(layer.padding)), list(layer.dilation)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, step, padding, gap, False, [0, 0], 1, [*wanted, False]
    )
    return dx, dw


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
