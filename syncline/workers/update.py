"""The second half of a step: exchange, clip, update.

Here: `Updater`. The values that all workers need after every step (the loss, requests to stop or save) are piggybacked
on the gradients, so that all workers see the same numbers at the same step without a second exchange. Workers of an
asynchronous strategy meet instead (`meeting.py`). Not here: the rest of the step (`stepper.py`), and what a mark stands
for (`agreement.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from syncline.errors import ConfigError
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.recorder import Recorder
from syncline.workers.agreement import is_unanimous
from syncline.workers.meeting import Agreement, Meeting, Requests, coded, decoded

PIGGYBACKED_COUNT = 7
"""The number of piggybacked values: loss, fraction correct, one, mark, its square, request to stop, request to save."""


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
        self._meeting = Meeting(exchange.independent, requests)
        piggybacked = replica.gradients.piggybacked
        # On a CPU, NumPy reads and writes a few numbers ten times faster than torch.
        self._piggybacked_in_numpy = piggybacked.numpy() if piggybacked.device.type == "cpu" else None
        self._values = [0.0] * PIGGYBACKED_COUNT  # this worker's own, or those of all workers if they have agreed
        self._has_agreed = False

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
        self.combine(weight, loss, correct)
        return self.apply(
            weight, step=step, is_together=is_together, has_loss=loss is not None, has_correct=correct is not None
        )

    def combine(
        self, weight: float, loss: float | None = None, correct: float | None = None, *, mark: int | None = None
    ) -> bool:
        """The first half: combine the gradients, if the strategy does so before the update.

        `mark` is a small number that must be the same on all workers; False if it is not.
        """
        gradients, requests = self._replica.gradients, self._requests
        gradients.attach()
        number = float(mark or 0)
        self._values = [
            loss or 0.0,
            correct or 0.0,
            1.0,
            number,
            number * number,
            float(requests.stop_requested()),
            float(requests.save_requested()),
        ]
        self._write_piggybacked(self._values)
        self._recorder.waits = True
        self._has_agreed = self._exchange.before_update(weight)
        self._recorder.mark("exchange")
        self._recorder.waits = False
        self._values = self._read_piggybacked()  # also if only the workers of a replica have agreed
        return mark is None or not self._has_agreed or is_unanimous(*self._values[2:5])

    def apply(
        self,
        weight: float,
        *,
        step: int,
        is_together: bool = False,
        has_loss: bool = True,
        has_correct: bool = True,
        update: Callable[[], None] | None = None,
    ) -> Outcome:
        """The second half: clip and update, by `update` instead of the exchange if given."""
        is_finite = math.isfinite(self._values[0])
        if is_finite:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._replica.gradients.parameters, self._clip_norm)
            (update or self._exchange.update)()
        self._recorder.mark("update")

        is_asynchronous = self._exchange.is_asynchronous
        self._recorder.waits = True
        if self._exchange.after_update(weight):
            self._values, self._has_agreed = self._read_piggybacked(), True
        loss, correct, _, _, _, stop, save = self._values
        if not self._has_agreed:
            stop = save = 0.0  # all workers stop and save together
        if is_asynchronous:
            must = is_together or self._exchange.must_meet(step)
            agreed = self._meet(step, must=must, may_continue=self._exchange.may_continue)
            stop, save = (agreed.stop, agreed.save) if agreed else (0.0, 0.0)
        self._recorder.mark("exchange")
        self._recorder.waits = False
        return Outcome(
            loss=loss if has_loss else None,
            correct=correct if has_correct else None,
            is_finite=is_finite,
            stop=stop > 0,
            save=save > 0,
        )

    def meet(self, step: int) -> None:
        """Meet the other workers outside of a step: this worker's loop has ended after `step` steps."""
        if not self._exchange.is_asynchronous:
            return
        if self._meet(step, must=True, may_continue=lambda _: True) is None:
            raise ConfigError(
                f"This worker's loop ended after {step} steps, but another worker's loop took more. With an "
                "asynchronous strategy all loops must take the same number of steps: end them after whole epochs, or "
                "use a synchronous strategy such as allreduce.",
                code="unequal-loops",
                step=step,
            )

    def _meet(self, step: int, *, must: bool, may_continue: Callable[[float], bool]) -> Agreement | None:
        """Workers that train as one meet as one: one of them does, and the others do what it has agreed to."""

        def decision() -> int:
            return coded(self._meeting.after_step(step, must=must, may_continue=may_continue))

        return decoded(self._exchange.decide(decision))

    def _read_piggybacked(self) -> list[float]:
        numbers = self._piggybacked_in_numpy
        values: list[float] = (self._replica.gradients.piggybacked if numbers is None else numbers).tolist()
        return values

    def _write_piggybacked(self, numbers: list[float]) -> None:
        if self._piggybacked_in_numpy is not None:
            self._piggybacked_in_numpy[:] = numbers
        else:
            self._replica.gradients.piggybacked.copy_(torch.tensor(numbers))
