"""Who is called slow: with made-up reports of workers, no clock and no run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.coordinator.pace import SPAN_S, Pace
from syncline.telemetry.events import Progress, WorkerSlow
from syncline.view.stragglers import Stragglers

_EVERY_S = 0.25


def _reports(work: dict[int, list[float]]) -> list[WorkerSlow]:
    """What is told when each worker's own work on a step takes so long, report after report; all wait for the slowest.

    Each list has a number for each quarter of a second.
    """
    pace, told = Pace(), list[WorkerSlow]()
    step = 0
    for number, works in enumerate(zip(*work.values(), strict=True)):
        steps = max(1, round(_EVERY_S / max(works)))
        step += steps
        for rank, seconds in zip(work, works, strict=True):
            phases = {"forward": steps * seconds, "exchange": max(0.0, _EVERY_S - steps * seconds)}
            event = Progress(
                rank=rank, epoch=0, step=step, samples=steps, cursor=0, seconds=_EVERY_S, phases=phases,
                time=number * _EVERY_S,
            )  # fmt: skip
            if (slow := pace.on_progress(event)) is not None:
                told.append(slow)
    return told


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
    work = {rank: list(usual) for rank in range(workers)}
    work[slow] = _for(before, 0.004) + _for(during, 0.004 * times) + _for(3 * SPAN_S, 0.004)
    told = _reports(work)
    assert [(event.rank, event.is_slow) for event in told] == [(slow, True), (slow, False)]
    begun = len(_for(before, 1)) * _EVERY_S
    assert begun < told[0].time < begun + 2 * SPAN_S + 1
    assert abs(told[0].work_s / told[0].others_s - times) < 0.1 * times
    assert told[0].mostly == "forward"


@given(work=st.lists(st.lists(st.floats(0.004, 0.0055), min_size=60, max_size=60), min_size=1, max_size=5))
def test_workers_that_are_about_alike_are_left_alone(work: list[list[float]]) -> None:
    assert _reports(dict(enumerate(work))) == []


@given(hitch=st.floats(0.1, 0.2), workers=st.integers(2, 5))
def test_a_worker_that_was_held_up_for_a_moment_is_not_slow(hitch: float, workers: int) -> None:
    work = {rank: _for(12, 0.004) for rank in range(workers)}
    work[0][24] = hitch
    assert _reports(work) == []


def test_after_a_view_change_everybody_is_judged_anew() -> None:
    pace = Pace()
    pace.on_members([0, 1])

    def report(rank: int, step: int, time: float, work: float) -> WorkerSlow | None:
        phases = {"data": work, "exchange": 0.01}
        event = Progress(rank=rank, epoch=0, step=step, samples=1, cursor=0, seconds=_EVERY_S, phases=phases, time=time)
        return pace.on_progress(event)

    for number in range(100):
        if number % 8 == 0:
            pace.on_members([0, 1])
        told = [report(rank, 10 * number + 10, number * _EVERY_S, 0.04 + 0.2 * rank) for rank in (0, 1)]
        assert told == [None, None]


def test_in_words() -> None:
    stragglers = Stragglers()
    slow = WorkerSlow(rank=2, step=40, is_slow=True, work_s=0.041, others_s=0.008, mostly="data", time=100.0)
    assert stragglers.on_slow(slow) == (
        "worker 2 is slow: it works 41 ms on a step, the others 8 ms; most of the difference is in reading its data"
    )
    again = WorkerSlow(rank=2, step=90, is_slow=False, work_s=0.008, others_s=0.008, mostly="data", time=112.0)
    assert stragglers.on_slow(again) == "worker 2 keeps up with the others again"
    assert stragglers.account(200.0) == ["worker 2 was slow for 12 s: 5.1 times the others' work on a step"]


def test_a_worker_that_is_lost_while_slow_was_slow_until_then() -> None:
    stragglers = Stragglers()
    stragglers.on_slow(
        WorkerSlow(rank=1, step=40, is_slow=True, work_s=0.03, others_s=0.01, mostly="forward", time=10.0)
    )
    stragglers.on_gone(1, 15.0)
    assert stragglers.account(100.0) == ["worker 1 was slow for 5.0 s: 3.0 times the others' work on a step"]
