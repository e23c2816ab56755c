"""Which node agents count as gone although their connections are open, and which do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.remote.agent_silence import LEAST_SILENCE_S, UNREACHABLE_S, SilenceMonitor

TICK_S = 0.25


def noticed(monitor: SilenceMonitor, start: float, until: float, *, is_reachable: bool, beats: bool = True):
    """When agent "a" counts as silent, while "b" sends a heartbeat every tick if it `beats`."""
    tick = start
    while tick < until:
        if beats:
            monitor.on_heard("b", tick)
        monitor.begin_check(tick)
        if beats:
            assert monitor.silent_for("b", tick, is_reachable=True) is None
        if monitor.silent_for("a", tick, is_reachable=is_reachable) is not None:
            return tick
        tick += TICK_S
    return None


def connected() -> SilenceMonitor:
    monitor = SilenceMonitor()
    for agent in "ab":
        monitor.on_connected(agent, 0.0)
    return monitor


def test_a_stopped_agent_is_noticed_within_three_seconds():
    assert LEAST_SILENCE_S < noticed(connected(), 0.0, 60.0, is_reachable=True) < 3.0


def test_an_agent_whose_host_does_not_respond_either_gets_more_time():
    assert noticed(connected(), 0.0, 60.0, is_reachable=False) > UNREACHABLE_S


@given(st.lists(st.floats(0.01, LEAST_SILENCE_S), max_size=20))
def test_pauses_up_to_the_limit_are_no_failure_and_extend_it(pauses):
    monitor, now = connected(), 0.0
    for pause in pauses:
        now += pause
        assert monitor.silent_for("a", now, is_reachable=True) is None
        monitor.on_heard("a", now)
    longest = max(pauses, default=0.0)
    assert monitor.silent_for("a", now + max(LEAST_SILENCE_S, 2.9 * longest), is_reachable=True) is None


def test_a_delay_of_the_driver_itself_does_not_count():
    monitor = connected()
    monitor.begin_check(0.5)
    monitor.begin_check(100.0)
    assert monitor.silent_for("a", 100.0, is_reachable=True) is None


def test_an_agent_that_has_left_is_not_missed():
    monitor = connected()
    monitor.on_disconnected("a")
    assert noticed(monitor, 0.0, 60.0, is_reachable=True) is None
