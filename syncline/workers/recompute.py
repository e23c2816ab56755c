"""Computing a part of the forward pass again during the backward pass, instead of keeping all of its results.

Here: `recompute_activations`, which finds the blocks of a model and makes each keep nothing but its input (activation
checkpointing: Chen, Xu, Zhang & Guestrin, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016). The
recomputing itself is torch's. Not here: statistics that all workers find together (`batch_norm.py`), and cutting a
batch into pieces (`compute.py`).

A block is recomputed whole. Blocks are what repeats: two or more siblings of one class that have layers inside, such as
the residual blocks of a ResNet or the layers of a transformer. Where nothing repeats, an `nn.Sequential` of n layers is
cut into about sqrt(n) stretches, which is what needs least: their inputs, and the inside of one of them at a time. A
stretch begins with a layer that has parameters: a layer that changes its input in place, as activations may, would
spoil what is kept.

Gradients are the same bits: random numbers are drawn again as they were, and statistics of the global batch are known
already. What a forward pass changes (running statistics) it changes the first time only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from syncline.algorithms.partition import split
from syncline.workers.batch_norm import found_once

__all__ = ["recompute_activations"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute_activations(model: nn.Module) -> int:
    """Make the blocks of `model` keep only their inputs in training; how many blocks there are.

    The modules are changed in place: parameters, buffers, hooks and `state_dict` keys stay the same objects.
    """
    blocks = _blocks(model)
    for block in blocks:
        if _is_chain(block):
            block.__class__ = _Stretches
        else:
            block.__class__ = _recomputing_class(type(block))  # type: ignore[arg-type]  # mypy finds classes unhashable
    return len(blocks)


class _Recomputing(nn.Module):
    """The training mode of a block. Objects get this class by assignment; see `_recomputing_class`."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the block's own forward gives."""
        return _recomputed(self, super().forward, *inputs, **options)


@functools.cache
def _recomputing_class(plain: type[nn.Module]) -> type[nn.Module]:
    """`plain` with the recomputing forward in front."""
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Recomputing, plain), names)


class _Stretches(nn.Sequential):
    """A chain of layers, of which each stretch keeps only its input."""

    def forward(self, input: Any) -> Any:  # the name is torch's
        """What the layers give, one after the other."""
        layers = list(self)
        for low, high in _stretches(layers):
            input = _recomputed(self, functools.partial(_run, layers[low:high]), input)
        return input


def _recomputed(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **options)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, again = found_once(block)
        return first, _without_a_trace(block, again)

    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@contextmanager
def _without_a_trace(block: nn.Module, also: AbstractContextManager[None]) -> Iterator[None]:
    """Let the layers have copies of their buffers: what they do to them is forgotten."""
    own = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    for module, buffers in own:
        module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        with also:
            yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


def _run(layers: list[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _blocks(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    repeats = Counter(type(child) for child in children if _has_layers(child))
    blocks: list[nn.Module] = []
    for child in children:
        blocks += [child] if repeats[type(child)] > 1 else _blocks(child)
    if not blocks and _is_chain(module) and _stretches(children):
        return [module]
    return blocks


def _has_layers(module: nn.Module) -> bool:
    """Whether this is a layer made of layers, and not just a place to keep them in."""
    return type(module) not in _CONTAINERS and any(True for _ in module.children()) and _is_trained(module)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _is_chain(module: nn.Module) -> bool:
    return type(module) is nn.Sequential


def _stretches(layers: list[nn.Module]) -> list[tuple[int, int]]:
    """Which layers are recomputed together; none if there is nothing between them to be kept."""
    starts = [k for k, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    if not starts or len(layers) < 2:
        return []
    parts = split(len(starts), max(1, math.isqrt(len(starts))))
    edges = [0, *(starts[low] for low, _ in parts[1:]), len(layers)]
    return list(itertools.pairwise(edges))
