"""`StrategyRecorder`: aggregates what a worker's strategy does into about one event per second.

Exchanges, bytes, staleness, disagreement and tournament matches. Not here: the exchanges that call it (`strategies/`),
and reading the events (`observe/strategy_stats.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline.comms.staleness import merge
from syncline.telemetry.events import ExchangeStats, StrategySwitched, TournamentMatch
from syncline.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from syncline.strategies.brackets import Contested

_INTERVAL_S = 1.0


class StrategyRecorder:
    """Emits its events through the worker's `Recorder`."""

    def __init__(self, recorder: Recorder, step: int, members: Sequence[int]) -> None:
        self._recorder = recorder
        self._members = members  # strategies know ranks in the View, events name worker ids
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
        """Add a counter of bytes sent."""
        self._counters.append(counter)

    def start(self) -> None:
        """Exclude the bytes sent so far, during setup."""
        self._bytes_before = self._bytes()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Exclude bytes sent within this context, for evaluation or checkpoints."""
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
        """Count one exchange of this worker."""
        self._exchanges += 1
        self._bytes_received += bytes_received
        if staleness:
            self._staleness = merge(self._staleness, staleness)
        if disagreement is not None:
            self._disagreement = disagreement
            self._wants_disagreement = False

    def read_old(self, steps: int) -> None:
        """Count a step with values of other workers that were so many steps old."""
        self._staleness = merge(self._staleness, {steps: 1})

    def contest(self, met: Contested) -> None:
        """Report a tournament match of this worker's model."""
        self._recorder.emit(
            TournamentMatch(
                worker_id=self._recorder.worker_id,
                step=self._recorder.last_step + 1,  # the step is not counted yet
                round=met.round,
                opponent_id=self._members[met.rival],
                own_score=met.own_score,
                opponent_score=met.rival_score,
                adopted=met.took_over,
                hyperparameters=met.hyperparameters,
            )
        )

    def switched(self, step: int, strategy: str) -> None:
        """Report the strategy from `step` on."""
        if self._recorder.worker_id == self._members[0]:  # once, by rank 0
            self._recorder.emit(StrategySwitched(step=step, strategy=strategy))

    def wants_disagreement(self) -> bool:
        return self._wants_disagreement

    def flush(self, is_last: bool) -> None:
        """Emit the aggregate if a second has passed, or if training pauses."""
        now = time.monotonic()
        step, bytes_now = self._recorder.last_step, self._bytes()
        is_empty = self._exchanges == 0 and step == self._step_before
        if is_empty or (not is_last and now - self._last_s < _INTERVAL_S):
            return
        self._recorder.emit(
            ExchangeStats(
                worker_id=self._recorder.worker_id,
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
