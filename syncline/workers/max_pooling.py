"""Max pooling by compiled code, where that is faster than torch's own way.

Here: `choose_pools`, which says which layers of a model do so, `pool_candidates`, which finds those that could, and
`pool`, forward and backward in both ways for whoever compares them. Not here: measuring (`compare_layers.py`), what
decides (`plan/tuning.py`), and the compiled code (`kernels/`).

torch keeps the place of each maximum in eight bytes and fills the gradient with zeros before it writes to it. The
compiled code keeps one byte, and goes through memory once. The values are the same, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from syncline.kernels import max_pool
from syncline.plan.tuning import Way, Ways

__all__ = ["choose_pools", "pool", "pool_candidates", "pool_suits"]


def pool_candidates(model: nn.Module) -> Iterator[tuple[str, nn.MaxPool2d]]:
    """The layers that have a choice, with their names."""
    for name, module in model.named_modules():
        if type(module) in (nn.MaxPool2d, _Compiled):
            yield name, module


def choose_pools(model: nn.Module, ways: Mapping[str, Ways]) -> None:
    """Let these layers of `model` compute by compiled code, if that is their way, and all others be torch's own."""
    for name, module in pool_candidates(model):
        module.__class__ = _Compiled if ways.get(name, Ways()).forward == "compiled" else nn.MaxPool2d


def pool_suits(layer: nn.MaxPool2d, x: torch.Tensor, *, needs_gradients: bool = True) -> bool:
    """Whether compiled code makes sense for this input."""
    return (torch.is_grad_enabled() or not needs_gradients) and max_pool.suits(layer, x)


def pool(layer: nn.MaxPool2d, way: Way, x: torch.Tensor) -> torch.Tensor:
    """The output, from which autograd finds its way back."""
    is_compiled = way == "compiled"
    output: torch.Tensor = _Pool.apply(x, layer) if is_compiled else nn.MaxPool2d.forward(layer, x)  # type: ignore[no-untyped-call]
    return output


class _Compiled(nn.MaxPool2d):
    """A layer that computes by compiled code. Objects get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """What torch gives."""
        return pool(self, "compiled" if pool_suits(self, input) else "torch", input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's own layer: how it computes is decided by who trains it."""
        del protocol
        return _torchs_own, (), self.__dict__


def _torchs_own() -> nn.MaxPool2d:
    """An empty layer for unpickling, which then restores its state."""
    return nn.MaxPool2d.__new__(nn.MaxPool2d)


class _Pool(torch.autograd.Function):
    """The largest of each window."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.MaxPool2d) -> torch.Tensor:
        """The output."""
        y, places = max_pool.forward(layer, x)
        ctx.save_for_backward(places)
        ctx.layer, ctx.size = layer, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """The gradient of the input."""
        (places,) = ctx.saved_tensors
        return max_pool.input_gradient(ctx.layer, ctx.size, dy, places), None
