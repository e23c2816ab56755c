"""Activation checkpointing: recomputing parts of the forward pass during the backward pass, to save memory.

Here: `recompute_activations`, which finds the blocks of a model and makes each keep only its input (Chen, Xu, Zhang &
Guestrin, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016). torch does the recomputing. Not here:
global batch-norm statistics (`batch_norm.py`), and micro-batches (`workers/micro_batches.py`).

A block is recomputed as a whole. Blocks are repeated modules: two or more siblings of one class with layers inside,
such as the residual blocks of a ResNet or the layers of a transformer. Where nothing repeats, an `nn.Sequential` of n
layers is cut into about sqrt(n) segments, which minimizes memory: the inputs of all segments, and the activations of
one. A segment begins with a layer that has parameters: one that changes its input in place, as activations may, would
overwrite the stored input.

Gradients are bit-identical: random numbers are replayed, and global batch statistics are reused. Side effects of the
forward pass (running statistics) happen once.
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

from syncline.compute.batch_norm import recompute_contexts
from syncline.compute.partition import split

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute_activations(model: nn.Module) -> int:
    """Make the blocks of `model` keep only their inputs in training; returns the number of blocks.

    The modules are changed in place: parameters, buffers, hooks and `state_dict` keys stay the same objects.
    """
    blocks = _blocks(model)
    for block in blocks:
        if _is_chain(block):
            block.__class__ = _Segments
        else:
            block.__class__ = _recomputing_class(type(block))  # type: ignore[arg-type]  # mypy finds classes unhashable
    return len(blocks)


class _Recomputing(nn.Module):
    """The training mode of a block. Instances get this class by assignment; see `_recomputing_class`."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return _recomputed(self, super().forward, *inputs, **options)


@functools.cache
def _recomputing_class(plain: type[nn.Module]) -> type[nn.Module]:
    """`plain` with the recomputing forward first in its method resolution order."""
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Recomputing, plain), names)


class _Segments(nn.Sequential):
    """A chain of layers in segments, each of which keeps only its input."""

    def forward(self, input: Any) -> Any:  # the name is torch's
        for segment in self._parts():
            input = segment(input)
        return input

    def _parts(self) -> tuple[RecomputedSegment, ...]:
        """The segments. They are made once, and are not among the children: the layers keep their names."""
        made: tuple[RecomputedSegment, ...] | None = vars(self).get("_made_parts")
        layers = list(self)
        if made is None or [layer for part in made for layer in part.layers] != layers:
            made = tuple(RecomputedSegment(self, layers[low:high]) for low, high in _segments(layers))
            vars(self)["_made_parts"] = made
        return made


class RecomputedSegment(nn.Module):
    """Some layers of a chain. It has parameters and buffers of the chain, and none of its own."""

    def __init__(self, chain: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._chain = (chain,)  # in a tuple, because it is not a part of the segment

    def forward(self, input: Any) -> Any:  # the name is torch's
        return _recomputed(self._chain[0], functools.partial(_run, list(self.layers)), input)


def is_recomputed(module: nn.Module) -> bool:
    """Whether the module keeps only its input."""
    return isinstance(module, (_Recomputing, RecomputedSegment))


def _recomputed(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **options)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, again = recompute_contexts(block)
        return first, _with_buffer_copies(block, again)

    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@contextmanager
def _with_buffer_copies(block: nn.Module, also: AbstractContextManager[None]) -> Iterator[None]:
    """Give the layers copies of their buffers, so that recomputing does not change the originals."""
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
    if not blocks and _is_chain(module) and _segments(children):
        return [module]
    return blocks


def _has_layers(module: nn.Module) -> bool:
    """Whether this is a layer made of layers, not just a container."""
    return type(module) not in _CONTAINERS and any(True for _ in module.children()) and _is_trained(module)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _is_chain(module: nn.Module) -> bool:
    return type(module) is nn.Sequential


def _segments(layers: list[nn.Module]) -> list[tuple[int, int]]:
    """Which layers are recomputed together; empty if there is no activation between them to save."""
    starts = [k for k, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    if not starts or len(layers) < 2:
        return []
    parts = split(len(starts), max(1, math.isqrt(len(starts))))
    edges = [0, *(starts[low] for low, _ in parts[1:]), len(layers)]
    return list(itertools.pairwise(edges))
