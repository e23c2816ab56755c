"""The second half of a step: exchange, clip, update. One mechanism with two callers, the built-in loop and the
`optimizer.step()` of a user's own loop.

Here: `Update`. What all workers must know after every step (the loss, whether somebody wants to stop) rides along with
the gradients, so that all of them see the same numbers at the same step and none has to be asked. Under a strategy
whose workers go each at its own pace, they are called together for it (`meeting.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from syncline.errors import ConfigError
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.recorder import Recorder
from syncline.workers.meeting import Calls, Meeting

__all__ = ["RIDERS", "Outcome", "Update"]

RIDERS = 4
"""How many numbers ride along: loss, fraction correct, wish to stop, wish to save."""


class Outcome(NamedTuple):
    """What a step came to. After an exchange it is over all workers, and the same on each of them.

    `stop` and `save` are only ever true on all workers, at the same step.
    """

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
        calls: Calls,
        clip_norm: float | None,
    ) -> None:
        self._replica, self._exchange, self._recorder = replica, exchange, recorder
        self._calls, self._clip_norm = calls, clip_norm
        self._meeting = Meeting(replica.collective, calls)
        riders = replica.gradients.riders
        # On the CPU, NumPy writes a few numbers ten times faster than torch.
        self._riders_in_numpy = riders.numpy() if riders.device.type == "cpu" else None

    def __call__(
        self,
        weight: float,
        loss: float | None = None,
        correct: float | None = None,
        *,
        step: int,
        is_together: bool = False,
    ) -> Outcome:
        """Exchange and update; `loss` and `correct` are this worker's means, `weight` its part of the samples.

        `step` steps are done with this one; `is_together` says that all workers do something together after it. A loss
        that is not finite leaves model and optimiser as they were.
        """
        gradients, riders, calls = self._replica.gradients, self._replica.gradients.riders, self._calls
        gradients.attach()
        numbers = [loss or 0.0, correct or 0.0, float(calls.stop_wanted()), float(calls.save_wanted())]
        self._write_riders(numbers)
        self._recorder.waits = True
        has_agreed = self._exchange.before_update(weight)
        is_finite = math.isfinite(float(riders[0]) if has_agreed else numbers[0])
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
        total_loss, total_correct, stop, save = riders.tolist() if has_agreed else (*numbers[:2], 0.0, 0.0)
        if is_asynchronous:
            must = is_together or self._exchange.must_meet(step)
            agreed = self._meeting.after_step(step, must=must, may_go_on=self._exchange.may_go_on)
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
        """Come together with the others outside of a step: the loop has ended here, after `step` steps."""
        if self._exchange.is_asynchronous and self._meeting.after_step(step, must=True, may_go_on=_at_once) is None:
            raise ConfigError(
                f"This worker's loop ended after {step} steps, and another one's later. Under a strategy whose workers "
                "go each at its own pace all loops must take the same number of steps: end them after whole epochs, or "
                "use a synchronous strategy such as allreduce."
            )

    def _write_riders(self, numbers: list[float]) -> None:
        if self._riders_in_numpy is not None:
            self._riders_in_numpy[:] = numbers
        else:
            self._replica.gradients.riders.copy_(torch.tensor(numbers))


def _at_once(limit_s: float) -> bool:
    del limit_s
    return True
