"""Medians, spreads and paired ratios, for any numbers."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.statistics import paired_ratios, quantile, spread

times = st.floats(min_value=1e-6, max_value=1e6)
powers_of_two = st.integers(-20, 20).map(lambda e: 2.0**e)
fractions = st.floats(0, 1)


@given(st.lists(times, min_size=1))
def test_the_spread_is_ordered_from_least_to_most(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert min(values) == found.least <= found.low <= found.median <= found.high <= found.most == max(values)
    assert found.count == len(values)


@given(st.lists(times, min_size=1), st.randoms())
def test_the_order_of_measurements_does_not_matter(values: list[float], random) -> None:
    shuffled = random.sample(values, len(values))
    assert spread(shuffled) == spread(values)


@given(st.lists(times, min_size=1))
def test_the_median_is_that_of_the_standard_library(values: list[float]) -> None:
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values), rel=1e-12)


@given(st.lists(times, min_size=2))
def test_the_quartiles_are_those_of_the_standard_library(values: list[float]) -> None:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    found = spread(values)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)


@given(times, st.integers(1, 20))
def test_equal_measurements_have_no_spread(value: float, count: int) -> None:
    found = spread([value] * count)
    assert found is not None
    assert found.least == found.low == found.median == found.high == found.most == value


@given(st.lists(times, min_size=1), fractions, fractions)
def test_a_larger_fraction_gives_no_smaller_quantile(values: list[float], a: float, b: float) -> None:
    assert quantile(values, min(a, b)) <= quantile(values, max(a, b))


@given(st.lists(times, min_size=1), fractions, powers_of_two)
def test_another_unit_scales_the_quantiles(values: list[float], fraction: float, factor: float) -> None:
    assert quantile([factor * v for v in values], fraction) == factor * quantile(values, fraction)


def test_no_measurements_have_no_spread_and_no_quantile() -> None:
    assert spread([]) is None
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@given(st.lists(times))
def test_a_contender_is_once_its_own_size(values: list[float]) -> None:
    assert paired_ratios(values, values) == [1.0] * len(values)


@given(st.lists(st.tuples(times, times, powers_of_two)))
def test_a_machine_that_is_slow_in_some_rounds_does_not_change_the_ratios(rounds) -> None:
    quiet = paired_ratios([v for v, _, _ in rounds], [b for _, b, _ in rounds])
    slowed = paired_ratios([v * slow for v, _, slow in rounds], [b * slow for _, b, slow in rounds])
    assert slowed == quiet


@given(st.lists(st.tuples(st.none() | times, st.none() | times)))
def test_only_rounds_with_both_values_give_a_ratio(rounds) -> None:
    ratios = paired_ratios([v for v, _ in rounds], [b for _, b in rounds])
    assert ratios == [v / b for v, b in rounds if v is not None and b is not None]


def test_a_baseline_of_zero_gives_no_ratio() -> None:
    assert paired_ratios([1.0, 3.0], [0.0, 2.0]) == [1.5]


def test_ratios_of_rounds_that_do_not_correspond_are_refused() -> None:
    with pytest.raises(ValueError):
        paired_ratios([1.0], [1.0, 2.0])
