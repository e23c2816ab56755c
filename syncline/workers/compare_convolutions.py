"""How long the weight gradients of a model's convolutions take, as torch computes them and by matrices.

Here: finding out what each convolution gets to see, and timing both ways on inputs of that kind. Not here: the two ways
(`convolutions.py`), which of them is taken (`plan/tuning.py`), and that all workers take the same (`calibrate.py`).

Whole steps would not tell: large models are tried out with few samples, and which way is faster depends on how many
there are. So each layer is timed by itself, with as many samples as it will have; layers of one kind are timed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from syncline.workers.convolutions import candidates, gradient_by_matrices, gradient_by_torch, suits

__all__ = ["compare_convolutions"]

_REPEATS = 3
_LONGEST_S = 4.0
"""Layers that are not reached within this time stay as they are."""
_NOT_MEASURED = (math.inf, math.inf)


def compare_convolutions(model: nn.Module, step: Callable[[], object], scale: float) -> dict[str, tuple[float, float]]:
    """Seconds for each layer's gradient in both ways, when there are `scale` times the samples that `step` computes."""
    layers, seen = dict(candidates(model)), _inputs(model, step)
    until = time.monotonic() + _LONGEST_S
    by_kind: dict[object, tuple[float, float]] = {}
    told = {}
    for name, x in seen.items():
        layer = layers[name]
        kind = (x.shape, x.stride(), layer.out_channels, *_geometry(layer))
        if kind not in by_kind:
            by_kind[kind] = _both_ways(layer, x, scale) if time.monotonic() < until else _NOT_MEASURED
        told[name] = by_kind[kind]
    return told


def _inputs(model: nn.Module, step: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What the convolutions that could be computed by matrices get to see."""
    seen: dict[str, torch.Tensor] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if isinstance(layer, nn.Conv2d) and suits(layer, inputs[0]):
                seen[name] = inputs[0].detach()

        return hook

    hooks = [layer.register_forward_pre_hook(look(name)) for name, layer in candidates(model)]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _geometry(layer: nn.Conv2d) -> tuple[object, ...]:
    return layer.kernel_size, layer.stride, layer.padding, layer.dilation


@torch.no_grad()
def _both_ways(layer: nn.Conv2d, few: torch.Tensor, scale: float) -> tuple[float, float]:
    samples = max(1, round(few.shape[0] * scale))
    is_channels_last = few.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if is_channels_last else torch.contiguous_format
    x = torch.ones(samples, *few.shape[1:]).contiguous(memory_format=form)
    if not suits(layer, x, needs_gradients=False):
        return _NOT_MEASURED
    dy = torch.ones_like(layer(x))
    times: list[tuple[float, float]] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        gradient_by_torch(layer, x, dy)
        middle = time.perf_counter()
        gradient_by_matrices(layer, x, dy)
        times.append((middle - start, time.perf_counter() - middle))
    by_torch, by_matrices = (min(column) for column in zip(*times, strict=True))
    return by_torch, by_matrices
