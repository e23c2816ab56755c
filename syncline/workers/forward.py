"""One forward pass, from a batch to a loss.

Here: splitting a batch into inputs and target, moving it to a device, and cutting it into micro-batches. A batch (a, b,
..., t) means `loss(model(a, b, ...), t)`; a single tensor a means `loss(model(a), a)`, for autoencoders. In training
the weight penalties of a declared model are part of the loss. Each micro-batch includes them in full and is weighted by
its samples, as each worker is, so they count once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from syncline.compute.partition import split
from syncline.errors import ConfigError
from syncline.models.declared.network import penalty_of
from syncline.workers.build import Loss


def loss_of(model: torch.nn.Module, loss: Loss, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The loss of a batch, the model's output and the target."""
    inputs, target = inputs_and_target(batch)
    output: Any = None
    try:
        output = model(*inputs)
        value = loss(output, target)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        made = f", the model's output was {_shape(output)}" if output is not None else ""
        shapes = ", ".join(_shape(x) for x in inputs)
        error.add_note(
            f"The batch had inputs {shapes} and target {_shape(target)}{made}. Check that model, loss and data match."
        )
        raise
    return checked_loss(value, model), output, target


def inputs_and_target(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """What a batch gives to the model, and what to the loss."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]  # the batch of a single array
    if isinstance(batch, torch.Tensor):
        return (batch,), batch
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise ConfigError(
        f"A batch of the data is a {type(batch).__name__}, but the built-in loop takes (input, target) pairs or "
        "single tensors. For anything else write your own loop and start it with 'syncline run my_loop.py'.",
        code="batch-type",
        type=type(batch).__name__,
    )


def checked_loss(value: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """The loss of a model, with the weight penalties of a declared one in training; refused if it is no scalar."""
    _check_loss(value, model)
    if value.dim() != 0:
        raise ConfigError(
            f"The loss has shape {tuple(value.shape)}, but it must be a scalar: the mean over the samples.",
            code="loss-shape",
            shape=tuple(value.shape),
        )
    if model.training and (penalty := penalty_of(model)) is not None:
        value = value + penalty
    return value


def check_trainable(model: torch.nn.Module) -> None:
    """Refuse a model that no step can change."""
    parameters = list(model.parameters())
    if any(p.requires_grad for p in parameters):
        return
    why = f"all of its {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
    raise ConfigError(
        f"The model cannot be trained: {why}. Set requires_grad=True on the parameters to train, for instance with "
        "model.requires_grad_(True).",
        code="nothing-to-train",
        parameters=len(parameters),
    )


def _check_loss(value: object, model: torch.nn.Module) -> None:
    """Refuse what cannot be differentiated, in training at the first step."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"The loss returned a {type(value).__name__}, but must return a tensor with one number: the mean over the "
            "samples. Return the tensor itself, without .item() or float().",
            code="loss-type",
            type=type(value).__name__,
        )
    if value.requires_grad or not model.training or not torch.is_grad_enabled():
        return
    check_trainable(model)
    raise ConfigError(
        "The loss does not depend on the parameters of the model, so there is no gradient. Compute it from the model's "
        "output, without .detach(), .item(), .numpy(), argmax or torch.no_grad() in between.",
        code="detached-loss",
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(b, device) for b in batch)
    return batch


def pieces(batch: Any, samples: np.ndarray, count: int) -> Iterator[tuple[Any, np.ndarray, float]]:
    """The batch in at most `count` micro-batches, each with its part of the `samples`, and that as a fraction."""
    if count == 1:
        yield batch, samples, 1.0
        return
    for low, high in split(len(samples), min(count, len(samples))):
        yield _rows(batch, low, high), samples[low:high], (high - low) / len(samples)


def samples_in(batch: Any) -> int:
    """The number of samples."""
    return len(batch) if isinstance(batch, torch.Tensor) else samples_in(batch[0])


def is_classification(output: Any, target: Any) -> bool:
    """Whether the output has a score per class, and the target a class per sample."""
    return (
        isinstance(output, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and output.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
    )


def correct_fraction(output: Any, target: Any) -> float | None:
    """The accuracy, if this is a classification."""
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
