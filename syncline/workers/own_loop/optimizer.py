"""A user's optimizer whose `step` exchanges with the other workers.

Here: `prepare_optimizer`, which changes the optimizer itself, so that schedulers, loss scalers and the script's own
references keep working, and no step can bypass the exchange; `plain_optimizer`, the same without that. Not here: what a
step does (`training.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Steps(Protocol):
    """What a prepared optimizer calls."""

    def step(self, number: int, closure: Callable[[], Any] | None) -> Any:
        """The script calls `step` on optimizer `number`."""

    def zero_grad(self, number: int) -> bool:
        """The script sets the gradients of optimizer `number` to zero; False if they are to be kept."""

    def add_group(self, number: int, group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """The script adds parameters to optimizer `number`, which `add` does."""


class PreparedOptimizer(torch.optim.Optimizer):
    """A mixin. Optimizers get a class with it by assignment; see `prepare_optimizer`."""

    syncline_steps: Steps
    syncline_number: int
    plain_class: type[torch.optim.Optimizer]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange with the other workers, and update."""
        self._opt_called = True  # schedulers warn if they are called first
        return self.syncline_steps.step(self.syncline_number, closure)

    # torch wraps `step` of every class that it sees in its hooks; the optimizer's own step has them already.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it notes the call, which schedulers ask for

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.syncline_steps.zero_grad(self.syncline_number):
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.syncline_steps.add_group(self.syncline_number, param_group, super().add_param_group)

    def __reduce__(self) -> Any:
        """Pickle as the optimizer that it was."""
        return _new, (self.plain_class,), vars(self)


def prepare_optimizer(optimizer: torch.optim.Optimizer, steps: Steps, number: int) -> PreparedOptimizer:
    """Make `optimizer` call `steps`; returns the same object.

    It gets a class of its own, derived from the one it had, so that code which asks for its type is right, and its
    attributes are the same as before.
    """
    plain = optimizer.plain_class if isinstance(optimizer, PreparedOptimizer) else type(optimizer)
    # A scheduler replaces the method `step` of the object by one of its own, which only notes that it was called.
    vars(optimizer).pop("step", None)
    names = {
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
        "plain_class": plain,
        "syncline_steps": steps,
        "syncline_number": number,
    }
    optimizer.__class__ = type(plain.__name__, (PreparedOptimizer, plain), names)
    assert isinstance(optimizer, PreparedOptimizer)
    return optimizer


def plain_optimizer(optimizer: PreparedOptimizer) -> torch.optim.Optimizer:
    """The optimizer as it was: it has the same parameters and state, and `step` only updates."""
    plain = _new(optimizer.plain_class)
    plain.__dict__ = optimizer.__dict__
    return plain


def _new(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return cls.__new__(cls)


class OptimizerGroup:
    """Several optimizers where a checkpoint and a recovery expect one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: slots for optimizer in self._optimizers for p, slots in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        return self._optimizers[0].defaults

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["optimizers"]
        if len(saved) != len(self._optimizers):
            raise ValueError(f"it has {len(saved)} optimizers instead of {len(self._optimizers)}")
        for optimizer, own in zip(self._optimizers, saved, strict=True):
            optimizer.load_state_dict(own)
