"""Training in stages: a model that trains one part of itself after another, such as a stacked autoencoder.

Here: `Stages`, which the built-in loop calls before every step. A model opts in by implementing the two methods of
`Staged`. The stage is a function of the step alone, so all workers agree on it, and a resumed run has the same stages.
Not here: what the stages are (the model: `models/zoo/stacked_autoencoder.py`).

A stage begins with zeroed optimizer state. Otherwise momentum of the previous stage would keep moving parameters that
the new stage freezes; a zero gradient does not, unless there is weight decay. Optimizers on parameter servers cannot be
reset from here: there the old momentum decays over a few steps.
"""

from __future__ import annotations

import functools
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from syncline.data.assignment import Position
from syncline.telemetry.events import InfoMessage


@runtime_checkable
class Staged(Protocol):
    """A model that is trained in stages; `done` is the completed fraction of the run's steps, from 0 to below 1."""

    def stage_at(self, done: float) -> str:
        """The name of the stage, as it appears in metrics."""

    def enter_stage(self, done: float) -> None:
        """Switch to the stage at `done`."""


class Stages:
    """Which stage a run of `total_steps` steps is in."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> InfoMessage | None:
        """Switch the model to the stage of the step at `position`; returns an event if the stage is new."""
        staged = _staged(model)
        if staged is None:
            return None
        step = position.step - position.extra
        staged.enter_stage(self._done(step))
        stage = staged.stage_at(self._done(step))
        if step and stage == staged.stage_at(self._done(step - 1)):
            return None
        _reset(optimizer)
        return InfoMessage(
            message=f"training in stages: {stage} from step {step} on", details={"stage": stage, "step": step}
        )

    def before_evaluation(self, model: nn.Module, position: Position) -> str | None:
        """Switch the model to the stage of the last step before `position`; the stage's name, if there are stages."""
        staged = _staged(model)
        if staged is None:
            return None
        done = self._done(max(position.step - position.extra - 1, 0))
        staged.enter_stage(done)
        return staged.stage_at(done)

    def _done(self, step: int) -> float:
        return min(step / self._total, 1.0)


def is_staged(model: nn.Module) -> bool:
    """Whether the model trains one part of itself after another."""
    return _staged(model) is not None


def _staged(model: nn.Module) -> Staged | None:
    has_stages = _has_stages(type(model))  # type: ignore[arg-type]  # mypy finds classes unhashable
    return cast("Staged", model) if has_stages else None


@functools.cache
def _has_stages(kind: type[nn.Module]) -> bool:
    """Cached, because it is called in every step."""
    return issubclass(kind, Staged)


def _reset(optimizer: torch.optim.Optimizer) -> None:
    """Zero the optimizer's state in place: a strategy may hold references to the tensors."""
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
