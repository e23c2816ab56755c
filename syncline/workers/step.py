"""The second half of a step: exchange, clip, update. One mechanism with two callers, the built-in loop and the
`optimizer.step()` of a user's own loop.

Here: `Update`. What all workers must know after every step (the loss, whether somebody wants to stop) rides along with
the gradients, so that all of them see the same numbers at the same step and none has to be asked.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.recorder import Recorder

__all__ = ["RIDERS", "Outcome", "Update", "Wishes"]

RIDERS = 4
"""How many numbers ride along: loss, fraction correct, wish to stop, wish to save."""


class Wishes(Protocol):
    """What this worker would like all of them to do after the step."""

    def stop_wanted(self) -> bool:
        """Whether the run should end."""

    def save_wanted(self) -> bool:
        """Whether it is time for a checkpoint."""


class Outcome(NamedTuple):
    """What a step came to. After an exchange it is over all workers, and the same on each of them."""

    loss: float | None
    correct: float | None
    is_finite: bool
    stop: bool
    save: bool


class Update:
    """Combine the gradients with everyone's and apply them."""

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        recorder: Recorder,
        *,
        wishes: Wishes,
        clip_norm: float | None,
    ) -> None:
        self._replica, self._exchange, self._recorder = replica, exchange, recorder
        self._wishes, self._clip_norm = wishes, clip_norm
        riders = replica.gradients.riders
        # On the CPU, NumPy writes a few numbers ten times faster than torch.
        self._riders_in_numpy = riders.numpy() if riders.device.type == "cpu" else None

    def __call__(self, weight: float, loss: float | None = None, correct: float | None = None) -> Outcome:
        """Exchange and update; `loss` and `correct` are this worker's means, `weight` its part of the samples.

        A loss that is not finite leaves model and optimiser as they were.
        """
        gradients, riders, wishes = self._replica.gradients, self._replica.gradients.riders, self._wishes
        gradients.attach()
        numbers = [loss or 0.0, correct or 0.0, float(wishes.stop_wanted()), float(wishes.save_wanted())]
        self._write_riders(numbers)
        has_agreed = self._exchange.before_update(weight)
        is_finite = math.isfinite(float(riders[0]) if has_agreed else numbers[0])
        self._recorder.mark("exchange")

        if is_finite:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(gradients.parameters, self._clip_norm)
            self._replica.optimizer.step()
        self._recorder.mark("update")

        if self._exchange.after_update(weight):
            has_agreed = True
        total_loss, total_correct, stop, save = riders.tolist() if has_agreed else (*numbers[:2], 0.0, 0.0)
        self._recorder.mark("exchange")
        return Outcome(
            loss=total_loss if loss is not None else None,
            correct=total_correct if correct is not None else None,
            is_finite=is_finite,
            stop=stop > 0,
            save=save > 0,
        )

    def _write_riders(self, numbers: list[float]) -> None:
        if self._riders_in_numpy is not None:
            self._riders_in_numpy[:] = numbers
        else:
            self._replica.gradients.riders.copy_(torch.tensor(numbers))
