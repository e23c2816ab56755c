"""Every micro-batch passes every stage once in each direction; no schedule can block; the bubble is what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.layouts.schedule import SCHEDULES, Pass, bubble

STAGES, MICRO_BATCHES = st.integers(1, 5), st.integers(1, 9)


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICRO_BATCHES)
def test_each_micro_batch_is_computed_once_in_each_direction_and_in_order(name, stages, count):
    for stage in range(stages):
        passes = list(SCHEDULES[name](stage, stages, count))
        for direction in ("forward", "backward"):
            assert [p.micro_batch for p in passes if p.direction == direction] == list(range(count))
        assert all(passes.index(Pass("forward", n)) < passes.index(Pass("backward", n)) for n in range(count))


@given(STAGES, MICRO_BATCHES)
def test_one_forward_one_backward_keeps_as_many_micro_batches_as_stages_are_left(stages, count):
    for stage in range(stages):
        in_flight = most = 0
        for direction, _ in SCHEDULES["1f1b"](stage, stages, count):
            in_flight += 1 if direction == "forward" else -1
            most = max(most, in_flight)
        assert most == min(stages - stage, count)


def finish_times(name, stages, count):
    """When each stage ends, if each pass takes one unit of time; fails if a stage waits for ever."""
    done: dict[tuple[int, Pass], int] = {}
    waiting = {stage: list(SCHEDULES[name](stage, stages, count)) for stage in range(stages)}
    clocks = dict.fromkeys(range(stages), 0)
    while any(waiting.values()):
        before = len(done)
        for stage, passes in waiting.items():
            while passes:
                needed = stage - 1 if passes[0].direction == "forward" else stage + 1
                if 0 <= needed < stages and (needed, passes[0]) not in done:
                    break
                start = max(clocks[stage], done.get((needed, passes[0]), 0))
                clocks[stage] = done[stage, passes.pop(0)] = start + 1
        assert len(done) > before, "all stages wait for each other"
    return clocks


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICRO_BATCHES)
def test_no_stage_waits_for_ever_and_the_first_loses_the_time_of_the_bubble(name, stages, count):
    total = finish_times(name, stages, count)[0]
    assert (total - 2 * count) / total == pytest.approx(bubble(stages, count))
