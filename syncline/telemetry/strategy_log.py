"""Collecting what a worker's strategy does: exchanges, bytes, staleness, disagreement, contests.

Here: `StrategyRecorder`, which adds up and hands over an event about once a second. Not here: who tells it (the
exchanges of `strategies/`) and who reads it (`syncline strategies --run`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from syncline.algorithms.brackets import Contested
from syncline.algorithms.staleness import merge
from syncline.telemetry.events import Contest, Exchanged, StrategySwitched
from syncline.telemetry.recorder import Recorder

__all__ = ["StrategyRecorder"]

_INTERVAL_S = 1.0


class StrategyRecorder:
    """What one worker's strategy did, as events through the worker's `Recorder`."""

    def __init__(self, recorder: Recorder, step: int) -> None:
        self._recorder = recorder
        self._counters: list[Callable[[], int]] = []
        self._last_s = time.monotonic()
        self._step_before, self._bytes_before = step, 0
        self._wants_disagreement = True
        self._exchanges = self._bytes_received = 0
        self._staleness: dict[int, int] = {}
        self._disagreement: float | None = None
        recorder.count_bytes = self._bytes
        recorder.also_flush = self.flush

    def count_bytes(self, counter: Callable[[], int]) -> None:
        """From now on, what this counter says was sent counts, too."""
        self._counters.append(counter)

    def start(self) -> None:
        """What was sent until now was for getting ready."""
        self._bytes_before = self._bytes()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is sent while this lasts is for evaluating or saving, and does not count as the strategy's."""
        before = self._bytes()
        try:
            yield
        finally:
            self._bytes_before += self._bytes() - before

    def exchanged(
        self,
        *,
        bytes_received: int = 0,
        staleness: Mapping[int, int] | None = None,
        disagreement: float | None = None,
    ) -> None:
        """This worker has exchanged once more."""
        self._exchanges += 1
        self._bytes_received += bytes_received
        if staleness:
            self._staleness = merge(self._staleness, staleness)
        if disagreement is not None:
            self._disagreement = disagreement
            self._wants_disagreement = False

    def contest(self, met: Contested) -> None:
        """This worker's model has met another one."""
        rank, step = self._recorder.rank, self._recorder.last_step + 1  # the step is not counted yet
        self._recorder.emit(Contest(rank=rank, step=step, **dataclasses.asdict(met)))

    def switched(self, step: int, strategy: str) -> None:
        """From `step` on the workers keep in agreement in another way."""
        if self._recorder.rank == 0:
            self._recorder.emit(StrategySwitched(step=step, strategy=strategy))

    def wants_disagreement(self) -> bool:
        """Once for each event."""
        return self._wants_disagreement

    def flush(self, is_last: bool) -> None:
        """Hand over what was added up, if enough time has passed or nothing more comes for a while."""
        now = time.monotonic()
        step, bytes_now = self._recorder.last_step, self._bytes()
        is_empty = self._exchanges == 0 and step == self._step_before
        if is_empty or (not is_last and now - self._last_s < _INTERVAL_S):
            return
        self._recorder.emit(
            Exchanged(
                rank=self._recorder.rank,
                step=step,
                steps=step - self._step_before,
                exchanges=self._exchanges,
                bytes_sent=bytes_now - self._bytes_before,
                bytes_received=self._bytes_received,
                staleness=self._staleness,
                disagreement=self._disagreement,
            )
        )
        self._last_s, self._step_before, self._bytes_before = now, step, bytes_now
        self._wants_disagreement = True
        self._exchanges = self._bytes_received = 0
        self._staleness = {}
        self._disagreement = None

    def _bytes(self) -> int:
        return sum(counter() for counter in self._counters)
