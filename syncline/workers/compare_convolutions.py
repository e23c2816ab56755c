"""How long the passes of a model's convolutions take in each way.

Here: finding out what each convolution gets to see, and timing all ways on inputs of that kind. Not here: the ways
(`convolutions.py`), which of them is taken (`plan/tuning.py`), and that all workers take the same (`calibrate.py`).

Whole steps would not tell: large models are tried out with few samples, and which way is faster depends on how many
there are. So each layer is timed by itself, with as many samples as it will have or a good part of them; layers of one
kind are timed once. A way that gives another result than torch's is not taken to be one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from syncline.plan.tuning import PASSES, Pass, PassTimes, Way
from syncline.workers.convolutions import candidates, compute, fits, suits

__all__ = ["compare_convolutions"]

_REPEATS = 3
_LONGEST_S = 2.8
"""Layers that are not reached within this time stay as they are."""
_PASS_S = 0.007
"""A pass that is timed should take no longer, if a quarter of the samples is enough for that."""
_MOST_BYTES = 64 * 2**20
"""Nor should what it reads and writes be larger."""
_APART = 1e-3
"""Results may be so far apart, as a part of the largest number in them."""
_NOT_MEASURED: PassTimes = {(which, way): math.inf for which, ways in PASSES for way in ways}


def compare_convolutions(model: nn.Module, step: Callable[[], object], scale: float) -> dict[str, PassTimes]:
    """Seconds for each layer's passes in all ways, when there are `scale` times the samples that `step` computes."""
    layers, seen = dict(candidates(model)), _inputs(model, step)
    until = time.monotonic() + _LONGEST_S
    by_kind: dict[object, PassTimes] = {}
    told = {}
    for name, x in seen.items():
        layer = layers[name]
        kind = (x.shape, x.stride(), x.requires_grad, layer.out_channels, layer.bias is None, *_geometry(layer))
        if kind not in by_kind:
            by_kind[kind] = _all_ways(layer, x, scale) if time.monotonic() < until else _NOT_MEASURED
        told[name] = by_kind[kind]
    return told


def _inputs(model: nn.Module, step: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What the convolutions for which there is a choice get to see."""
    seen: dict[str, torch.Tensor] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if isinstance(layer, nn.Conv2d) and suits(layer, inputs[0]):
                seen[name] = inputs[0].detach().requires_grad_(inputs[0].requires_grad)

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
def _all_ways(layer: nn.Conv2d, few: torch.Tensor, scale: float) -> PassTimes:
    """The ways of a pass are timed by turns, and the least time of each counts."""
    samples = max(1, round(few.shape[0] * scale))
    x, dy = _enough(layer, few, samples)
    times = dict(_NOT_MEASURED)
    for which, all_ways in PASSES:
        ways = [way for way in all_ways if fits(layer, x, which, way, samples=samples)]
        if which == "input" and not few.requires_grad:
            times.update({(which, way): 0.0 for way in all_ways})
            continue
        usual = compute(layer, which, "torch", x, dy)
        ways = [way for way in ways if _is_the_same(compute(layer, which, way, x, dy), usual)]
        for _ in range(_REPEATS):
            for way in ways:
                seconds = _time(layer, which, way, x, dy) * samples / x.shape[0]
                times[which, way] = min(times[which, way], seconds)
    return times


def _enough(layer: nn.Conv2d, few: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input with as many samples as tell how long a step's take, and a gradient of the output."""
    one = layer(few[:1])
    number = max(1, min(samples, _MOST_BYTES // (4 * (few[:1].numel() + one.numel()))))
    x, dy = _random(number, few), _random(number, one)
    seconds = min(_time(layer, "forward", "torch", x, dy) for _ in range(2))
    if seconds > _PASS_S:
        number = max(1, -(-number // 4), int(number * _PASS_S / seconds))
    return x[:number], dy[:number]


def _random(samples: int, like: torch.Tensor) -> torch.Tensor:
    """Drawn by a generator of its own: a run's random numbers are not for this."""
    generator = torch.Generator().manual_seed(0)
    form = torch.channels_last if like.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    return torch.randn(samples, *like.shape[1:], generator=generator).contiguous(memory_format=form)


def _time(layer: nn.Conv2d, which: Pass, way: Way, x: torch.Tensor, dy: torch.Tensor) -> float:
    start = time.perf_counter()
    compute(layer, which, way, x, dy)
    return time.perf_counter() - start


def _is_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= _APART * b.abs().max())
