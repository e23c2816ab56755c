"""Training in stages: a model that trains one part of itself after another is told how far the run is.

Here: `Stages`, which the built-in loop asks before every step. A model takes part by having the two methods of
`Staged`; others are left alone. The stage is a function of the step alone, so all workers agree about it, and stopping
and going on changes nothing. Not here: what the stages are (the model knows: `zoo/stacked_autoencoder.py`).

A stage begins with an optimiser that remembers nothing. Otherwise momentum from before would go on moving parameters
that the new stage leaves alone; a gradient of zero does not, unless there is weight decay. Optimisers of parameter
servers are out of reach from here: there it goes on for a few steps.
"""

from __future__ import annotations

import functools
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from syncline.data.order import Position
from syncline.telemetry.events import Noted

__all__ = ["Staged", "Stages"]


@runtime_checkable
class Staged(Protocol):
    """A model that is trained in stages; `done` is the part of the run's steps that is over, from 0 to below 1."""

    def stage_at(self, done: float) -> str:
        """The name of the stage, as it appears in metrics."""

    def enter_stage(self, done: float) -> None:
        """Be what that stage trains."""


class Stages:
    """Which stage a run of `total_steps` steps is in."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> Noted | None:
        """Bring the model into the stage of the step that begins at `position`; what to tell if it is a new one."""
        staged = _staged(model)
        if staged is None:
            return None
        step = position.step - position.extra
        staged.enter_stage(self._done(step))
        stage = staged.stage_at(self._done(step))
        if step and stage == staged.stage_at(self._done(step - 1)):
            return None
        _forget(optimizer)
        return Noted(message=f"training in stages: {stage} from step {step} on", details={"stage": stage, "step": step})

    def before_evaluation(self, model: nn.Module, position: Position) -> str | None:
        """Bring the model into the stage of the last step before `position`; the stage's name, if there are stages."""
        staged = _staged(model)
        if staged is None:
            return None
        done = self._done(max(position.step - position.extra - 1, 0))
        staged.enter_stage(done)
        return staged.stage_at(done)

    def _done(self, step: int) -> float:
        return min(step / self._total, 1.0)


def _staged(model: nn.Module) -> Staged | None:
    has_stages = _has_stages(type(model))  # type: ignore[arg-type]  # mypy finds classes unhashable
    return cast("Staged", model) if has_stages else None


@functools.cache
def _has_stages(kind: type[nn.Module]) -> bool:
    """Remembered, for it is asked before every step."""
    return issubclass(kind, Staged)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state what it is before the first step, in place: a strategy may hold on to the tensors."""
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
