"""Pooling layers that replace torch's: max pooling by compiled code, and average pooling that keeps the memory format.

Here: `tunable_pools` finds the layers that have a choice, `use_pool_algorithms` sets it, and `pool` runs one algorithm,
for comparison; `preserve_memory_format` is for average pooling. Not here: measuring (`compare_layers.py`), deciding
(`tuning.py`), and the compiled code (`kernels/`).

For max pooling, torch stores the position of each maximum in eight bytes, and zeroes the gradient before it writes to
it. The compiled code stores one byte, and makes one pass over memory. The values are bit-identical.

The gradient of an average over the whole image is one number per channel, which torch expands to a contiguous image
even if the input is channels-last. In a ResNet that gradient flows along all shortcuts up to the first layer, and at
each of them it is added to a channels-last one, which costs a copy or strided reads. Converting it once, where it
originates, avoids that. The values are the same, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from syncline.compute.kernels import max_pool
from syncline.compute.tuning import Algorithm, Algorithms


def tunable_pools(model: nn.Module) -> Iterator[tuple[str, nn.MaxPool2d]]:
    """The layers that could use compiled code, by name."""
    for name, module in model.named_modules():
        if type(module) in (nn.MaxPool2d, _CompiledMaxPool2d):
            yield name, module


def use_pool_algorithms(model: nn.Module, algorithms: Mapping[str, Algorithms]) -> None:
    """Use compiled code for the layers of `model` for which that was chosen, and torch for all others."""
    for name, module in tunable_pools(model):
        module.__class__ = (
            _CompiledMaxPool2d if algorithms.get(name, Algorithms()).forward == "compiled" else nn.MaxPool2d
        )


def is_pool_applicable(layer: nn.MaxPool2d, x: torch.Tensor, *, needs_gradients: bool = True) -> bool:
    """Whether compiled code can be used for this input."""
    return (torch.is_grad_enabled() or not needs_gradients) and max_pool.is_applicable(layer, x)


def pool(layer: nn.MaxPool2d, algorithm: Algorithm, x: torch.Tensor) -> torch.Tensor:
    """The output, differentiable by autograd."""
    is_compiled = algorithm == "compiled"
    output: torch.Tensor = _Pool.apply(x, layer) if is_compiled else nn.MaxPool2d.forward(layer, x)  # type: ignore[no-untyped-call]
    return output


class _CompiledMaxPool2d(nn.MaxPool2d):
    """A layer that uses compiled code. Instances get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        return pool(self, "compiled" if is_pool_applicable(self, input) else "torch", input)

    def _get_name(self) -> str:
        return nn.MaxPool2d.__name__  # where a user prints the model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's layer: the algorithm is chosen for each machine anew."""
        del protocol
        return object.__new__, (nn.MaxPool2d,), self.__dict__


class _Pool(torch.autograd.Function):
    """The maximum of each window."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.MaxPool2d) -> torch.Tensor:
        y, positions = max_pool.forward(layer, x)
        ctx.save_for_backward(positions)
        ctx.layer, ctx.size = layer, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """The gradient of the input."""
        (positions,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are wanted, which only torch's own functions have
            indices = max_pool.indices_of(ctx.layer, ctx.size, positions)
            return nn.functional.max_unpool2d(dy, indices, ctx.layer.kernel_size, output_size=ctx.size[2:]), None
        return max_pool.input_gradient(ctx.layer, ctx.size, dy, positions), None


def preserve_memory_format(model: nn.Module) -> None:
    """Make the average-pooling layers of `model` return gradients in the memory format of their input."""
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d:
            module.__class__ = _FormatPreservingAvgPool2d


class _FormatPreservingAvgPool2d(nn.AdaptiveAvgPool2d):
    """Torch's layer with another backward pass. Instances get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        if input.requires_grad and input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            input.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return super().forward(input)

    def _get_name(self) -> str:
        return nn.AdaptiveAvgPool2d.__name__  # where a user prints the model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's layer: the memory format is chosen for each machine anew."""
        del protocol
        return object.__new__, (nn.AdaptiveAvgPool2d,), self.__dict__


def _channels_last(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
