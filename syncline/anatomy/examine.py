"""Looking at a model layer by layer, without weights and without data.

Here: one forward pass on torch's meta device, in which every layer is seen with its output, its parameters and its
floating-point operations, as torch.utils.flop_counter counts them (a multiplication and an addition are two). Not
here: how that is shown (`terminal.py`, `svg.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from syncline.declare.declared import INPUT, PREVIOUS
from syncline.declare.network import Network, first_of

__all__ = ["Anatomy", "Part", "examine"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One layer, or the input. Sizes are for one sample."""

    name: str
    kind: str
    detail: str
    """The layer's own settings, as torch prints them."""
    sources: tuple[int, ...]
    """Which parts it takes its input from; empty if that is not known."""
    shape: tuple[int, ...]
    parameters: int
    activation_bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A whole network. The first part is its input."""

    title: str
    parts: tuple[Part, ...]
    parameters: int
    flops: int

    @property
    def activation_bytes(self) -> int:
        """What all layers give, which the backward pass may need, for one sample."""
        return sum(part.activation_bytes for part in self.parts[1:])


def examine(model: nn.Module, sample: Tensor, *, title: str) -> Anatomy:
    """The parts of `model`, which gets `sample`, a batch of one; both on the meta device."""
    names = {id(module): name for name, module in _layers(model)}
    parts = [_input(sample)]
    model.eval()
    counter = FlopCounterMode(display=False)
    before: dict[int, int] = {}
    hooks: list[Any] = []

    def begin(module: nn.Module, _inputs: Any) -> None:
        before[id(module)] = counter.get_total_flops()

    def end(module: nn.Module, _inputs: Any, output: Any) -> None:
        flops = counter.get_total_flops() - before[id(module)]
        parts.append(_part(names[id(module)], module, first_of(output), flops))

    for _, module in _layers(model):
        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        with torch.no_grad(), counter:
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return Anatomy(
        title=title,
        parts=tuple(_connected(model, parts)),
        parameters=sum(p.numel() for p in model.parameters()),
        flops=counter.get_total_flops(),
    )


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is shown as one layer: those that were declared, else all that have no layers inside."""
    if isinstance(model, Network):
        return list(model.named_children())
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        inner = [] if _is_one(child) else _layers(child)
        found += [(f"{name}.{path}", module) for path, module in inner] or [(name, child)]
    return found


def _is_one(module: nn.Module) -> bool:
    """Whether a module is a layer, though torch makes it of others."""
    whole = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer)
    return isinstance(module, whole) or hasattr(module, "parametrizations") or not list(module.children())


def _part(name: str, module: nn.Module, output: Tensor, flops: int) -> Part:
    shape = tuple(output.shape[1:])
    return Part(
        name=name,
        kind=type(module).__name__.removeprefix("Parametrized"),
        detail=" ".join(module.extra_repr().split()),
        sources=(),
        shape=shape,
        parameters=sum(p.numel() for p in module.parameters()),
        activation_bytes=math.prod(shape) * output.element_size(),
        flops=flops,
    )


def _input(sample: Tensor) -> Part:
    shape = tuple(sample.shape[1:])
    size = math.prod(shape) * sample.element_size()
    return Part(
        name=INPUT, kind="", detail=str(sample.dtype).removeprefix("torch."), sources=(), shape=shape, parameters=0,
        activation_bytes=size, flops=0,
    )  # fmt: skip


def _connected(model: nn.Module, parts: Sequence[Part]) -> list[Part]:
    """With who takes what from whom; a model that is code keeps that to itself."""
    if isinstance(model, Network):
        at = {part.name: k for k, part in enumerate(parts)}
        sources = [
            tuple(k if source == PREVIOUS else at[source] for source in step.sources)
            for k, step in enumerate(model.steps)
        ]
    elif type(model) is nn.Sequential and all(_is_one(child) for child in model.children()):
        sources = [(k,) for k in range(len(parts) - 1)]
    else:
        return list(parts)
    return [parts[0], *(replace(part, sources=s) for part, s in zip(parts[1:], sources, strict=True))]
