"""One forward pass: from a batch as the data gives it to a loss.

Here: how a batch is split into inputs and target, moved to a device and cut into pieces. A batch (a, b, ..., t) means
`loss(model(a, b, ...), t)`; a single tensor a means `loss(model(a), a)`, as an autoencoder wants it. In training the
penalties on a declared model's weights are part of the loss. Each piece of a batch has them in full, and is weighted by
its samples, as each worker is: so they count once in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.algorithms.partition import split
from syncline.declare.network import penalty_of
from syncline.errors import ConfigError
from syncline.workers.build import Loss

__all__ = ["correct_fraction", "is_classification", "leaving_nothing_behind", "loss_of", "pieces", "to_device"]


def loss_of(model: torch.nn.Module, loss: Loss, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The loss of a batch, the model's output and the target."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]  # as one array gives it
    if isinstance(batch, torch.Tensor):
        inputs, target = (batch,), batch
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        inputs, target = tuple(batch[:-1]), batch[-1]
    else:
        raise ConfigError(
            f"A batch of the data is a {type(batch).__name__}. The built-in loop takes (input, target) pairs or single "
            "tensors; for anything else write the loop yourself and start it with 'syncline run my_loop.py'."
        )
    output: Any = None
    try:
        output = model(*inputs)
        value = loss(output, target)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        made = f", the model's output was {_shape(output)}" if output is not None else ""
        shapes = ", ".join(_shape(x) for x in inputs)
        error.add_note(f"The batch had inputs {shapes} and target {_shape(target)}{made}. Do model, loss and data fit?")
        raise
    if value.dim() != 0:
        raise ConfigError(f"The loss has shape {tuple(value.shape)}; it must be one number, the mean over the samples.")
    if model.training and (penalty := penalty_of(model)) is not None:
        value = value + penalty
    return value, output, target


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(b, device) for b in batch)
    return batch


def pieces(batch: Any, samples: int, count: int) -> Iterator[tuple[Any, float]]:
    """The batch in at most `count` pieces, each with the part of the samples it holds."""
    if count == 1:
        yield batch, 1.0
        return
    for low, high in split(samples, min(count, samples)):
        yield _rows(batch, low, high), (high - low) / samples


@contextmanager
def leaving_nothing_behind(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """For passes that are only tried out: statistics and random numbers are as before when they are over."""
    before = [buffer.detach().clone() for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)


def is_classification(output: Any, target: Any) -> bool:
    """Whether there is a score for each class, and one class for each sample."""
    return (
        isinstance(output, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and output.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
    )


def correct_fraction(output: Any, target: Any) -> float | None:
    """How many of the samples are classified rightly, if this is a classification."""
    if not is_classification(output, target):
        return None
    return float((output.detach().argmax(1) == target).sum()) / len(target)


def _rows(batch: Any, low: int, high: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[low:high]
    return type(batch)(_rows(b, low, high) for b in batch)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
