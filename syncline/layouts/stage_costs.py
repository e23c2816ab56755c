"""Measuring what each unit of a chain costs, on this worker.

Passes over the whole chain are repeated, forward and backward, unit by unit, so that all units see the same noise; each
unit's time is the median. Not here: what to do with the costs (`cut.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.compute.backward import seeded
from syncline.compute.recompute import is_recomputed
from syncline.layouts.chain.chain import Chain, Stage
from syncline.layouts.chain.parts import leaves_of
from syncline.layouts.chain.program import modules_of, received
from syncline.layouts.chain.untouched import untouched
from syncline.layouts.cut import UnitCost

_FEWEST_PASSES = 5


def measure_costs(
    chain: Chain,
    example: Sequence[Tensor],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    seconds: float = 1.0,
) -> list[UnitCost]:
    """The costs of all units for a micro-batch like `example`, measured for about `seconds`.

    `loss` makes a scalar of the model's output; without it, the backward pass begins with ones.
    """
    with untouched(chain.model):
        chain.model.train()
        passes = _Passes(chain, tuple(example), loss)
        saved = passes.saved_bytes()  # the first pass, which warms up too
        times: list[list[tuple[float, float]]] = []
        until = time.perf_counter() + seconds
        while len(times) < _FEWEST_PASSES or time.perf_counter() < until:
            times.append(passes.run())
    return [_cost(chain, n, len(example[0]), [t[n] for t in times], saved[n]) for n in range(len(chain))]


def measure_whole(
    model: nn.Module, example: Sequence[Tensor], *, loss: Callable[[Any], Tensor], seconds: float = 1.0
) -> UnitCost:
    """The costs of a model that cannot be taken apart, as of a single unit, measured for about `seconds`."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    trained = [p for p in model.parameters() if p.requires_grad]
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def one_pass() -> tuple[float, float]:
        began = _now(example[0].device)
        value = loss(model(*example))
        halfway = _now(example[0].device)
        torch.autograd.grad(value, trained, allow_unused=True)
        return halfway - began, _now(example[0].device) - halfway

    with untouched(model):
        model.train()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            one_pass()
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while len(times) < _FEWEST_PASSES or time.perf_counter() < until:
            times.append(one_pass())
    return UnitCost(
        name="the model",
        forward_s=statistics.median(forward for forward, _ in times),
        backward_s=statistics.median(backward for _, backward in times),
        samples=len(example[0]),
        saved_bytes=sum(size for at, size in saved.items() if at not in held) / len(example[0]),
        parameters={name: p.nbytes for name, p in model.named_parameters() if p.requires_grad},
    )


def _cost(
    chain: Chain,
    number: int,
    samples: int,
    times: Sequence[tuple[float, float]],
    saved: tuple[float, Mapping[int, float]],
) -> UnitCost:
    unit = chain.units[number]
    parameters = unit.parameters.items()
    crossing = chain.crossing(number + 1) if number + 1 < len(chain) else ()
    quartiles = statistics.quantiles([sum(both) for both in times], n=4)
    return UnitCost(
        name=unit.name,
        forward_s=statistics.median(forward for forward, _ in times),
        backward_s=statistics.median(backward for _, backward in times),
        spread_s=quartiles[2] - quartiles[0],
        samples=samples,
        sent_bytes=sum(c.bytes(samples) for c in crossing) / samples,
        returned_bytes=sum(c.bytes(samples) for c in crossing if c.requires_grad) / samples,
        saved_bytes=saved[0],
        kept=saved[1],
        parameters={name: p.numel() * p.element_size() for name, p in parameters if p.requires_grad},
        constants={
            name: t.numel() * t.element_size()
            for name, t in (*parameters, *unit.buffers.items())
            if not t.requires_grad
        },
    )


class _Passes:
    """Passes over a chain, unit by unit, on copies of what crosses."""

    def __init__(self, chain: Chain, example: tuple[Tensor, ...], loss: Callable[[Any], Tensor] | None) -> None:
        self._chain, self._example, self._loss = chain, example, loss
        self._stages = [chain.stage(n, n + 1) for n in range(len(chain))]
        self._crossing = [chain.crossing(n) for n in range(len(chain))]
        self._trained = [[p for p in stage.parameters() if p.requires_grad] for stage in self._stages]
        self._device = example[0].device

    def run(self) -> list[tuple[float, float]]:
        """One pass: the seconds of each unit forward and backward."""
        taken, given, forward = [self._example], [], []
        for number, stage in enumerate(self._stages):
            torch.clear_autocast_cache()  # a cast of tied weights in one unit has no graph any more for the next one
            began = self._now()
            result = stage(*taken[-1])
            ends = self._ends(result) if stage.is_last else list(result)
            forward.append(self._now() - began)
            given.append(ends)
            if not stage.is_last:
                taken.append(received(self._crossing[number + 1], result))
        backward = self._backward(taken, given)
        return list(zip(forward, backward, strict=True))

    def _ends(self, result: tuple[Any, ...]) -> list[Tensor]:
        """What the backward pass begins with."""
        if self._loss is not None:
            return [self._loss(result[0])]
        return [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]

    def _backward(self, taken: Sequence[tuple[Tensor, ...]], given: Sequence[list[Tensor]]) -> list[float]:
        seconds = [0.0] * len(given)
        seeds: list[Tensor | None] = [torch.ones_like(end) for end in given[-1]]
        for number in reversed(range(len(given))):
            pairs = [(e, s) for e, s in zip(given[number], seeds, strict=True) if e.requires_grad and s is not None]
            wanted = [t for t in taken[number] if t.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            began = self._now()
            if pairs and (wanted or self._trained[number]):
                ends, grads = zip(*pairs, strict=True)
                inputs = [*wanted, *self._trained[number]]
                found = torch.autograd.grad(seeded(ends, grads), inputs, allow_unused=True)
            seconds[number] = self._now() - began
            gradients = iter(found)
            seeds = [next(gradients) if t.requires_grad else None for t in taken[number]]
        return seconds

    def saved_bytes(self) -> list[tuple[float, dict[int, float]]]:
        """For each unit the bytes per sample that its backward pass needs: inside, and of what crosses, by number."""
        taken = self._example
        found = []
        for number, stage in enumerate(self._stages):
            storages: dict[int, int] = {}

            def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = stage(*taken)
            found.append(self._divided(number, storages, taken, result))
            if not stage.is_last:
                taken = received(self._crossing[number + 1], result)
        return found

    def _divided(
        self, number: int, storages: dict[int, int], taken: Sequence[Tensor], given: tuple[Any, ...]
    ) -> tuple[float, dict[int, float]]:
        """What is saved, without parameters and buffers: inside of the unit, and what crosses."""
        stage, samples = self._stages[number], len(self._example[0])
        for tensor in (*stage.parameters(), *stage.buffers()):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        outputs = () if stage.is_last else given
        kept: dict[int, float] = {}
        around = [
            *zip(self._chain.crossing_numbers(number), taken, strict=True),
            *zip(self._chain.crossing_numbers(number + 1), outputs, strict=False),
        ]
        for name, tensor in around:
            if storages.pop(tensor.untyped_storage().data_ptr(), None) is not None:
                kept[name] = tensor.numel() * tensor.element_size() / samples
        if any(is_recomputed(module) for module in _modules(stage)):  # it holds its input, and says so to no one
            kept |= {name: t.numel() * t.element_size() / samples for name, t in around[: len(taken)]}
        return sum(storages.values()) / samples, kept

    def _now(self) -> float:
        return _now(self._device)


def _now(device: torch.device) -> float:
    """With one thread, its own time: that does not pass while other processes have the core."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def _modules(stage: Stage) -> list[nn.Module]:
    return [inner for unit in stage.units for outer in modules_of(unit.steps) for inner in outer.modules()]
