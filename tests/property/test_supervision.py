"""The supervision of workers under every interleaving of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.control import Failed, Finished
from syncline.coordinator.supervision import (
    FAILING_GRACE_S,
    MESSAGE_GRACE_S,
    STOPPING_GRACE_S,
    End,
    Kill,
    Supervision,
    TellAbort,
    TellStop,
)  # fmt: skip
from syncline.engines.engine import Exit


def finished(rank: int, *, early: bool = False) -> Finished:
    return Finished(rank, early, {"metrics": {}})


def failed(rank: int, *, consequence: bool = False) -> Failed:
    kind = "PeerLost" if consequence else "ValueError"
    return Failed(rank, kind, "message", "", 3, [], consequence)


def exited(rank: int, code: int | None = 0, signal: int | None = None) -> Exit:
    return Exit(rank, 100 + rank, code, signal)


events = st.lists(
    st.one_of(
        st.tuples(st.just("finished"), st.integers(0, 2)),
        st.tuples(st.just("failed"), st.integers(0, 2)),
        st.tuples(st.just("consequence"), st.integers(0, 2)),
        st.tuples(st.just("exit"), st.integers(0, 2)),
        st.tuples(st.just("killed"), st.integers(0, 2)),
        st.tuples(st.just("interrupt"), st.just(0)),
        st.tuples(st.just("tick"), st.integers(0, 3)),
    ),
    max_size=25,
)


def play(supervision: Supervision, script: list[tuple[str, int]]) -> list[object]:
    """Feed a script of events, then let everybody be gone and time pass; returns the instructions."""
    now, given_out = 0.0, []
    for kind, value in script:
        now += 0.01
        if kind == "finished":
            given_out += supervision.on_finished(finished(value), now)
        elif kind in ("failed", "consequence"):
            given_out += supervision.on_failed(failed(value, consequence=kind == "consequence"), now)
        elif kind == "exit":
            given_out += supervision.on_exit(exited(value), now)
        elif kind == "killed":
            given_out += supervision.on_exit(exited(value, None, 9), now)
        elif kind == "interrupt":
            given_out += supervision.on_interrupt(now)
        else:
            now += value
            given_out += supervision.on_tick(now)
    for rank in range(3):
        given_out += supervision.on_exit(exited(rank), now)
    return [*given_out, *supervision.on_tick(now + 2 * MESSAGE_GRACE_S)]


@given(events)
def test_every_run_ends_exactly_once_when_everybody_is_gone(script):
    supervision = Supervision(3)
    instructions = play(supervision, script)
    ends = [i for i in instructions if isinstance(i, End)]
    assert len(ends) == 1
    assert instructions[-1] == ends[0], "nothing is done after the end"
    assert supervision.has_ended


@given(events)
def test_a_failure_is_never_called_a_success(script):
    supervision = Supervision(3)
    (end,) = [i for i in play(supervision, script) if isinstance(i, End)]
    if supervision.failures or supervision.crashes:
        assert end.outcome == "failed"
        assert supervision.first_cause() is not None
    if end.outcome == "finished":
        assert all(w.finished is not None for w in supervision._workers.values())


@given(events)
def test_the_first_cause_is_never_a_consequence_if_there_is_a_real_one(script):
    supervision = Supervision(3)
    play(supervision, script)
    cause = supervision.first_cause()
    if any(not f.consequence for f in supervision.failures):
        assert isinstance(cause, Failed)
        assert not cause.consequence


@given(events)
def test_the_others_are_told_at_most_once_that_somebody_failed_and_at_most_once_to_stop(script):
    instructions = play(Supervision(3), script)
    assert sum(isinstance(i, TellAbort) for i in instructions) <= 1
    assert sum(isinstance(i, TellStop) for i in instructions) <= 1


def test_a_worker_that_does_not_notice_a_failure_is_killed_after_a_while():
    supervision = Supervision(2)
    assert supervision.on_failed(failed(0), 0.0) == [TellAbort("worker 0: ValueError")]
    supervision.on_exit(exited(0, 1), 0.1)
    assert supervision.on_tick(FAILING_GRACE_S - 0.1) == []
    assert supervision.on_tick(FAILING_GRACE_S) == [Kill()]
    assert supervision.on_exit(exited(1, None, 9), FAILING_GRACE_S + 0.1) == [End("failed")]
    assert supervision.first_cause() == failed(0)


def test_the_first_interrupt_asks_and_the_second_one_kills():
    supervision = Supervision(2)
    assert supervision.on_interrupt(0.0) == [TellStop()]
    assert supervision.on_interrupt(0.1) == [Kill()]
    supervision.on_exit(exited(0, None, 9), 0.2)
    assert supervision.on_exit(exited(1, None, 9), 0.2) == [End("killed")]


def test_workers_that_do_not_stop_when_asked_are_killed_after_the_limit():
    supervision = Supervision(1)
    supervision.on_interrupt(0.0)
    assert supervision.on_tick(STOPPING_GRACE_S - 1) == []
    assert supervision.on_tick(STOPPING_GRACE_S) == [Kill()]


def test_a_last_message_may_come_after_the_news_of_the_exit():
    supervision = Supervision(1)
    assert supervision.on_exit(exited(0), 0.0) == []
    assert supervision.on_tick(MESSAGE_GRACE_S / 2) == []
    assert supervision.on_finished(finished(0), MESSAGE_GRACE_S / 2) == [End("finished")]


def test_a_worker_killed_by_a_signal_is_a_failure_at_once():
    supervision = Supervision(2)
    assert supervision.on_exit(exited(1, None, 9), 0.0) == [TellAbort("worker 1 was killed by SIGKILL")]
    supervision.on_failed(failed(0, consequence=True), 0.1)
    assert supervision.first_cause() == exited(1, None, 9)


def test_a_run_in_which_all_stopped_early_has_stopped():
    supervision = Supervision(1)
    supervision.on_interrupt(0.0)
    supervision.on_finished(finished(0, early=True), 0.1)
    assert supervision.on_exit(exited(0), 0.2) == [End("stopped")]
