"""Straggler detection, with made-up Progress events, no clock and no run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.coordinator.stragglers import SPAN_S, StragglerDetector
from syncline.observe.incidents import StragglerLog
from syncline.telemetry.events import Progress, WorkerSlow

_EVERY_S = 0.25


def _reports(work: dict[int, list[float]]) -> list[WorkerSlow]:
    """The events when each worker's own work on a step takes so long, while all wait for the slowest.

    Each list has a number for each quarter of a second.
    """
    detector, found = StragglerDetector(), list[WorkerSlow]()
    step = 0
    for number, works in enumerate(zip(*work.values(), strict=True)):
        steps = max(1, round(_EVERY_S / max(works)))
        step += steps
        for worker_id, seconds in zip(work, works, strict=True):
            phases = {"forward": steps * seconds, "exchange": max(0.0, _EVERY_S - steps * seconds)}
            event = Progress(
                worker_id=worker_id, epoch=0, step=step, samples=steps, cursor=0, seconds=_EVERY_S, phases=phases,
                time=number * _EVERY_S,
            )  # fmt: skip
            if (slow := detector.on_progress(event)) is not None:
                found.append(slow)
    return found


def _for(seconds: float, work: float) -> list[float]:
    return [work] * round(seconds / _EVERY_S)


@given(
    workers=st.integers(2, 6),
    slow=st.integers(0, 5),
    times=st.floats(2.5, 20),
    before=st.floats(4, 10),
    during=st.floats(3 * SPAN_S, 30),
)
def test_a_slow_worker_is_named_once_with_how_much_and_again_when_it_keeps_up(
    workers: int, slow: int, times: float, before: float, during: float
) -> None:
    slow %= workers
    usual = _for(before, 0.004) + _for(during, 0.004) + _for(3 * SPAN_S, 0.004)
    work = {worker_id: list(usual) for worker_id in range(workers)}
    work[slow] = _for(before, 0.004) + _for(during, 0.004 * times) + _for(3 * SPAN_S, 0.004)
    found = _reports(work)
    assert [(event.worker_id, event.is_slow) for event in found] == [(slow, True), (slow, False)]
    begun = len(_for(before, 1)) * _EVERY_S
    assert begun < found[0].time < begun + 2 * SPAN_S + 1
    assert abs(found[0].work_s / found[0].median_s - times) < 0.1 * times
    assert found[0].slowest_phase == "forward"


@given(work=st.lists(st.lists(st.floats(0.004, 0.0055), min_size=60, max_size=60), min_size=1, max_size=5))
def test_workers_that_are_about_alike_are_left_alone(work: list[list[float]]) -> None:
    assert _reports(dict(enumerate(work))) == []


@given(hitch=st.floats(0.1, 0.2), workers=st.integers(2, 5))
def test_a_worker_that_was_held_up_for_a_moment_is_not_slow(hitch: float, workers: int) -> None:
    work = {worker_id: _for(12, 0.004) for worker_id in range(workers)}
    work[0][24] = hitch
    assert _reports(work) == []


def test_after_a_view_change_all_workers_are_measured_again() -> None:
    detector = StragglerDetector()
    detector.on_members([0, 1])

    def report(worker_id: int, step: int, time: float, work: float) -> WorkerSlow | None:
        phases = {"data": work, "exchange": 0.01}
        event = Progress(
            worker_id=worker_id, epoch=0, step=step, samples=1, cursor=0, seconds=_EVERY_S, phases=phases, time=time
        )
        return detector.on_progress(event)

    for number in range(100):
        if number % 8 == 0:
            detector.on_members([0, 1])
        found = [report(worker_id, 10 * number + 10, number * _EVERY_S, 0.04 + 0.2 * worker_id) for worker_id in (0, 1)]
        assert found == [None, None]


def test_a_straggler_is_reported_with_its_worker_times_and_phase() -> None:
    stragglers = StragglerLog()
    slow = WorkerSlow(
        worker_id=2, step=40, is_slow=True, work_s=0.041, median_s=0.008, slowest_phase="data", time=100.0
    )
    shown = stragglers.on_slow(slow)
    assert all(fact in shown for fact in ("worker 2", "41 ms", "8 ms", "data")), shown
    again = WorkerSlow(
        worker_id=2, step=90, is_slow=False, work_s=0.008, median_s=0.008, slowest_phase="data", time=112.0
    )
    assert "worker 2" in stragglers.on_slow(again)
    (summary,) = stragglers.summary(200.0)
    assert all(fact in summary for fact in ("worker 2", "12 s", "5.1 times")), summary


def test_a_worker_that_fails_while_slow_was_slow_until_then() -> None:
    stragglers = StragglerLog()
    stragglers.on_slow(
        WorkerSlow(worker_id=1, step=40, is_slow=True, work_s=0.03, median_s=0.01, slowest_phase="forward", time=10.0)
    )
    stragglers.on_end(1, 15.0)
    (summary,) = stragglers.summary(100.0)
    assert all(fact in summary for fact in ("worker 1", "5.0 s", "3.0 times")), summary
