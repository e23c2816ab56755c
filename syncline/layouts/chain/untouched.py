"""Trying out a model without leaving a trace: buffers, modes and random numbers are restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and modes of the model and the state of the random generators afterwards."""
    buffers = buffers_of(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        set_buffers(buffers)
        for module, mode in modes:
            module.training = mode


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """For each buffer its module, name, the tensor itself and a copy."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]


@torch.no_grad()
def set_buffers(saved: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Undo changes of buffers, and their replacement."""
    for module, name, buffer, copy in saved:
        buffer.copy_(copy)
        module._buffers[name] = buffer


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators from which a model on this device draws random numbers."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Go back to these states."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two lists of states are the same."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rows(tensors: Sequence[Tensor], samples: int, *, first: int = 0) -> tuple[Tensor, ...]:
    """So many samples of a batch, as often as needed."""
    return tuple(t.index_select(0, (torch.arange(samples, device=t.device) + first) % len(t)) for t in tensors)
