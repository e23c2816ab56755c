"""Thinning, ticks and labels of the report's charts, for any numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.observe.page.ticks import clock, round_numbers, round_times
from syncline.observe.report.downsample import rates, thin, total_rates
from syncline.observe.report.line_chart import logarithmic_scale_for, scale_for, spread_out
from syncline.observe.report.record import Window

FINITE = st.floats(-1e9, 1e9)
POINTS = st.lists(st.tuples(st.floats(0, 1e6), FINITE), min_size=1, max_size=300)
WINDOWS = st.lists(
    st.builds(Window, st.floats(0, 1000), st.integers(0, 10_000), st.floats(0.001, 10)), min_size=1, max_size=50
)


@given(POINTS, st.integers(3, 50))
def test_thinning_keeps_the_ends_the_order_and_only_real_points(points, most):
    points = [(float(i), y) for i, (_, y) in enumerate(points)]
    kept = thin(points, most)
    assert len(kept) == min(len(points), most)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)


@given(st.integers(10, 500), st.data())
def test_a_lone_peak_survives_thinning(count, data):
    peak = data.draw(st.integers(1, count - 2))
    points = [(float(i), 100.0 if i == peak else 0.0) for i in range(count)]
    assert (float(peak), 100.0) in thin(points, 5)


@given(WINDOWS, st.floats(0.01, 20))
def test_rates_lie_between_the_slowest_and_the_fastest_window(windows, each_s):
    windows = sorted(windows)
    found = rates(windows, each_s)
    slowest, fastest = (f(w.samples / w.seconds for w in windows) for f in (min, max))
    assert found
    assert all(slowest * (1 - 1e-9) - 1e-9 <= rate <= fastest * (1 + 1e-9) for _, rate in found)


@given(st.lists(WINDOWS, min_size=1, max_size=4), st.floats(0.1, 50))
def test_total_rates_are_in_the_order_of_time_and_no_faster_than_all_together(workers, each_s):
    found = total_rates(workers, each_s)
    assert [t for t, _ in found] == sorted(t for t, _ in found)
    together = sum(max(w.samples / w.seconds for w in windows) for windows in workers)
    assert all(0 <= rate <= together * (1 + 1e-9) + 1e-9 for _, rate in found)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_few_in_order_and_inside(low, span, most):
    high = low + span
    for ticks in (round_numbers(low, high, most), round_times(low, high, most)):
        assert len(ticks) <= most
        assert ticks == sorted(set(ticks))
        slack = 1e-6 * max(abs(low), abs(high), 1)
        assert all(low - slack <= t <= high + slack for t in ticks)


@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_every_value_lies_on_its_axis(values, starts_at_zero):
    scale = scale_for(values, starts_at_zero=starts_at_zero)
    assert all(-1e-9 <= scale.part(v) <= 1 + 1e-9 for v in values)
    assert scale.low < scale.high


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20))
def test_values_of_very_different_size_lie_on_an_axis_of_powers_of_ten(values):
    scale = logarithmic_scale_for(values)
    assert (scale is None) is (max(values) / min(values) < 50)
    if scale is not None:
        assert all(-1e-9 <= scale.part(v) <= 1 + 1e-9 for v in values)
        assert all(math.log10(t) == pytest.approx(round(math.log10(t))) for t in scale.ticks)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_axis_of_fractions_ends_at_1(values):
    assert scale_for(values, is_fraction=True).high <= 1.1


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_labels_are_apart_and_in_the_order_of_their_lines(places):
    moved = spread_out(places, 8.0)
    pairs = sorted(zip(places, moved, strict=True))
    gaps = [b - a for a, b in pairwise(sorted(moved))]
    assert all(gap >= 8.0 - 1e-9 for gap in gaps)
    assert all(a[1] <= b[1] + 1e-9 for a, b in pairwise(pairs) if a[0] != b[0])
    assert all(0 <= m <= 100 for m in moved)


@given(st.floats(0, 1e6))
def test_a_moment_is_written_with_no_more_than_it_needs(seconds):
    words = clock(seconds)
    assert len(words) <= 9
    assert math.isfinite(seconds)
    assert words.endswith("s") or words.count(":") in (1, 2)
