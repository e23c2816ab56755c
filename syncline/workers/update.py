"""The second half of a step: exchange, clip, update.

Here: `Updater`. The values that all workers need after every step (the loss, requests to stop or save) are piggybacked
on the gradients, so that all workers see the same numbers at the same step without a second exchange. Workers of an
asynchronous strategy meet instead (`meeting.py`). Not here: the rest of the step (`stepper.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from syncline.errors import ConfigError
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.recorder import Recorder
from syncline.workers.meeting import Meeting, Requests

PIGGYBACKED_COUNT = 4
"""The number of piggybacked values: loss, fraction correct, request to stop, request to save."""


class Outcome(NamedTuple):
    """The result of a step: over all workers, and the same on each of them, if the strategy exchanged in it.

    `stop` and `save` are true on all workers at the same step, or on none.
    """

    loss: float | None
    correct: float | None
    is_finite: bool
    stop: bool
    save: bool


class Updater:
    """Exchanges gradients with the other workers, and updates the replica."""

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        recorder: Recorder,
        *,
        requests: Requests,
        clip_norm: float | None,
    ) -> None:
        self._replica, self._exchange, self._recorder = replica, exchange, recorder
        self._requests, self._clip_norm = requests, clip_norm
        self._meeting = Meeting(replica.collective, requests)
        piggybacked = replica.gradients.piggybacked
        # On a CPU, NumPy writes a few numbers ten times faster than torch.
        self._piggybacked_in_numpy = piggybacked.numpy() if piggybacked.device.type == "cpu" else None

    def __call__(
        self,
        weight: float,
        loss: float | None = None,
        correct: float | None = None,
        *,
        step: int,
        is_together: bool = False,
    ) -> Outcome:
        """Exchange and update; `loss` and `correct` are this worker's means, `weight` its fraction of the samples.

        `step` is the number of steps including this one; `is_together` says that all workers do something together
        after it. A loss that is not finite leaves model and optimizer unchanged.
        """
        gradients, piggybacked, requests = self._replica.gradients, self._replica.gradients.piggybacked, self._requests
        gradients.attach()
        numbers = [loss or 0.0, correct or 0.0, float(requests.stop_requested()), float(requests.save_requested())]
        self._write_piggybacked(numbers)
        self._recorder.waits = True
        has_agreed = self._exchange.before_update(weight)
        is_finite = math.isfinite(float(piggybacked[0]) if has_agreed else numbers[0])
        self._recorder.mark("exchange")
        self._recorder.waits = False

        if is_finite:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(gradients.parameters, self._clip_norm)
            self._exchange.update()
        self._recorder.mark("update")

        is_asynchronous = self._exchange.is_asynchronous
        self._recorder.waits = True
        if self._exchange.after_update(weight):
            has_agreed = True
        total_loss, total_correct, stop, save = piggybacked.tolist() if has_agreed else (*numbers[:2], 0.0, 0.0)
        if is_asynchronous:
            must = is_together or self._exchange.must_meet(step)
            agreed = self._meeting.after_step(step, must=must, may_continue=self._exchange.may_continue)
            stop, save = (agreed.stop, agreed.save) if agreed else (0.0, 0.0)
        self._recorder.mark("exchange")
        self._recorder.waits = False
        return Outcome(
            loss=total_loss if loss is not None else None,
            correct=total_correct if correct is not None else None,
            is_finite=is_finite,
            stop=stop > 0,
            save=save > 0,
        )

    def meet(self, step: int) -> None:
        """Meet the other workers outside of a step: this worker's loop has ended after `step` steps."""
        if not self._exchange.is_asynchronous:
            return
        if self._meeting.after_step(step, must=True, may_continue=lambda _: True) is None:
            raise ConfigError(
                f"This worker's loop ended after {step} steps, but another worker's loop took more. With an "
                "asynchronous strategy all loops must take the same number of steps: end them after whole epochs, or "
                "use a synchronous strategy such as allreduce.",
                code="unequal-loops",
                step=step,
            )

    def _write_piggybacked(self, numbers: list[float]) -> None:
        if self._piggybacked_in_numpy is not None:
            self._piggybacked_in_numpy[:] = numbers
        else:
            self._replica.gradients.piggybacked.copy_(torch.tensor(numbers))
