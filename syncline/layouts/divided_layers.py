"""Layers that the workers of a replica compute together.

Here: what takes the place of a module's forward, for each kind of layer. Not here: which layers (`tensor_split.py`),
attention (`divided_attention.py`), how the modules get it (`divided_model.py`), and passing activations around
(`activation_exchange.py`).

The input x of a layer, the gradient dy of its output, and the whole weight W, which lies in shared memory, are the same
on all workers. So each of the three products of a layer can be divided by the numbers that it makes. With a row of x
for each position, and a row of W for each output,

    y  = x W'      worker r makes the columns of y that are its share of the outputs, and all gather y
    dx = dy W      worker r makes the columns of dx that are its share of the inputs, and all gather dx
    dW = dy' x     worker r makes the rows of W that it owns; nothing is exchanged

Each number is the same sum as in one process. A division by outputs alone, as between workers that share no memory,
would have to add up n partial sums for dx, each as large as dx. Convolutions are divided in the same way, by channels.
An embedding reads the rows of all workers where they are, so only its gradient is divided.

Gradients go to *leaves*: parameters that are the worker's rows of W. Where a model uses W in another way, too, such as
in a penalty, W itself gets the gradient of that, on all workers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import grad as gradients

from syncline.layouts.activation_exchange import ActivationExchange
from syncline.layouts.tensor_split import Kind, own_rows

LayerT = TypeVar("LayerT")
Forward = Callable[..., torch.Tensor]
Leaves = Mapping[torch.Tensor, nn.Parameter]
"""For each divided parameter of a model, this worker's rows of it."""


class Divided:
    """A module computes as before while it has other parameters, as in `torch.func.functional_call`."""

    def __init__(self, exchange: ActivationExchange, leaves: Leaves) -> None:
        self.exchange, self.leaves = exchange, leaves

    def leaf_of(self, p: torch.Tensor | None) -> nn.Parameter | None:
        """The leaf, frozen if the parameter is: that may change from step to step."""
        if p is None:
            return None
        leaf = self.leaves[p]
        if leaf.requires_grad != p.requires_grad:
            leaf.requires_grad_(p.requires_grad)
        return leaf

    def knows(self, module: nn.Module) -> bool:
        """Whether its parameters are those that are divided."""
        return all(p in self.leaves for p in (module.weight, module.bias) if p is not None)

    def own(self, count: int) -> slice:
        return own_rows(count, self.exchange.size, self.exchange.rank)


@dataclass(frozen=True)
class _Whole(Generic[LayerT]):
    """The parameters of a layer, those of all workers, and how it computes with them."""

    layer: LayerT
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype | None
    """What autocast computes in; None for the weight's own type."""
    how: tuple[Any, ...] = ()
    """Of a convolution: its stride, padding and dilation."""

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Those of the gradients of weight and bias."""
        return self.weight.dtype, None if self.bias is None else self.bias.dtype

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.dtype is None else weight.to(self.dtype)

    def bias_of(self, rows: slice) -> torch.Tensor | None:
        return None if self.bias is None else self.cast(self.bias[rows])


class DividedLinear(Divided):
    """`nn.Linear`: a row of the weight for each output."""

    has_row_per_output = True

    def __call__(self, module: nn.Module, own: Forward, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (x,) = (*inputs, *named.values())
        return self.compute(x, module.weight, module.bias) if self.knows(module) else own(x)  # type: ignore[arg-type]

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x, dtype = _autocast(x)
        whole = _Whole(self, weight.detach(), _detached(bias), dtype)
        y: torch.Tensor = _Product.apply(x, self.leaf_of(weight), self.leaf_of(bias), whole)  # type: ignore[no-untyped-call]
        return y


class DividedTransposed(DividedLinear):
    """`Conv1D` of transformers: a row of the weight for each input."""

    has_row_per_output = False


class _Product(torch.autograd.Function):
    """y = x W' + b for the last dimension of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: Any, bias_leaf: Any, whole: _Whole[DividedLinear]) -> torch.Tensor:
        del leaf, bias_leaf  # they are there for their gradients
        ctx.save_for_backward(x, whole.weight)
        layer = whole.layer
        ctx.layer, ctx.dtypes = layer, whole.dtypes
        by_output = whole.weight if layer.has_row_per_output else whole.weight.t()
        rows = layer.own(len(by_output))
        part = F.linear(x, whole.cast(by_output[rows]), whole.bias_of(rows))
        y = torch.empty(*x.shape[:-1], len(by_output), dtype=part.dtype)
        layer.exchange.gather(part.reshape(-1, part.shape[-1], 1), y.view(-1, len(by_output), 1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_output = weight if layer.has_row_per_output else weight.t()
        rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dweight = dbias = None
        if needs_x:
            part = rows @ by_output[:, layer.own(x.shape[-1])].to(dy.dtype)
            dx = torch.empty(x.shape, dtype=part.dtype)
            layer.exchange.gather(part.unsqueeze(-1), dx.view(-1, x.shape[-1], 1))
        own = layer.own(len(weight))
        if needs_weight:
            first, second = (rows, x_rows) if layer.has_row_per_output else (x_rows, rows)
            dweight = (first[:, own].t() @ second).to(ctx.dtypes[0])
        if needs_bias:
            dbias = rows[:, layer.own(rows.shape[1])].sum(0).to(ctx.dtypes[1])
        return dx, dweight, dbias, None


class DividedConvolution(Divided):
    """`nn.Conv1d` and `nn.Conv2d` of one group."""

    def __call__(self, module: nn.Conv1d | nn.Conv2d, own: Forward, input: torch.Tensor) -> torch.Tensor:
        if not self.knows(module):
            return own(input)
        (x, dtype), sides, padding = _autocast(input), len(module.kernel_size), module.padding
        is_single = x.dim() == sides + 1
        if is_single:
            x = x.unsqueeze(0)
        if isinstance(padding, str) or module.padding_mode != "zeros":
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x, padding = F.pad(x, list(module._reversed_padding_repeated_twice), mode=mode), (0,) * sides
        leaf, bias_leaf = self.leaf_of(module.weight), self.leaf_of(module.bias)
        how = (module.stride, padding, module.dilation)
        whole = _Whole(self, module.weight.detach(), _detached(module.bias), dtype, how)
        y: torch.Tensor = _Convolution.apply(x, leaf, bias_leaf, whole)  # type: ignore[no-untyped-call]
        return y.squeeze(0) if is_single else y


class _Convolution(torch.autograd.Function):
    """y = x * W + b, of a batch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, leaf: Any, bias_leaf: Any, whole: _Whole[DividedConvolution]
    ) -> torch.Tensor:
        del leaf, bias_leaf  # they are there for their gradients
        weight, layer, convolve = whole.weight, whole.layer, (F.conv1d, F.conv2d)[x.dim() - 3]
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.dtypes, ctx.how = layer, whole.dtypes, whole.how
        rows = layer.own(len(weight))
        part = convolve(x, whole.cast(weight[rows]), whole.bias_of(rows), *whole.how)
        # By the whole weight, which is the same on all workers: their parts may have one channel, and look like both.
        return _gathered(layer.exchange, part, len(weight), like=(x, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), layer, how = ctx.saved_tensors, ctx.layer, ctx.how
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_gradient, weight_gradient = _CONVOLUTION_GRADIENTS[x.dim() - 3]
        dx = dweight = dbias = None
        if needs_x:
            channels = layer.own(x.shape[1])
            shape = (x.shape[0], channels.stop - channels.start, *x.shape[2:])
            part = dy.new_empty(shape)
            if part.numel():
                part = input_gradient(shape, weight[:, channels].to(dy.dtype), dy, *how)
            dx = _gathered(layer.exchange, part, x.shape[1], like=(x,))
        rows = layer.own(len(weight))
        if needs_weight:
            shape = (rows.stop - rows.start, *weight.shape[1:])
            dweight = weight_gradient(x, shape, dy[:, rows], *how).to(ctx.dtypes[0])
        if needs_bias:
            dbias = dy[:, rows].sum((0, *range(2, dy.dim()))).to(ctx.dtypes[1])
        return dx, dweight, dbias, None


_CONVOLUTION_GRADIENTS: tuple[tuple[Callable[..., torch.Tensor], ...], ...] = (
    (gradients.conv1d_input, gradients.conv1d_weight),
    (gradients.conv2d_input, gradients.conv2d_weight),
)


def _gathered(
    exchange: ActivationExchange, part: torch.Tensor, channels: int, *, like: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Images of all channels, in the order of memory of the first of the tensors `like` that is channels-last."""
    shape, order = (part.shape[0], channels, *part.shape[2:]), torch.contiguous_format
    if any(_is_channels_last(t) for t in like):
        order = torch.channels_last
    whole = torch.empty(shape, dtype=part.dtype, memory_format=order)
    if order is torch.channels_last:
        exchange.gather(_pixels(part), _pixels(whole))
    else:
        exchange.gather(part.flatten(2), whole.flatten(2))
    return whole


def _is_channels_last(t: torch.Tensor) -> bool:
    """Whether torch takes images for channels-last ones, by their strides alone: those of one channel may be both."""
    if t.dim() != 4 or not t.numel():
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if t.stride(dim) < least or (dim == 0 and least == t.stride(1)):
            return False
        least = t.stride(dim) * t.shape[dim]
    return True


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """(pixels, channels, 1); a view, if the images are channels-last."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1], 1)


class DividedEmbedding(Divided):
    """`nn.Embedding`: a row of the weight for each token."""

    def __call__(self, module: nn.Embedding, own: Forward, input: torch.Tensor) -> torch.Tensor:
        if module.weight not in self.leaves:
            return own(input)
        found: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self.leaf_of(module.weight), module.weight.detach(), input, module.padding_idx, self.own(len(module.weight))
        )
        return found


class _Lookup(torch.autograd.Function):
    """The rows of W that are asked for."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, padding: int | None, own: slice
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.padding, ctx.own, ctx.shape = padding, own, leaf.shape
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, own = ctx.saved_tensors[0].reshape(-1), ctx.own
        is_own = (tokens >= own.start) & (tokens < own.stop)
        if ctx.padding is not None:
            is_own &= tokens != ctx.padding
        rows = dy.reshape(-1, dy.shape[-1])[is_own]
        dweight = dy.new_zeros(ctx.shape).index_add_(0, tokens[is_own] - own.start, rows)
        return dweight, None, None, None, None


LAYERS: Mapping[Kind, Callable[[ActivationExchange, Leaves], Callable[..., torch.Tensor]]] = {
    "linear": DividedLinear,
    "transposed": DividedTransposed,
    "convolution": DividedConvolution,
    "embedding": DividedEmbedding,
}
"""What modules compute instead, called with the module, its own forward, and the inputs; `attention` is elsewhere."""


def _autocast(x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
    """The input, and the type to compute in if it is not the weight's, as autocast has it for these layers."""
    if not torch.is_autocast_enabled("cpu") or x.dtype == torch.float64:
        return x, None
    dtype = torch.get_autocast_dtype("cpu")
    return x.to(dtype), dtype


def _detached(p: torch.Tensor | None) -> torch.Tensor | None:
    return None if p is None else p.detach()
