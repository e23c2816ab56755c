"""Calls between backward and `step` that change gradients: they must see the gradients of all workers.

Here: `watch_gradient_calls`, which makes `clip_grad_norm_`, `clip_grad_value_` and `GradScaler.unscale_` combine the
gradients first, and `backward` check what kind of loss it is given. Only scripts that prepare something are affected;
the functions do the same as before otherwise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining

_training: LoopTraining | None = None


def watch_gradient_calls(training: LoopTraining) -> None:
    """Combine the gradients of `training` before such a call; called again, for another training."""
    global _training
    is_first, _training = _training is None, training
    if not is_first:
        return
    module = sys.modules["torch.nn.utils.clip_grad"]
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _replace(getattr(module, name), _combined_first(getattr(module, name)))
    _replace_backward()
    original = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if _training is not None and _training.updates.accumulated is not None:
            raise ConfigError(
                "A GradScaler is used inside worker.accumulate, which skips calls that the scaler counts. Accumulate "
                "by a condition instead: if worker.batch % 4 == 3: scaler.step(optimizer), and so on.",
                code="scaler-in-accumulate",
            )
        _combine([p for group in optimizer.param_groups for p in group["params"]])
        return original(self, optimizer, *arguments, **options)

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def _replace_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *arguments: Any, **options: Any) -> None:
        if _training is not None and isinstance(tensors, torch.Tensor):
            _training.updates.check_loss(tensors)
        original(tensors, *arguments, **options)

    torch.autograd.backward = backward


def _combined_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if _training is not None and _training.updates.is_incomplete:
            return torch.zeros(())  # worker.accumulate clips what it has accumulated, when that is complete
        _combine(parameters)
        return function(parameters, *arguments, **options)

    return clip


def _combine(parameters: Iterable[torch.Tensor]) -> None:
    if _training is None:
        return
    for number in _training.parts.number_of(list(parameters)):
        _training.updates.combine_early(number)


def _replace(before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Everywhere that the function is known by its name: scripts import it in different ways."""
    name = before.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is before:
            setattr(module, name, after)
