"""Collecting what a worker does, cheaply enough for the hot path.

Here: `Recorder`, which adds up steps and hands over an event a few times a second. Not here: sending the events
(`workers/link.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from syncline.data.order import Position
from syncline.telemetry.events import WAITING, Event, Progress

__all__ = ["PHASES", "Recorder"]

PHASES = ("data", "forward", "backward", "exchange", "update")
"""The named moments of a step, in order."""

_INTERVAL_S = 0.25


class Recorder:
    """One worker's events. `mark` and `step` are called by the training thread, `drain` by any other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last_step = 0
        self.waits = True
        """Whether the loop waits for others just now, or does something of which nobody knows how long it takes."""
        self.total_samples = 0
        self.total_seconds = 0.0
        self.count_bytes: Callable[[], int] = lambda: 0
        """How many bytes this worker has sent in all; whoever sends knows."""
        self.count_waiting: Callable[[], float] = lambda: 0.0
        """For how long this worker has waited for others in all; whoever exchanges knows."""
        self.also_flush: Callable[[bool], None] = lambda is_last: None  # noqa: ARG005  # nobody has asked yet
        """Called with every flush: with True if nothing more comes for a while."""
        self._bytes_before, self._waited_before = 0, 0.0
        self._events: deque[Event] = deque()
        self._last_mark = self._window_start = time.perf_counter()
        self._reset()

    def emit(self, event: Event) -> None:
        """Hand over an event as it is."""
        self._events.append(event)

    def start(self) -> None:
        """Begin timing here: what came before belongs to no step."""
        self._last_mark = self._window_start = time.perf_counter()
        self._waited_before = self.count_waiting()

    def mark(self, phase: str) -> None:
        """The time since the last mark was spent on `phase`, and on waiting for others in the middle of it."""
        now, waited = time.perf_counter(), self.count_waiting()
        spent, waiting = now - self._last_mark, waited - self._waited_before
        if waiting > 0:
            waiting = min(waiting, spent)
            self._phases[WAITING] = self._phases.get(WAITING, 0.0) + waiting
            self._phases[phase] = self._phases.get(phase, 0.0) + spent - waiting
        else:
            self._phases[phase] = self._phases.get(phase, 0.0) + spent
        self.total_seconds += spent
        self._last_mark, self._waited_before = now, waited

    def step(
        self, position: Position, samples: int, batch: int, loss: float | None, correct: float | None, lr: float
    ) -> None:
        """A step is complete: `samples` here out of `batch`; `loss` and `correct` are over all workers.

        `position` is the one after the step.
        """
        self.last_step = position.step
        self._steps += 1
        self._samples += samples
        self.total_samples += batch
        if loss is not None and math.isfinite(loss):
            self._loss += loss
            self._loss_steps += 1
        if correct is not None and math.isfinite(correct):
            self._correct += correct
            self._correct_steps += 1
        if self._last_mark - self._window_start >= _INTERVAL_S:
            self.flush(position, lr, is_last=False)

    def flush(self, position: Position, lr: float, *, is_last: bool = True) -> None:
        """Make an event of what was added up."""
        self.also_flush(is_last)
        if self._steps == 0:
            return
        now = time.perf_counter()
        bytes_now = self.count_bytes()
        self.emit(
            Progress(
                rank=self.rank,
                epoch=position.epoch,
                cursor=position.cursor,
                step=position.step,
                samples=self._samples,
                seconds=now - self._window_start,
                loss=self._loss / self._loss_steps if self._loss_steps else None,
                accuracy=self._correct / self._correct_steps if self._correct_steps else None,
                lr=lr,
                bytes_sent=bytes_now - self._bytes_before,
                phases={k: round(v, 6) for k, v in self._phases.items()},
            )
        )
        self._window_start, self._bytes_before = now, bytes_now
        self._reset()

    def drain(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _reset(self) -> None:
        self._phases: dict[str, float] = {}
        self._steps = self._samples = 0
        self._loss = self._correct = 0.0
        self._loss_steps = self._correct_steps = 0
