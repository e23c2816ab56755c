"""What a worker reports of its steps: how often, and over which time."""

from __future__ import annotations

import pytest

from syncline.data.assignment import Position
from syncline.telemetry import recorder as module
from syncline.telemetry.events import Progress
from syncline.telemetry.recorder import Recorder


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def take_step(recorder: Recorder, clock: Clock, number: int, *, seconds: float) -> None:
    clock.now += seconds
    recorder.mark("compute")
    recorder.step(Position(epoch=0, cursor=0, step=number), 10, 20, None, None, 0.1)


def reports(recorder: Recorder) -> list[Progress]:
    return [event for event in recorder.drain() if isinstance(event, Progress)]


def test_a_loop_with_epochs_of_milliseconds_reports_its_progress(clock: Clock):
    """Each epoch used to begin a new window, so that no window was ever long enough to be reported."""
    recorder = Recorder(0)
    for step in range(1, 101):
        if step % 4 == 1:
            clock.now += 5.0  # between two epochs
            recorder.leave_out()
        take_step(recorder, clock, step, seconds=1 / 64)
    found = reports(recorder)
    assert [event.step for event in found] == [16, 32, 48, 64, 80, 96]


def test_what_happens_between_epochs_counts_for_no_step(clock: Clock):
    recorder = Recorder(0)
    for step in range(1, 6):
        clock.now += 60.0
        recorder.leave_out()
        take_step(recorder, clock, step, seconds=0.1)
    recorder.flush(Position(epoch=0, cursor=0, step=5), 0.1)
    found = reports(recorder)
    assert sum(event.samples for event in found) == 50
    assert sum(event.seconds for event in found) == pytest.approx(0.5)
    assert sum(sum(event.phases.values()) for event in found) == pytest.approx(0.5)
