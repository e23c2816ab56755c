"""Time to an accuracy: samples from the curve of a probe, and seconds for each strategy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.planning.test_auto import EXACT, plan, predicted

from syncline.errors import ConfigError, UnknownName
from syncline.measuring import Enough, Probing
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.target import Point, Target, read_target, samples_to_target
from syncline.telemetry.events import Evaluated, Progress


def power_law(steepness: float, count: int) -> list[Point]:
    """An error that falls with this power of the samples."""
    return [Point(1000 * n, 1 - 0.3 * n**-steepness) for n in range(1, count + 1)]


@given(st.floats(0.3, 1.5), st.integers(4, 12))
def test_beyond_the_probe_a_power_law_is_continued(steepness, count):
    points = power_law(steepness, count)
    needed = 3000 * count
    found = samples_to_target(points, 1 - 0.3 * (needed / 1000) ** -steepness)
    assert found.mid == pytest.approx(needed, rel=0.01)
    assert found.low < needed < found.high


def test_within_the_probe_the_crossing_is_between_two_points():
    points = [Point(1000, 0.9), Point(2000, 0.96), Point(3000, 0.99)]
    found = samples_to_target(points, 0.98)
    assert 2000 < found.mid < 3000
    assert found.low <= found.mid <= found.high
    assert samples_to_target(points, 0.96).mid == pytest.approx(2000)
    first = samples_to_target([Point(1000, 0.99)], 0.98)
    assert 0 < first.low < first.mid < 1000 < first.high


def test_what_cannot_be_told_is_not_predicted():
    assert samples_to_target([], 0.9) is None
    assert samples_to_target(power_law(1.0, 2), 0.99) is None, "two points are too few"
    flat = [Point(1000 * n, 0.9) for n in range(1, 9)]
    assert samples_to_target(flat, 0.99) is None
    worse = [Point(1000 * n, 0.9 - 0.01 * n) for n in range(1, 9)]
    assert samples_to_target(worse, 0.99) is None
    assert samples_to_target(power_law(0.3, 8), 0.99999) is None, "too far away"


def test_a_strategy_takes_its_samples_at_its_speed_and_the_start():
    target = Target(accuracy=0.98, samples=Range(8000.0, 10_000.0, 12_000.0), source="")
    seconds = target.seconds(EXACT)
    assert seconds.mid == pytest.approx(10_000 * 0.1 / 64 + 1.0)
    twice = target.seconds(predicted("sparknet", 0.05, Range(1.0, 2.0, 3.0)))
    assert twice.mid == pytest.approx(seconds.mid)
    assert twice.high - twice.low > seconds.high - seconds.low
    assert target.seconds(predicted("mine", 0.05)) is None
    assert Target(accuracy=0.98, samples=None, source="").seconds(EXACT) is None


def test_a_plan_with_a_target_shows_it_in_the_table_and_as_data():
    import dataclasses

    target = Target(accuracy=0.985, samples=Range(8000.0, 10_000.0, 12_000.0), source="A probe.")
    made = dataclasses.replace(plan(EXACT, predicted("mine", 0.05)), target=target)
    assert "to 98.5%" in made.table()
    assert "17 s (12 s to 22 s)" in made.table()
    assert made.seconds_to_target("mine") is None
    assert set(made.to_dict()["target"]["seconds"]) == {"allreduce"}
    assert plan(EXACT).seconds_to_target("allreduce") is None
    with pytest.raises(UnknownName):
        made.seconds_to_target("yours")


def test_a_target_is_read_as_a_percentage_or_a_fraction():
    assert read_target("98.5%") == pytest.approx(0.985)
    assert read_target("0.985") == 0.985
    for text in ("98.5", "100%", "0", "much", "-1%"):
        with pytest.raises(ConfigError):
            read_target(text)


def test_the_probe_ends_at_the_target_or_when_its_time_is_over():
    def evaluated(epoch: int, accuracy: float) -> Evaluated:
        return Evaluated(epoch=epoch, step=1, metrics={"test/accuracy": accuracy}, seconds=0.0)

    step = Progress(worker_id=0, epoch=0, step=1, samples=1, seconds=0.1, cursor=1)
    probing = Probing(0.9, math.inf, 500)
    for event in (step, evaluated(1, 0.8), evaluated(2, 0.85)):
        probing.on_event(event)
    with pytest.raises(Enough):
        probing.on_event(evaluated(3, 0.91))
    assert probing.points == [Point(500, 0.8), Point(1000, 0.85), Point(1500, 0.91)]
    with pytest.raises(Enough):
        Probing(0.9, 0.0, 500).on_event(step)
