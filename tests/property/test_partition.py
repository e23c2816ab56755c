"""Cutting a row into parts."""

from __future__ import annotations

import math

import pytest
from generators import counts, sizes
from hypothesis import given
from hypothesis import strategies as st

from syncline.compute.partition import cut_rows, share, split


@given(counts, sizes)
def test_the_parts_put_together_are_the_whole(count, parts):
    assert [i for low, high in split(count, parts) for i in range(low, high)] == list(range(count))


@given(counts, sizes)
def test_there_are_as_many_parts_as_asked_for_and_they_differ_by_one_at_most(count, parts):
    lengths = [high - low for low, high in split(count, parts)]
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1


@given(counts, sizes)
def test_longer_parts_come_first(count, parts):
    lengths = [high - low for low, high in split(count, parts)]
    assert lengths == sorted(lengths, reverse=True)


@given(counts, sizes)
def test_a_share_is_a_part_of_the_split(count, parts):
    assert [share(count, parts, index) for index in range(parts)] == split(count, parts)


@pytest.mark.parametrize("parts", [0, -1])
def test_nothing_can_be_split_into_no_parts(parts):
    with pytest.raises(ValueError, match=f"Cannot split into {parts} parts"):
        share(10, parts, 0)
    assert split(10, parts) == []


@pytest.mark.parametrize("index", [-1, 4])
def test_a_part_outside_the_split_does_not_exist(index):
    with pytest.raises(ValueError, match=f"There is no part {index} of 4"):
        share(10, 4, index)


shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)


def row_ends(of: list[tuple[int, ...]]) -> set[int]:
    """Every place where a row of some parameter ends, and the beginning."""
    ends, start = {0}, 0
    for shape in of:
        row = math.prod(shape[1:])
        ends |= {start + row * (i + 1) for i in range(math.prod(shape) // row if row else 0)}
        start += math.prod(shape)
    return ends


@given(shapes, sizes)
def test_parts_of_parameters_put_together_are_all_of_them(of, parts):
    cuts = cut_rows(of, parts)
    assert len(cuts) == parts
    assert [i for low, high in cuts for i in range(low, high)] == list(range(sum(map(math.prod, of))))


@given(shapes, sizes)
def test_parameters_are_cut_only_between_rows(of, parts):
    assert {place for part in cut_rows(of, parts) for place in part} <= row_ends(of)


@given(shapes, sizes)
def test_no_part_of_the_parameters_is_more_than_a_row_from_its_fair_share(of, parts):
    total = sum(map(math.prod, of))
    longest = max((math.prod(shape[1:]) for shape in of if math.prod(shape)), default=0)
    assert all(abs((high - low) * parts - total) <= longest * parts for low, high in cut_rows(of, parts))


@given(st.integers(0, 1000), sizes)
def test_a_parameter_of_one_dimension_is_cut_anywhere(count, parts):
    lengths = [high - low for low, high in cut_rows([(count,)], parts)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("parts", [0, -1])
def test_parameters_cannot_be_cut_into_no_parts(parts):
    with pytest.raises(ValueError, match=f"Cannot cut parameters into {parts} parts"):
        cut_rows([(2, 3)], parts)
