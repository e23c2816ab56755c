"""When the process that starts workers counts as stuck, and for how long a process has been stopped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.zygote_monitor import LEAST_SILENCE_S, STOPPED_S, StoppedTime, ZygoteMonitor

TICK_S = 0.05


def watched(
    until: float, *, answers_after: float | None, ready_at: float | None = 0.0, stopped_from: float = 1e9,
    patience: float = 1.0,
) -> tuple[float, str] | None:  # fmt: skip
    """When a zygote counted as stuck, and why; checked every tick, as by the coordinator."""
    monitor = ZygoteMonitor(0.0, patience=patience)
    pinged: float | None = None
    is_ready = False
    for tick in range(1, int(until / TICK_S) + 1):
        now = tick * TICK_S
        is_stopped = now >= stopped_from
        if not is_ready and not is_stopped and ready_at is not None and now >= ready_at:
            is_ready = True
            monitor.on_ready(now)
        if pinged is not None and not is_stopped and answers_after is not None and now - pinged >= answers_after:
            pinged = None
            monitor.on_answer(now)
        if monitor.wants_ping(now):
            pinged = now
        if (why := monitor.why_stuck(now, "T" if is_stopped else "S")) is not None:
            return now, why
    return None


@given(st.floats(0.0, LEAST_SILENCE_S - 2 * TICK_S), st.floats(0.0, 10.0))
def test_one_that_answers_in_time_is_never_stuck(answers_after, ready_at):
    assert watched(30.0, answers_after=answers_after, ready_at=ready_at) is None


@given(st.floats(1.0, 10.0), st.one_of(st.none(), st.floats(0.0, 10.0)))
def test_one_that_is_stopped_is_noticed_within_three_seconds_also_during_its_import(stopped_from, ready_at):
    at, why = watched(30.0, answers_after=0.1, ready_at=ready_at, stopped_from=stopped_from)
    assert stopped_from + STOPPED_S <= at < stopped_from + 3.0
    assert "stopped" in why


def test_one_that_does_not_answer_is_noticed_within_three_seconds():
    at, why = watched(30.0, answers_after=None)
    assert LEAST_SILENCE_S < at < 3.0
    assert "not answered" in why


def test_a_long_import_is_no_silence():
    assert watched(60.0, answers_after=None, ready_at=None) is None


def test_its_successor_gets_more_time_to_answer():
    at, _ = watched(30.0, answers_after=None, patience=2.0)
    assert at > 2 * LEAST_SILENCE_S


def test_slow_answers_extend_the_limit():
    monitor = ZygoteMonitor(0.0)
    monitor.on_ready(0.0)
    assert monitor.wants_ping(1.0)
    monitor.on_answer(2.5)
    assert monitor.wants_ping(3.0)
    for tick in range(int(3.0 / TICK_S), int(7.0 / TICK_S)):
        assert monitor.why_stuck(tick * TICK_S, "S") is None


def test_a_delay_of_the_owner_itself_does_not_count():
    monitor = ZygoteMonitor(0.0)
    monitor.on_ready(0.0)
    assert monitor.wants_ping(1.0)
    assert monitor.why_stuck(1.0, "S") is None
    assert monitor.why_stuck(60.0, "T") is None, "perhaps the whole machine was suspended"
    assert monitor.why_stuck(60.1, "S") is None


def test_a_moment_in_which_it_is_stopped_does_not_count():
    monitor = ZygoteMonitor(0.0)
    for tick, state in enumerate("TTSTTSTTSTTS", 1):
        assert monitor.why_stuck(tick * STOPPED_S * 0.4, state) is None


@given(st.lists(st.tuples(st.sampled_from("TTTSRDt"), st.floats(0.01, 1.0))))
def test_only_time_in_which_a_process_is_seen_stopped_without_a_break_counts(checks):
    stopped, now, expected = StoppedTime(), 0.0, 0.0
    is_stopped = False
    for state, wait_s in checks:
        now += wait_s
        expected = expected + wait_s if is_stopped and state == "T" else 0.0
        is_stopped = state == "T"
        assert abs(stopped.update(now, state) - expected) < 1e-9


def test_time_in_which_nothing_was_checked_does_not_count_as_stopped():
    stopped = StoppedTime()
    assert stopped.update(1.0, "T") == 0.0
    assert stopped.update(60.0, "T") == 0.0, "perhaps the whole machine was suspended"
    assert stopped.update(60.5, "T") == 0.5
