"""Who is thought to be gone, and who is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.coordinator.watch import FIRST_WORD_S, LEAST_SILENCE_S, LEAST_STUCK_S, Watch


def watched(until: float) -> Watch:
    """Two processes that have said something every tenth of a second, and been looked at as often."""
    watch = Watch()
    for number in (0, 1):
        watch.on_start(number, 0.0)
    for tick in range(1, int(until * 10) + 1):
        for number in (0, 1):
            watch.on_sign(number, tick, False, tick / 10)
        watch.hung(tick / 10)
    return watch


def looked_at(watch: Watch, start: float, until: float, speaks: int) -> dict[int, str]:
    """Only one of them goes on speaking."""
    found: dict[int, str] = {}
    for tick in range(int(start * 10) + 1, int(until * 10) + 1):
        watch.on_sign(speaks, 1000 + tick, False, tick / 10)
        found |= watch.hung(tick / 10)
    return found


def test_who_speaks_is_there():
    assert looked_at(watched(2.0), 2.0, 10.0, speaks=0).keys() == {1}
    assert watched(30.0).hung(30.1) == {}


def test_silence_is_noticed_within_three_seconds():
    assert looked_at(watched(2.0), 2.0, 2.0 + LEAST_SILENCE_S, speaks=0) == {}
    assert "gave no sign of life" in looked_at(watched(2.0), 2.0, 5.0, speaks=0)[1]


def test_a_successor_of_one_that_was_silent_is_given_more_time():
    watch = watched(2.0)
    watch.on_given_up(1)
    assert looked_at(watch, 2.0, 2.0 + 1.9 * LEAST_SILENCE_S, speaks=0) == {}


@given(st.floats(0.5, 100.0))
def test_nobody_is_to_blame_if_the_judge_itself_was_held_up(delay):
    assert watched(2.0).hung(2.0 + delay) == {}


def test_the_first_word_may_take_long_but_not_for_ever():
    watch = Watch()
    watch.on_start(0, 0.0)
    now, found = 0.0, {}
    while now < FIRST_WORD_S + 1:
        found |= watch.hung(now)
        assert not found or now > FIRST_WORD_S
        now += 0.2
    assert "did not say a word" in found[0]


def test_one_that_speaks_but_does_not_advance_while_others_wait_is_stuck():
    watch = watched(2.0)
    found: dict[int, str] = {}
    for tick in range(21, int((LEAST_STUCK_S + 20) * 10)):
        watch.on_sign(0, 21, True, tick / 10)
        watch.on_sign(1, 20, False, tick / 10)
        found |= watch.hung(tick / 10)
    assert found.keys() == {1}
    assert "did not advance" in found[1]


def test_if_nobody_waits_nobody_is_stuck():
    watch = watched(2.0)
    for tick in range(21, int((LEAST_STUCK_S + 20) * 10)):
        for number in (0, 1):
            watch.on_sign(number, 20, False, tick / 10)
        assert watch.hung(tick / 10) == {}
