"""How long the passes of a model's convolutions and poolings take in each way.

Here: finding out what each layer gets to see, and timing all ways on inputs of that kind. Not here: the ways
(`convolutions.py`, `max_pooling.py`), which of them is taken (`plan/tuning.py`), and that all workers take the same
(`calibrate.py`).

Whole steps would not tell: large models are tried out with few samples, and which way is faster depends on how many
there are. So each layer is timed by itself, with as many samples as it will have or a good part of them; layers of one
kind are timed once, and those that take longest in a step come first. A way that gives another result than torch's is
not taken to be one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from syncline.plan.tuning import PASSES, Pass, PassTimes, Way
from syncline.workers.convolutions import candidates, compute, fits, suits
from syncline.workers.max_pooling import pool, pool_candidates, pool_suits

__all__ = ["compare_layers"]

_Layer: TypeAlias = nn.Conv2d | nn.MaxPool2d

_REPEATS = 2
"""After a first time."""
_HOPELESS = 2.0
"""What was so many times slower than the fastest the first time is not timed again."""
_LONGEST_S = 1.8
"""Layers that are not reached within this time stay as they are."""
_PASS_S = 0.007
"""A pass that is timed should take no longer, if a quarter of the samples is enough for that."""
_LEAST_PIXELS = 2048
"""Of the output: with fewer of them, what is done once for any number of samples (with the weights) would count for too
much."""
_MOST_BYTES = 64 * 2**20
"""Nor should what it reads and writes be larger."""
_APART = 1e-3
"""Results may be so far apart, as a part of the largest number in them."""
_NOT_MEASURED: PassTimes = {(which, way): math.inf for which, ways in PASSES for way in ways}


def compare_layers(model: nn.Module, step: Callable[[], object], scale: float) -> dict[str, PassTimes]:
    """Seconds for each layer's passes in all ways, when there are `scale` times the samples that `step` computes."""
    seen = _inputs(model, step)
    until = time.monotonic() + _LONGEST_S
    kinds: dict[object, list[str]] = {}
    for name, (layer, x) in seen.items():
        kinds.setdefault((repr(layer), x.shape, x.stride(), x.requires_grad), []).append(name)
    told = dict.fromkeys(seen, _NOT_MEASURED)
    for names in sorted(kinds.values(), key=lambda names: len(names) * _work(*seen[names[0]]), reverse=True):
        if time.monotonic() < until:
            told.update(dict.fromkeys(names, _all_ways(*seen[names[0]], scale)))
    return told


def _work(layer: _Layer, x: torch.Tensor) -> float:
    """About how many operations a pass takes."""
    if isinstance(layer, nn.MaxPool2d):
        return x.numel()
    return x.numel() / x.shape[1] * layer.weight.numel() / math.prod(layer.stride)


def _inputs(model: nn.Module, step: Callable[[], object]) -> dict[str, tuple[_Layer, torch.Tensor]]:
    """The layers that have a choice, and what they get to see."""
    seen: dict[str, tuple[_Layer, torch.Tensor]] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
            if (isinstance(layer, nn.Conv2d) and suits(layer, x)) or (
                isinstance(layer, nn.MaxPool2d) and x.requires_grad and pool_suits(layer, x)
            ):
                seen[name] = layer, x

        return hook

    layers = (*candidates(model), *pool_candidates(model))
    hooks = [layer.register_forward_pre_hook(look(name)) for name, layer in layers]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _all_ways(layer: _Layer, few: torch.Tensor, scale: float) -> PassTimes:
    """The ways of a pass are timed by turns, and the least time of each counts."""
    samples = max(1, round(few.shape[0] * scale))
    return _of_convolution(layer, few, samples) if isinstance(layer, nn.Conv2d) else _of_pool(layer, few, samples)


@torch.no_grad()
def _of_convolution(layer: nn.Conv2d, few: torch.Tensor, samples: int) -> PassTimes:
    x, dy = _enough(layer, few, samples)
    times = dict(_NOT_MEASURED)
    for which, all_ways in PASSES:
        if which == "input" and not few.requires_grad:
            times.update({(which, way): 0.0 for way in all_ways})
            continue
        usual, seconds = _timed(layer, which, "torch", x, dy)
        first: dict[Way, float] = {"torch": seconds}
        for way in all_ways[1:]:
            if fits(layer, x, which, way, samples=samples):
                result, seconds = _timed(layer, which, way, x, dy)
                if _is_the_same(result, usual):
                    first[way] = seconds
        best = {way: s for way, s in first.items() if s <= _HOPELESS * min(first.values())}
        for _ in range(_REPEATS if len(best) > 1 else 1):
            best = {way: min(s, _timed(layer, which, way, x, dy)[1]) for way, s in best.items()}
        for way, seconds in {**first, **best}.items():
            times[which, way] = seconds * samples / x.shape[0]
    return times


def _of_pool(layer: nn.MaxPool2d, few: torch.Tensor, samples: int) -> PassTimes:
    """Both passes in one: they have to be of the same way."""
    number = max(1, min(samples, _MOST_BYTES // (4 * few[:1].numel())))
    x = _random(number, few).requires_grad_()
    times = {(which, way): math.inf if which == "forward" else 0.0 for which, way in _NOT_MEASURED}
    seconds: dict[Way, list[float]] = {"torch": [], "compiled": []}
    results = {}
    for _ in range(1 + _REPEATS):
        for way, taken in seconds.items():
            start = time.perf_counter()
            with torch.enable_grad():
                y = pool(layer, way, x)
                results[way] = torch.autograd.grad(y, x, y)[0]
            taken.append(time.perf_counter() - start)
    for way, taken in seconds.items():
        is_right = torch.equal(results[way], results["torch"])
        times["forward", way] = min(taken) * samples / number if is_right else math.inf
    return times


def _enough(layer: nn.Conv2d, few: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input with as many samples as tell how long a step's take, and a gradient of the output."""
    one = layer(few[:1])
    number = max(1, min(samples, _MOST_BYTES // (4 * (few[:1].numel() + one.numel()))))
    x, dy = _random(number, few), _random(number, one)
    seconds = min(_timed(layer, "forward", "torch", x, dy)[1] for _ in range(2))
    if seconds > _PASS_S:
        least = min(number, max(-(-number // 4), -(-_LEAST_PIXELS // one[0, 0].numel())))
        number = max(1, least, int(number * _PASS_S / seconds))
    return x[:number], dy[:number]


def _random(samples: int, like: torch.Tensor) -> torch.Tensor:
    """Drawn by a generator of its own: a run's random numbers are not for this."""
    generator = torch.Generator().manual_seed(0)
    form = torch.channels_last if like.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    return torch.randn(samples, *like.shape[1:], generator=generator).contiguous(memory_format=form)


def _timed(layer: nn.Conv2d, which: Pass, way: Way, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What a pass gives, and how long it takes."""
    start = time.perf_counter()
    result = compute(layer, which, way, x, dy)
    return result, time.perf_counter() - start


def _is_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= _APART * b.abs().max())
