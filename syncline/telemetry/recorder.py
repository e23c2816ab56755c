"""`Recorder`: aggregates a worker's steps into a few events per second, cheaply enough for the hot path.

Not here: sending the events (`workers/link.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from syncline.data.assignment import Position
from syncline.telemetry.events import WAITING, Event, Progress

PHASES = ("data", "forward", "backward", "exchange", "update")
"""The phases of a step, in order."""

_INTERVAL_S = 0.25


class Recorder:
    """One worker's events. The training thread calls `mark` and `step`; another thread calls `drain`."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.last_step = 0
        self.waits = True
        """Whether the loop waits for other workers, or does something of unknown duration."""
        self.total_samples = 0
        self.total_seconds = 0.0
        self.count_bytes: Callable[[], int] = lambda: 0
        """Total bytes sent by this worker; set by the strategy."""
        self.count_inside: Callable[[], int] = lambda: 0
        """How much of that stayed inside its replica."""
        self.count_waiting: Callable[[], float] = lambda: 0.0
        """Total seconds spent waiting for other workers; set by the collective."""
        self.also_flush: Callable[[bool], None] = lambda is_last: None  # noqa: ARG005  # until a StrategyRecorder sets it
        """Called with every flush; True if training pauses after it."""
        self._bytes_before, self._inside_before, self._waited_before = 0, 0, 0.0
        self._events: deque[Event] = deque()
        self._last_mark = self._window_start = time.perf_counter()
        self._reset()

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def start(self) -> None:
        """Start timing: what came before belongs to no step."""
        self._last_mark = self._window_start = time.perf_counter()
        self._waited_before = self.count_waiting()

    def leave_out(self) -> None:
        """The time since the last mark belongs to no step; the steps before it are still reported, without it."""
        now = time.perf_counter()
        self._window_start += now - self._last_mark
        self._last_mark, self._waited_before = now, self.count_waiting()

    def mark(self, phase: str) -> None:
        """Attribute the time since the last mark to `phase`, minus the waiting measured meanwhile."""
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
        """Count a completed step: `samples` of the `batch` on this worker; `loss` and `correct` over all workers.

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
        """Emit a Progress event for the steps since the last one."""
        self.also_flush(is_last)
        if self._steps == 0:
            return
        now = time.perf_counter()
        bytes_now, inside_now = self.count_bytes(), self.count_inside()
        self.emit(
            Progress(
                worker_id=self.worker_id,
                epoch=position.epoch,
                cursor=position.cursor,
                step=position.step,
                samples=self._samples,
                seconds=now - self._window_start,
                loss=self._loss / self._loss_steps if self._loss_steps else None,
                accuracy=self._correct / self._correct_steps if self._correct_steps else None,
                lr=lr,
                bytes_sent=bytes_now - self._bytes_before,
                bytes_inside=max(0, inside_now - self._inside_before),  # a new View counts from 0
                phases={k: round(v, 6) for k, v in self._phases.items()},
            )
        )
        self._window_start, self._bytes_before, self._inside_before = now, bytes_now, inside_now
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
