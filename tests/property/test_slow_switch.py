"""A link lets through no more than its rate, keeps the order, and loses only what is cut or would wait too long."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.lab.namespaces import read_rate
from syncline.lab.slow_switch import EmulatedLink

frames = st.lists(st.tuples(st.floats(0, 0.05), st.integers(60, 60_000)), min_size=1, max_size=60)


@given(frames, st.floats(1e4, 1e9))
def test_never_faster_than_the_rate_and_never_out_of_order(sent: list[tuple[float, int]], rate: float) -> None:
    link, now, arrived = EmulatedLink(rate=rate), 0.0, []
    for wait, size in sent:
        now += wait
        left = link.send(size, now)
        if left is not None:
            assert left >= now + size / rate * (1 - 1e-9), "a frame takes its time"
            arrived.append((left, size))
    times = [left for left, _ in arrived]
    assert times == sorted(times)
    for (first, _), (second, size) in itertools.pairwise(arrived):
        assert second - first >= size / rate * (1 - 1e-6), "one after the other"


@given(frames)
def test_without_a_rate_everything_passes_at_once_until_it_is_cut(sent: list[tuple[float, int]]) -> None:
    link, now = EmulatedLink(), 0.0
    for wait, size in sent:
        now += wait
        assert link.send(size, now) == now
    link.is_cut = True
    assert link.send(60, now) is None
    link.is_cut = False
    assert link.send(60, now) == now


def test_what_would_wait_for_half_a_second_is_lost_and_the_rest_is_not():
    link = EmulatedLink(rate=1000)
    assert [link.send(250, 0.0) for _ in range(5)] == [0.25, 0.5, 0.75, None, None]
    assert link.send(250, 0.3) == 1.0


@pytest.mark.parametrize("text", ["", "fast", "1 gigabit", "-1mbit", "0mbit", "1gbyte"])
def test_an_invalid_rate_is_rejected_with_examples(text):
    with pytest.raises(ConfigError, match="1gbit, 100mbit or 64kbit"):
        read_rate(text)
