"""Summarizing a model layer by layer, without weights or data.

Here: one forward pass on torch's meta device, which records the output, the parameters and the FLOPs of every
layer, as torch.utils.flop_counter counts them (a multiply-add is two). Not here: showing it (`terminal.py`,
`svg.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from syncline.models.declared.declaration import INPUT, PREVIOUS
from syncline.models.declared.network import DeclaredNetwork, first_of


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer, or the input. Sizes are for one sample."""

    name: str
    kind: str
    detail: str
    """The layer's own settings, as torch prints them."""
    sources: tuple[int, ...]
    """The layers that it takes its inputs from; empty if unknown."""
    shape: tuple[int, ...]
    parameters: int
    activation_bytes: int
    flops: int

    @property
    def label(self) -> str:
        kind = self.kind or "input"
        return f"{self.name}: {kind}" if self.kind and not self.name.isdigit() else kind


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A whole network. The first part is its input."""

    title: str
    parts: tuple[LayerSummary, ...]
    parameters: int
    flops: int

    @property
    def activation_bytes(self) -> int:
        """The size of all outputs for one sample, which the backward pass may need."""
        return sum(part.activation_bytes for part in self.parts[1:])


def summarize(model: nn.Module, sample: Tensor, *, title: str) -> ModelSummary:
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
    return ModelSummary(
        title=title,
        parts=tuple(_connected(model, parts)),
        parameters=sum(p.numel() for p in model.parameters()),
        flops=counter.get_total_flops(),
    )


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules shown as one layer: the declared ones, else all without submodules."""
    if isinstance(model, DeclaredNetwork):
        return list(model.named_children())
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        inner = [] if _is_one(child) else _layers(child)
        found += [(f"{name}.{path}", module) for path, module in inner] or [(name, child)]
    return found


def _is_one(module: nn.Module) -> bool:
    """Whether a module counts as one layer, even if torch builds it from others."""
    whole = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer)
    return isinstance(module, whole) or hasattr(module, "parametrizations") or not list(module.children())


def _part(name: str, module: nn.Module, output: Tensor, flops: int) -> LayerSummary:
    shape = tuple(output.shape[1:])
    return LayerSummary(
        name=name,
        kind=type(module).__name__.removeprefix("Parametrized"),
        detail=" ".join(module.extra_repr().split()),
        sources=(),
        shape=shape,
        parameters=sum(p.numel() for p in module.parameters()),
        activation_bytes=math.prod(shape) * output.element_size(),
        flops=flops,
    )


def _input(sample: Tensor) -> LayerSummary:
    shape = tuple(sample.shape[1:])
    size = math.prod(shape) * sample.element_size()
    return LayerSummary(
        name=INPUT, kind="", detail=str(sample.dtype).removeprefix("torch."), sources=(), shape=shape, parameters=0,
        activation_bytes=size, flops=0,
    )  # fmt: skip


def _connected(model: nn.Module, parts: Sequence[LayerSummary]) -> list[LayerSummary]:
    """With the connections, if they are known: a forward method in Python does not reveal them."""
    if isinstance(model, DeclaredNetwork):
        at = {part.name: k for k, part in enumerate(parts)}
        sources = [
            tuple(k if source == PREVIOUS else at[source] for source in step.sources)
            for k, step in enumerate(model.nodes)
        ]
    elif type(model) is nn.Sequential and all(_is_one(child) for child in model.children()):
        sources = [(k,) for k in range(len(parts) - 1)]
    else:
        return list(parts)
    return [parts[0], *(replace(part, sources=s) for part, s in zip(parts[1:], sources, strict=True))]
