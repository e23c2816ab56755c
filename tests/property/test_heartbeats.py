"""Failure detection: which processes are considered hung, and which are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.control import Events
from syncline.coordinator.heartbeats import FIRST_HEARTBEAT_S, LEAST_SILENCE_S, LEAST_STUCK_S, HeartbeatMonitor


def beat(worker_id: int, step: int, *, waits: bool = False, life: int = 0) -> Events:
    return Events(worker_id, step, [], life=life, waits=waits)


def monitored(until: float) -> HeartbeatMonitor:
    """Two processes with a heartbeat every tenth of a second, checked as often."""
    monitor = HeartbeatMonitor()
    for worker_id in (0, 1):
        monitor.on_start(worker_id, 0, 0.0)
    for tick in range(1, int(until * 10) + 1):
        for worker_id in (0, 1):
            monitor.on_heartbeat(beat(worker_id, tick), tick / 10)
        monitor.find_hung(tick / 10)
    return monitor


def found_hung(monitor: HeartbeatMonitor, start: float, until: float, *, alive: int) -> dict[int, str]:
    """Those found between two times in which only the process `alive` sends heartbeats."""
    found: dict[int, str] = {}
    for tick in range(int(start * 10) + 1, int(until * 10) + 1):
        monitor.on_heartbeat(beat(alive, 1000 + tick), tick / 10)
        found |= monitor.find_hung(tick / 10)
    return found


def test_only_the_silent_process_is_hung():
    assert found_hung(monitored(2.0), 2.0, 10.0, alive=0).keys() == {1}
    assert monitored(30.0).find_hung(30.1) == {}


def test_silence_is_noticed_within_three_seconds():
    assert found_hung(monitored(2.0), 2.0, 2.0 + LEAST_SILENCE_S, alive=0) == {}
    assert "no heartbeat for" in found_hung(monitored(2.0), 2.0, 5.0, alive=0)[1]


def test_a_script_may_be_silent_between_its_steps_but_not_in_them():
    for waits, hung in ((True, set()), (False, {1})):
        monitor = monitored(2.0)
        monitor.is_script = True
        monitor.on_heartbeat(beat(1, 20, waits=waits), 2.0)
        assert found_hung(monitor, 2.0, 12.0, alive=0).keys() == hung


def test_the_replacement_of_a_silent_process_gets_more_time():
    monitor = monitored(2.0)
    monitor.on_killed(1)
    assert found_hung(monitor, 2.0, 2.0 + 1.9 * LEAST_SILENCE_S, alive=0) == {}


def test_heartbeats_of_an_earlier_life_do_not_count():
    monitor = monitored(2.0)
    monitor.on_start(1, 1, 2.0)
    found: dict[int, str] = {}
    for tick in range(21, int(FIRST_HEARTBEAT_S + 3) * 10):
        monitor.on_heartbeat(beat(0, tick), tick / 10)
        monitor.on_heartbeat(beat(1, tick, life=0), tick / 10)
        found |= monitor.find_hung(tick / 10)
    assert found.keys() == {1}


@given(st.floats(0.5, 100.0))
def test_no_process_is_hung_if_the_monitor_itself_was_held_up(delay):
    assert monitored(2.0).find_hung(2.0 + delay) == {}


def test_the_first_heartbeat_may_take_long_but_not_for_ever():
    monitor = HeartbeatMonitor()
    monitor.on_start(0, 0, 0.0)
    now, found = 0.0, {}
    while now < FIRST_HEARTBEAT_S + 1:
        found |= monitor.find_hung(now)
        assert not found or now > FIRST_HEARTBEAT_S
        now += 0.2
    assert f"{FIRST_HEARTBEAT_S:g} s" in found[0]


def test_a_loop_that_does_not_advance_while_others_wait_is_stuck():
    monitor = monitored(2.0)
    found: dict[int, str] = {}
    for tick in range(21, int((LEAST_STUCK_S + 20) * 10)):
        monitor.on_heartbeat(beat(0, 21, waits=True), tick / 10)
        monitor.on_heartbeat(beat(1, 20), tick / 10)
        found |= monitor.find_hung(tick / 10)
    assert found.keys() == {1}
    assert "no progress" in found[1]


def test_a_loop_that_no_worker_waits_for_is_not_stuck():
    monitor = monitored(2.0)
    for tick in range(21, int((LEAST_STUCK_S + 20) * 10)):
        for worker_id in (0, 1):
            monitor.on_heartbeat(beat(worker_id, 20), tick / 10)
        assert monitor.find_hung(tick / 10) == {}
