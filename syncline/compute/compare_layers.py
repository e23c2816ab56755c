"""How long the passes of a model's convolutions and poolings take with each algorithm.

Here: recording the input of each layer, and timing all algorithms on inputs of that shape. Not here: the algorithms
(`convolutions.py`, `pooling.py`), choosing one (`tuning.py`), and agreeing among workers (`workers/calibrate.py`).

Timing whole steps would not do: large models are measured with few samples, and which algorithm is faster depends on
their number. So each layer is timed alone, with as many samples as it will have or a good part of them. Layers of equal
shape are timed once, and the most expensive layers come first. An algorithm whose result differs from torch's is
excluded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from syncline.compute.convolutions import is_applicable, run_pass, supports, tunable_convolutions
from syncline.compute.pooling import is_pool_applicable, pool, tunable_pools
from syncline.compute.tuning import PASSES, Algorithm, Pass, PassTimes

_Layer: TypeAlias = nn.Conv2d | nn.MaxPool2d

_REPEATS = 2
"""After a warm-up."""
_TOO_SLOW = 2.0
"""An algorithm that was this many times slower than the fastest in its first run is not timed again."""
_LONGEST_S = 1.8
"""Layers that are not reached within this time keep torch's algorithms."""
_PASS_S = 0.007
"""The target time of one pass; the samples are reduced for it, to a quarter at most."""
_LEAST_PIXELS = 2048
"""The least output size for a timing: below, work per call (on the weights) would count for too much."""
_MOST_BYTES = 64 * 2**20
"""The most memory that a timed pass reads and writes."""
_MAX_DIFFERENCE = 1e-3
"""The tolerated difference between results, relative to the largest value."""
_NOT_MEASURED: PassTimes = {(which, algorithm): math.inf for which, algorithms in PASSES for algorithm in algorithms}


def compare_layers(model: nn.Module, step: Callable[[], object], scale: float) -> dict[str, PassTimes]:
    """Seconds for each layer's passes by all algorithms, with `scale` times the samples that `step` computes."""
    seen = _inputs(model, step)
    until = time.monotonic() + _LONGEST_S
    kinds: dict[object, list[str]] = {}
    for name, (layer, x) in seen.items():
        kinds.setdefault((repr(layer), x.shape, x.stride(), x.requires_grad), []).append(name)
    times = dict.fromkeys(seen, _NOT_MEASURED)
    for names in sorted(kinds.values(), key=lambda names: len(names) * _work(*seen[names[0]]), reverse=True):
        if time.monotonic() < until:
            times.update(dict.fromkeys(names, _time_layer(*seen[names[0]], scale)))
    return times


def _work(layer: _Layer, x: torch.Tensor) -> float:
    """The approximate number of operations in a pass."""
    if isinstance(layer, nn.MaxPool2d):
        return x.numel()
    return x.numel() / x.shape[1] * layer.weight.numel() / math.prod(layer.stride)


def _inputs(model: nn.Module, step: Callable[[], object]) -> dict[str, tuple[_Layer, torch.Tensor]]:
    """The layers that have a choice, with their inputs."""
    seen: dict[str, tuple[_Layer, torch.Tensor]] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
            if (isinstance(layer, nn.Conv2d) and is_applicable(layer, x)) or (
                isinstance(layer, nn.MaxPool2d) and x.requires_grad and is_pool_applicable(layer, x)
            ):
                seen[name] = layer, x

        return hook

    layers = (*tunable_convolutions(model), *tunable_pools(model))
    hooks = [layer.register_forward_pre_hook(look(name)) for name, layer in layers]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _time_layer(layer: _Layer, few: torch.Tensor, scale: float) -> PassTimes:
    """Time the algorithms of each pass alternately; the minimum of each counts."""
    samples = max(1, round(few.shape[0] * scale))
    return _time_convolution(layer, few, samples) if isinstance(layer, nn.Conv2d) else _time_pool(layer, few, samples)


@torch.no_grad()
def _time_convolution(layer: nn.Conv2d, few: torch.Tensor, samples: int) -> PassTimes:
    x, dy = _representative_inputs(layer, few, samples)
    times = dict(_NOT_MEASURED)
    for which, algorithms in PASSES:
        if which == "input" and not few.requires_grad:
            times.update({(which, algorithm): 0.0 for algorithm in algorithms})
            continue
        usual, seconds = _timed(layer, which, "torch", x, dy)
        first: dict[Algorithm, float] = {"torch": seconds}
        for algorithm in algorithms[1:]:
            if supports(layer, x, which, algorithm, samples=samples):
                result, seconds = _timed(layer, which, algorithm, x, dy)
                if bool((result - usual).abs().max() <= _MAX_DIFFERENCE * usual.abs().max()):
                    first[algorithm] = seconds
        best = {algorithm: s for algorithm, s in first.items() if s <= _TOO_SLOW * min(first.values())}
        for _ in range(_REPEATS if len(best) > 1 else 1):
            best = {algorithm: min(s, _timed(layer, which, algorithm, x, dy)[1]) for algorithm, s in best.items()}
        for algorithm, seconds in {**first, **best}.items():
            times[which, algorithm] = seconds * samples / x.shape[0]
    return times


def _time_pool(layer: nn.MaxPool2d, few: torch.Tensor, samples: int) -> PassTimes:
    """Both passes together: they use the same algorithm."""
    number = max(1, min(samples, _MOST_BYTES // (4 * few[:1].numel())))
    x = _random(number, few).requires_grad_()
    times = {(which, algorithm): math.inf if which == "forward" else 0.0 for which, algorithm in _NOT_MEASURED}
    seconds: dict[Algorithm, list[float]] = {"torch": [], "compiled": []}
    results = {}
    for _ in range(1 + _REPEATS):
        for algorithm, taken in seconds.items():
            start = time.perf_counter()
            with torch.enable_grad():
                y = pool(layer, algorithm, x)
                results[algorithm] = torch.autograd.grad(y, x, y)[0]
            taken.append(time.perf_counter() - start)
    for algorithm, taken in seconds.items():
        is_right = torch.equal(results[algorithm], results["torch"])
        times["forward", algorithm] = min(taken) * samples / number if is_right else math.inf
    return times


def _representative_inputs(layer: nn.Conv2d, few: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input with enough samples to extrapolate to a step, and a gradient of the output."""
    one = layer(few[:1])
    number = max(1, min(samples, _MOST_BYTES // (4 * (few[:1].numel() + one.numel()))))
    x, dy = _random(number, few), _random(number, one)
    seconds = min(_timed(layer, "forward", "torch", x, dy)[1] for _ in range(2))
    if seconds > _PASS_S:
        least = min(number, max(-(-number // 4), -(-_LEAST_PIXELS // one[0, 0].numel())))
        number = max(1, least, int(number * _PASS_S / seconds))
    return x[:number], dy[:number]


def _random(samples: int, like: torch.Tensor) -> torch.Tensor:
    """Drawn from a separate generator, so that the run's random numbers do not change."""
    generator = torch.Generator().manual_seed(0)
    form = torch.channels_last if like.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    return torch.randn(samples, *like.shape[1:], generator=generator).contiguous(memory_format=form)


def _timed(
    layer: nn.Conv2d, which: Pass, algorithm: Algorithm, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The result of a pass, and its time."""
    start = time.perf_counter()
    result = run_pass(layer, which, algorithm, x, dy)
    return result, time.perf_counter() - start
