"""Comparing a chain with its model: the same bits, forward and backward.

Each unit runs alone, on copies of what crosses, as it would on a worker of its own. Output, gradients and buffers must
be those of the model, to the bit, with other batch sizes than those that were recorded. That finds what recording
cannot see: numbers that tracing froze, branches on values, results that are kept from one pass to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncline.compute.backward import seeded
from syncline.layouts.chain.chain import Chain
from syncline.layouts.chain.parts import leaves_of
from syncline.layouts.chain.program import received
from syncline.layouts.chain.refusal import difference
from syncline.layouts.chain.untouched import (
    are_equal,
    buffers_of,
    random_states,
    rows,
    set_buffers,
    set_random_states,
    untouched,
)

_SIZES = (5, 1)
"""The batch sizes of the check; the first one is checked backward too."""


def check_chain(chain: Chain, example: Sequence[Tensor]) -> None:
    """`ConfigError` if the chain is not the model."""
    model = chain.model
    with untouched(model), _one_thread(), _no_cached_casts():
        for mode in (True, False):
            if model.training != mode:
                model.train(mode)
            for size in _SIZES:
                with torch.set_grad_enabled(mode and size == _SIZES[0]):
                    different = _difference(chain, rows(example, size, first=1))
                if different is not None:
                    raise difference(model, different, size, is_training=mode)


@contextmanager
def _one_thread() -> Iterator[None]:
    """With several, some operations add up in another order each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Under autocast, have each use of a tied weight cast it, as stages do: their gradients are summed uncast."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _difference(chain: Chain, inputs: Sequence[Tensor]) -> str | None:
    """What differs between the chain and the model; None if nothing does."""
    model, device = chain.model, inputs[0].device
    buffers, state = buffers_of(model), random_states(device)
    try:
        expected = _model_pass(model, inputs)
    except (RuntimeError, ValueError):
        if len(inputs[0]) > 1:
            raise
        set_buffers(buffers)
        return None  # batch normalization cannot train on one sample
    changed, random = [copy for *_, copy in buffers_of(model)], random_states(device)
    set_buffers(buffers)
    set_random_states(device, state)
    found = _chain_pass(chain, inputs)
    for (name, right), (_, value) in zip(expected, found, strict=True):
        if not same_bits(right, value):
            return name
    if not all(same_bits(a, b) for a, (*_, b) in zip(changed, buffers_of(model), strict=True)):
        return "state of the buffers"
    if not are_equal(random, random_states(device)):
        return "use of random numbers"
    set_buffers(buffers)
    return None


def same_bits(first: Any, second: Any) -> bool:
    """Whether two results are equal, NaN included."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first is second or (type(first) is type(second) and first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    return torch.equal(torch.isnan(first), torch.isnan(second)) and torch.equal(
        torch.nan_to_num(first), torch.nan_to_num(second)
    )


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _model_pass(model: nn.Module, inputs: Sequence[Tensor]) -> list[tuple[str, Any]]:
    output = model(*inputs)
    leaves = leaves_of(output)
    ends = _ends(leaves)
    trained = _trained(model)
    gradients: Sequence[Any] = [None] * len(trained)
    if ends and trained:
        seeds = [_seed(end) for end in ends]
        gradients = torch.autograd.grad(seeded(ends, seeds), [p for _, p in trained], allow_unused=True)
    return _results(leaves, trained, gradients)


def _chain_pass(chain: Chain, inputs: Sequence[Tensor]) -> list[tuple[str, Any]]:
    """As a pipeline does it: a unit after another on copies, and backward from the last to the first."""
    passes: list[tuple[tuple[Tensor, ...], tuple[Any, ...]]] = []
    taken = tuple(inputs)
    for low in range(len(chain)):
        if low:
            crossing = chain.crossing(low, training=chain.model.training)
            taken = received(crossing, passes[-1][1])
        passes.append((taken, chain.stage(low, low + 1)(*taken)))
    (output,) = passes[-1][1]
    leaves = leaves_of(output)
    trained = _trained(chain.model)
    sums: dict[str, Tensor] = {}
    ends: list[Tensor] = _ends(leaves)
    seeds: list[Tensor] = [_seed(end) for end in ends]
    for low in reversed(range(len(chain))):
        taken, _ = passes[low]
        mine = [(name, p) for name, p in chain.stage(low, low + 1).named_parameters() if p.requires_grad]
        wanted = [t for t in taken if t.requires_grad]
        found: Sequence[Any] = [None] * (len(mine) + len(wanted))
        if ends and found:
            found = torch.autograd.grad(seeded(ends, seeds), [*(p for _, p in mine), *wanted], allow_unused=True)
        for (name, _), gradient in zip(mine, found, strict=False):
            if gradient is not None:
                sums[name] = gradient if name not in sums else sums[name] + gradient
        if low:
            pairs = zip([t for t in passes[low - 1][1] if t.requires_grad], found[len(mine) :], strict=True)
            kept = [(end, seed) for end, seed in pairs if seed is not None]
            ends, seeds = [end for end, _ in kept], [seed for _, seed in kept]
    return _results(leaves, trained, [sums.get(name) for name, _ in trained])


def _ends(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _seed(end: Tensor) -> Tensor:
    """A gradient whose numbers all differ."""
    return torch.linspace(0.5, 1.5, end.numel(), dtype=torch.float32, device=end.device).view(end.shape).to(end.dtype)


def _results(
    leaves: Sequence[Any], trained: Sequence[tuple[str, nn.Parameter]], gradients: Sequence[Any]
) -> list[tuple[str, Any]]:
    outputs = [("output", leaf.detach() if isinstance(leaf, Tensor) else leaf) for leaf in leaves]
    named = [(f"gradient of {name}", g) for (name, _), g in zip(trained, gradients, strict=True)]
    return [*outputs, *named]
