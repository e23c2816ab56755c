"""Cutting a row into parts."""

from __future__ import annotations

import pytest
from generators import counts, sizes
from hypothesis import given

from syncline.algorithms.partition import share, split


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
