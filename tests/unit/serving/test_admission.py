"""`Admission`: bursts may wait, a standing queue is shed until it is calm. The clock is simulated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.serving.server.admission import Admission


def overload(run_s: float, factor: float, seconds: float, longest_wait_s: float = 10.0):
    """Requests at `factor` times the capacity of one engine: the wait of each that was taken, by its arrival."""
    admission, now, free_at = Admission(run_s), 0.0, 0.0
    starts, taken = [], []
    while now < seconds:
        for start, arrived in [one for one in starts if one[0] <= now]:
            admission.on_run(start, start - arrived)
            admission.on_ran(run_s, 1, 1)
            starts.remove((start, arrived))
        wait_s = max(0.0, free_at - now)
        if not wait_s and not starts:
            admission.on_idle()
        if admission.admits(now, wait_s, longest_wait_s, len(starts)):
            starts.append((now + wait_s, now))
            free_at = now + wait_s + run_s
            taken.append((now, wait_s))
        now += run_s / factor
    return taken


@given(st.floats(0.009, 0.05), st.floats(1.5, 6))
def test_in_lasting_overload_a_request_takes_less_than_twice_the_time_of_a_run(run_s, factor):
    taken = overload(run_s, factor, 4.0)
    late = [wait_s for now, wait_s in taken if now > 1.5]  # the queue of the first burst has drained
    assert late
    assert max(late) <= 0.6 * run_s + 1e-9
    assert len(late) >= 0.5 * 2.5 / run_s  # and the engine is not left idle


def test_a_burst_waits_instead_of_being_refused():
    admission = Admission(0.01)
    assert all(admission.admits(0.0, 0.01 * k, 1.0, k) for k in range(50))
    assert not admission.admits(0.0, 1.01, 1.0, 101)


def test_shedding_ends_when_nothing_was_refused_for_a_second():
    admission = Admission(0.01)
    admission.on_run(0.0, 0.5)
    assert not admission.admits(0.2, 0.5, 1.0, 50)
    admission.on_idle()
    assert not admission.admits(1.1, 0.5, 1.0, 50)
    assert admission.admits(2.2, 0.5, 1.0, 50)


def test_a_few_requests_to_a_quick_model_are_never_refused_because_other_programs_take_the_processor():
    admission = Admission(0.0003)
    for k in range(100):  # each run is interrupted: 8 connections wait for 80 ms
        admission.on_run(0.1 * k, 0.08)
        admission.on_ran(0.01, 1, 1)
    assert admission.admits(10.0, 8 * admission.run_s, 1.0, 8)
    assert not admission.admits(10.0, 50 * admission.run_s, 1.0, 50)


def test_the_wait_behind_large_requests_is_that_of_their_rows():
    admission = Admission(0.0001)
    for _ in range(100):
        admission.on_ran(0.01, 1, 100)
    assert 0.009 < admission.run_s <= 0.01
    assert 0.00009 < admission.row_s < 0.00011
    admission.on_run(0.0, 0.05)
    assert not admission.admits(0.2, 0.02, 1.0, 200)  # two of them are ahead: nothing that is quick
