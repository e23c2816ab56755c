"""Marks: workers that do the same agree, and one that does not is noticed whatever its share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from syncline.workers.agreement import digest, is_unanimous, mark_of

MARKS = st.integers(0, 31)


def summed(marks: list[int], shares: list[int]) -> tuple[float, float, float]:
    """The sums over workers in float32, as they are piggybacked on gradients."""
    total = np.float32(sum(shares))
    one = squares = first = np.float32(0)
    for mark, share in zip(marks, shares, strict=True):
        weight = np.float32(share) / total
        one, first = one + weight, first + weight * np.float32(mark)
        squares = squares + weight * np.float32(mark * mark)
    return float(one), float(first), float(squares)


@given(mark=MARKS, shares=st.lists(st.integers(1, 100), min_size=1, max_size=64))
def test_equal_marks_agree(mark, shares):
    assert is_unanimous(*summed([mark] * len(shares), shares))


@given(mark=MARKS, other=MARKS, shares=st.lists(st.integers(1, 8), min_size=2, max_size=64), who=st.integers(0, 63))
def test_one_different_mark_is_noticed(mark, other, shares, who):
    marks = [mark] * len(shares)
    marks[who % len(shares)] = other
    assert is_unanimous(*summed(marks, shares)) == (mark == other)


@given(step=st.integers(0, 10**9), ahead=st.integers(1, 31), rest=st.lists(st.integers(0, 2**60), max_size=4))
def test_workers_a_few_steps_apart_never_have_the_same_mark(step, ahead, rest):
    assert mark_of([step, *rest]) != mark_of([step + ahead, *rest])


KINDS = st.lists(st.integers(0, 2), min_size=1, max_size=200)


@given(kinds=KINDS, place=st.integers(0, 199), other=st.integers(0, 2))
def test_a_gradient_that_only_one_worker_has_is_noticed(kinds, place, other):
    place %= len(kinds)
    changed = [*kinds[:place], other, *kinds[place + 1 :]]
    assert (mark_of([digest(kinds)]) == mark_of([digest(changed)])) == (kinds[place] == other)


def test_a_layer_that_only_one_worker_uses_is_noticed_as_a_rule():
    """Its weight and its bias: with the weights of a polynomial in -1 they cancelled each other."""
    unused = mark_of([digest([0] * 200)])
    unnoticed = [n for n in range(0, 198, 2) if mark_of([digest([0] * n + [1, 1])]) == unused]
    assert len(unnoticed) <= 10


def test_numbers_that_are_not_finite_are_no_disagreement():
    assert is_unanimous(float("nan"), float("nan"), float("nan"))
    assert is_unanimous(0.0, 0.0, 0.0), "workers without samples say nothing"
