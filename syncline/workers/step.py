"""The second half of a step: exchange, clip, update. One mechanism with two callers, the built-in loop and the
`optimizer.step()` of a user's own loop.

Here: `Update`. What all workers must know after every step (the loss, whether somebody wants to stop) rides along with
the gradients, so that all of them see the same numbers at the same step and none has to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.recorder import Recorder

__all__ = ["RIDERS", "Outcome", "Update"]

RIDERS = 3
"""How many numbers ride along: loss, fraction correct, wish to stop."""


class Outcome(NamedTuple):
    """What a step came to, over all workers: the same on each of them."""

    loss: float | None
    correct: float | None
    is_finite: bool
    stop: bool


class Update:
    """Combine the gradients with everyone's and apply them."""

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        recorder: Recorder,
        *,
        clip_norm: float | None,
        stop_wanted: Callable[[], bool],
    ) -> None:
        self._replica, self._exchange, self._recorder = replica, exchange, recorder
        self._clip_norm = clip_norm
        self._stop_wanted = stop_wanted

    def __call__(self, weight: float, loss: float | None = None, correct: float | None = None) -> Outcome:
        """Exchange and update; `loss` and `correct` are this worker's means, `weight` its part of the samples.

        A loss that is not finite leaves model and optimiser as they were.
        """
        gradients, riders = self._replica.gradients, self._replica.gradients.riders
        gradients.attach()
        riders.copy_(torch.tensor([loss or 0.0, correct or 0.0, float(self._stop_wanted())]))
        self._exchange.before_update(weight)
        total_loss, total_correct, stop_votes = riders.tolist()
        self._recorder.mark("exchange")

        is_finite = math.isfinite(total_loss)
        if is_finite:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(gradients.parameters, self._clip_norm)
            self._replica.optimizer.step()
        self._exchange.after_update()
        self._recorder.mark("update")
        return Outcome(
            loss=total_loss if loss is not None else None,
            correct=total_correct if correct is not None else None,
            is_finite=is_finite,
            stop=stop_votes > 0,
        )
