"""Curves: the right size for anything, and the right shape for what is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.observe.terminal.curve import chart, curve

anything = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60)
sizes = st.integers(min_value=-2, max_value=50)


@given(values=anything, width=sizes, height=sizes, ascii_only=st.booleans())
def test_a_curve_always_has_the_size_that_was_asked_for(
    values: list[float], width: int, height: int, ascii_only: bool
) -> None:
    lines = curve(values, width, height, ascii_only=ascii_only)
    assert len(lines) == max(height, 0)
    assert all(len(line) == max(width, 0) for line in lines)


@given(values=anything, width=sizes, height=sizes, first=st.text("abc", max_size=9), last=st.text("abc", max_size=9))
def test_a_chart_has_two_lines_more_than_its_curve_and_the_same_width(
    values: list[float], width: int, height: int, first: str, last: str
) -> None:
    lines = chart(values, width, height, first=first, last=last)
    assert len(lines) == max(height, 0) + 2
    assert all(len(line) == max(width, 0) for line in lines)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=400), width=st.integers(4, 60), height=st.integers(2, 9)
)
def test_every_column_of_a_curve_has_a_point(values: list[float], width: int, height: int) -> None:
    lines = curve(values, width, height, label=lambda _: "a label that leaves no room for itself" * 3)
    assert all(any(line[x] != " " for line in lines) for x in range(width))


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60), height=st.integers(2, 9))
def test_values_that_are_not_finite_change_nothing(values: list[float], height: int) -> None:
    mixed = [math.nan, *values, math.inf, -math.inf]
    assert curve(mixed, 40, height) == curve(values, 40, height)


@given(value=st.floats(-1e300, 1e300), count=st.integers(2, 30))
def test_equal_values_are_one_level_line(value: float, count: int) -> None:
    lines = curve([value] * count, 30, 5, label=lambda _: "x")
    assert [bool(line[3:].strip()) for line in lines].count(True) == 1
    assert lines[2][3:].strip()


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_to_draw_is_blank(values: list[float]) -> None:
    assert curve(values, 10, 3) == [" " * 10] * 3


def test_a_single_value_is_a_dot_at_the_left() -> None:
    lines = curve([3.0], 12, 3)
    drawn = [line[3:] for line in lines]
    assert "".join(drawn).strip() != ""
    assert all(not row[1:].strip() for row in drawn)


def test_the_largest_value_labels_the_top_and_the_smallest_the_bottom() -> None:
    lines = curve([0.5, 2.25, 1.0], 30, 4)
    assert lines[0].startswith("2.25 ┤")
    assert lines[1].startswith("     │")
    assert lines[-1].startswith(" 0.5 ┤")


def test_a_curve_goes_up_where_its_values_do() -> None:
    rising = curve([0, 1, 2, 3], 24, 4, ascii_only=True)
    first_row, last_row = rising[0][3:], rising[-1][3:]
    assert first_row.index("*") > last_row.rindex("*")


def test_ascii_is_ascii() -> None:
    assert "".join(chart([3, 1, 2], 40, 5, first="epoch 1", last="epoch 3", ascii_only=True)).isascii()


def test_a_chart_names_both_ends_of_its_axis() -> None:
    lines = chart([1, 2], 40, 4, first="epoch 1", last="epoch 3")
    assert lines[-1].split() == ["epoch", "1", "epoch", "3"]
    assert lines[-1].endswith("epoch 3")


def test_values_as_far_apart_as_floats_can_be_are_drawn() -> None:
    lines = curve([-1.7e308, 1.7e308], 40, 4)
    assert lines[0].strip()
    assert lines[-1].strip()
