"""The supervision of workers under every interleaving of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.control import Failed, Finished, Stranded
from syncline.coordinator.membership import KillOne, Launch, Membership, Publish, View
from syncline.coordinator.supervision import (
    FAILING_GRACE_S,
    MESSAGE_GRACE_S,
    STOPPING_GRACE_S,
    End,
    Kill,
    Lost,
    ReleaseServers,
    Supervision,
    TellAbort,
    TellStop,
)  # fmt: skip
from syncline.engines.engine import Exit


def stopping(size: int) -> Supervision:
    """Of a run that ends when somebody is lost."""
    return Supervision(Membership(size, policy="stop"))


def finished(rank: int, *, early: bool = False) -> Finished:
    return Finished(rank, early, {"metrics": {}})


def failed(rank: int, *, consequence: bool = False) -> Failed:
    kind = "PeerLost" if consequence else "ValueError"
    return Failed(rank, kind, "message", "", 3, [], consequence, is_first_step=False)


def exited(rank: int, code: int | None = 0, signal: int | None = None) -> Exit:
    return Exit(rank, 100 + rank, code, signal)


events = st.lists(
    st.one_of(
        st.tuples(st.just("finished"), st.integers(0, 2)),
        st.tuples(st.just("failed"), st.integers(0, 2)),
        st.tuples(st.just("consequence"), st.integers(0, 2)),
        st.tuples(st.just("exit"), st.integers(0, 2)),
        st.tuples(st.just("killed"), st.integers(0, 2)),
        st.tuples(st.just("lost"), st.integers(0, 2)),
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
        elif kind == "lost":
            given_out += supervision.on_exit(Exit(value, 0, None, None, reason="was lost with its place"), now)
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
    supervision = stopping(3)
    instructions = play(supervision, script)
    ends = [i for i in instructions if isinstance(i, End)]
    assert len(ends) == 1
    assert instructions[-1] == ends[0], "nothing is done after the end"
    assert supervision.has_ended


@given(events)
def test_a_failure_is_never_called_a_success(script):
    supervision = stopping(3)
    (end,) = [i for i in play(supervision, script) if isinstance(i, End)]
    if end.outcome == "failed":
        assert supervision.first_cause() is not None
    if end.outcome in ("finished", "stopped"):
        assert supervision.summary is not None, "whoever finishes knows that all is saved"
    elif supervision.crashes or any(not f.consequence for f in supervision.failures):
        assert end.outcome == "failed"


@given(events)
def test_the_first_cause_is_never_a_consequence_if_there_is_a_real_one(script):
    supervision = stopping(3)
    play(supervision, script)
    cause = supervision.first_cause()
    if isinstance(cause, Failed) and cause.consequence:
        assert all(f.consequence for f in supervision.failures)
        assert not supervision.crashes


@given(events)
def test_the_others_are_told_at_most_once_that_somebody_failed_and_at_most_once_to_stop(script):
    instructions = play(stopping(3), script)
    assert sum(isinstance(i, TellAbort) for i in instructions) <= 1
    assert sum(isinstance(i, TellStop) for i in instructions) <= 1


def test_a_worker_that_does_not_notice_a_failure_is_killed_after_a_while():
    supervision = stopping(2)
    assert supervision.on_failed(failed(0), 0.0) == [TellAbort("worker 0: ValueError")]
    supervision.on_exit(exited(0, 1), 0.1)
    assert supervision.on_tick(FAILING_GRACE_S - 0.1) == []
    assert supervision.on_tick(FAILING_GRACE_S) == [Kill()]
    assert supervision.on_exit(exited(1, None, 9), FAILING_GRACE_S + 0.1) == [End("failed")]
    assert supervision.first_cause() == failed(0)


def test_the_first_interrupt_asks_and_the_second_one_kills():
    supervision = stopping(2)
    assert supervision.on_interrupt(0.0) == [TellStop()]
    assert supervision.on_interrupt(0.1) == [Kill()]
    supervision.on_exit(exited(0, None, 9), 0.2)
    assert supervision.on_exit(exited(1, None, 9), 0.2) == [End("killed")]


def test_workers_that_do_not_stop_when_asked_are_killed_after_the_limit():
    supervision = stopping(1)
    supervision.on_interrupt(0.0)
    assert supervision.on_tick(STOPPING_GRACE_S - 1) == []
    assert supervision.on_tick(STOPPING_GRACE_S) == [Kill()]


def test_a_last_message_may_come_after_the_news_of_the_exit():
    supervision = stopping(1)
    assert supervision.on_exit(exited(0), 0.0) == []
    assert supervision.on_tick(MESSAGE_GRACE_S / 2) == []
    assert supervision.on_finished(finished(0), MESSAGE_GRACE_S / 2) == [End("finished")]


def test_a_worker_killed_by_a_signal_is_a_failure_at_once():
    supervision = stopping(2)
    assert supervision.on_exit(exited(1, None, 9), 0.0) == [TellAbort("worker 1: was killed by SIGKILL")]
    supervision.on_failed(failed(0, consequence=True), 0.1)
    assert supervision.first_cause() == exited(1, None, 9)


def test_a_run_in_which_all_stopped_early_has_stopped():
    supervision = stopping(1)
    supervision.on_interrupt(0.0)
    supervision.on_finished(finished(0, early=True), 0.1)
    assert supervision.on_exit(exited(0), 0.2) == [End("stopped")]


# Going on


def going_on(size: int, **settings: object) -> Supervision:
    return Supervision(Membership(size, **settings))  # type: ignore[arg-type]


def test_the_others_go_on_at_once_and_the_replacement_joins_when_it_is_ready():
    supervision = going_on(3)
    lost, launch, publish = supervision.on_exit(exited(1, None, 9), 0.0)
    assert isinstance(lost, Lost)
    assert launch == Launch(1, 1)
    assert publish == Publish(View(2, (0, 2)))
    assert supervision.on_ready(1, 0, 0.1) == [], "an earlier life"
    assert supervision.on_ready(1, 1, 0.2) == [Publish(View(3, (0, 1, 2)))]
    assert supervision.on_ready(1, 1, 0.3) == [], "said before"


def test_replace_only_waits_for_the_replacement():
    supervision = going_on(2, policy="replace-only")
    assert not any(isinstance(i, Publish) for i in supervision.on_exit(exited(0, None, 9), 0.0))
    assert supervision.on_ready(0, 1, 1.0) == [Publish(View(2, (0, 1)))]


def test_shrink_replaces_nobody():
    supervision = going_on(3, policy="shrink")
    assert supervision.on_exit(exited(0, None, 9), 0.0)[1:] == [Publish(View(2, (1, 2)))]


def test_a_lost_server_is_always_replaced_and_waited_for():
    supervision = going_on(2, servers=1, policy="shrink")
    assert supervision.on_exit(exited(2, None, 9), 0.0)[1:] == [Launch(2, 1)]
    assert supervision.on_ready(2, 1, 1.0) == [Publish(View(2, (0, 1)))]


def test_a_run_whose_last_worker_is_lost_goes_on_with_its_replacement():
    supervision = going_on(1)
    assert supervision.on_exit(exited(0, None, 9), 0.0)[1:] == [Launch(0, 1)]
    assert supervision.on_ready(0, 1, 1.0) == [Publish(View(2, (0,)))]


def test_after_too_many_losses_the_others_save_and_the_run_ends_as_failed():
    supervision = going_on(2, most_losses=1, within_s=10.0)
    supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_ready(1, 1, 0.1)
    instructions = supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.2)
    assert [i.view.members for i in instructions if isinstance(i, Publish)] == [(0,)]
    assert TellStop(is_users_wish=False) in instructions
    assert not any(isinstance(i, Launch) for i in instructions)
    supervision.on_finished(finished(0, early=True), 0.3)
    assert supervision.on_exit(exited(0), 0.4) == [End("failed")]
    assert supervision.gave_up
    assert supervision.first_cause() == Exit(1, 5, None, 9, life=1)


def test_losses_long_ago_do_not_count():
    supervision = going_on(2, most_losses=1, within_s=10.0)
    supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_ready(1, 1, 0.1)
    assert Launch(1, 2) in supervision.on_exit(Exit(1, 5, None, 9, life=1), 20.0)


def test_the_same_exception_at_the_same_step_ends_the_run():
    supervision = going_on(2)
    assert supervision.on_failed(failed(1), 0.0) == []
    assert Launch(1, 1) in supervision.on_exit(exited(1, 1), 0.1)
    again = Failed(1, "ValueError", "message", "", 3, [], False, life=1, is_first_step=False)
    assert supervision.on_failed(again, 1.0) == [TellAbort("worker 1: ValueError")]


def test_an_exception_in_the_very_first_step_ends_the_run():
    first = Failed(1, "ValueError", "message", "", 0, [], False)
    assert going_on(2).on_failed(first, 0.0) == [TellAbort("worker 1: ValueError")]


def test_a_worker_lost_while_stopping_is_not_replaced_but_the_others_still_save():
    supervision = going_on(2)
    supervision.on_interrupt(0.0)
    instructions = supervision.on_exit(exited(1, None, 9), 0.1)
    assert Publish(View(2, (0,))) in instructions
    assert not any(isinstance(i, Launch) for i in instructions)
    supervision.on_finished(finished(0, early=True), 0.2)
    assert supervision.on_exit(exited(0), 0.3) == [End("stopped")]


def test_a_worker_lost_when_another_has_finished_changes_nothing():
    supervision = going_on(2)
    supervision.on_finished(finished(0), 0.0)
    supervision.on_exit(exited(0), 0.1)
    assert supervision.on_exit(exited(1, None, 9), 0.2) == [End("finished")]


def test_a_replacement_that_comes_too_late_is_not_waited_for():
    supervision = going_on(2)
    supervision.on_exit(exited(1, None, 9), 0.0)
    told = supervision.on_finished(finished(0), 0.1)
    assert told == [KillOne(1), TellAbort("the run is complete", workers_only=True)]
    supervision.on_exit(exited(0), 0.2)
    assert supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.3) == [End("finished")]


def test_a_worker_whose_line_broke_gets_a_new_view_of_the_same_members():
    supervision = going_on(2)
    assert supervision.on_stranded(Stranded(1, 0, 1), 0.0) == [Publish(View(2, (0, 1)))]
    assert supervision.on_stranded(Stranded(0, 0, 1), 0.1) == [], "that View is over already"
    assert supervision.on_stranded(Stranded(0, 3, 2), 0.2) == [], "not of this life"


def test_a_worker_that_waits_for_a_replacement_gets_no_view_before_it():
    supervision = going_on(2, policy="replace-only")
    supervision.on_exit(exited(1, None, 9), 0.0)
    assert supervision.on_stranded(Stranded(0, 0, 1), 1.0) == []
    assert supervision.on_ready(1, 1, 2.0) == [Publish(View(2, (0, 1)))]


def test_servers_are_released_when_the_workers_are_done():
    supervision = going_on(1, servers=1)
    supervision.on_finished(finished(0), 0.0)
    assert supervision.on_exit(exited(0), 0.1) == [ReleaseServers()]
    supervision.on_finished(Finished(1, False, {}), 0.2)
    assert supervision.on_exit(exited(1), 0.3) == [End("finished")]


def test_workers_can_be_added_and_removed_but_never_all():
    supervision = going_on(2)
    assert supervision.add(1) == [Launch(2, 0)]
    assert supervision.on_ready(2, 0, 0.0) == [Publish(View(2, (0, 1, 2)))]
    assert supervision.remove(1) == [Publish(View(3, (0, 1)))]
    supervision.on_finished(Finished(2, False, {}), 0.1)
    assert supervision.on_exit(exited(2), 0.2) == [], "as it should"
    assert supervision.remove(5) == [Publish(View(4, (0,)))]
    assert supervision.remove(1) == []


@given(st.data(), st.sampled_from(["shrink-and-replace", "replace-only", "shrink"]), st.integers(0, 2))
def test_under_every_interleaving_views_name_only_who_is_there_and_the_run_ends_once(data, policy, servers):
    """Deaths, joins, late and repeated messages of any life, in any order; then everybody finishes."""
    supervision = going_on(3, servers=servers, policy=policy, most_losses=5)
    membership = supervision.membership
    lives = dict.fromkeys(range(3 + servers), 0)  # of the processes that run
    views, now, ends = [1], 0.0, []
    earlier: list[tuple[int, int]] = []

    def take(instructions: list[object]) -> None:
        for instruction in instructions:
            assert not ends, "nothing is done after the end"
            if isinstance(instruction, Launch):
                assert instruction.number not in lives, "two lives of one process"
                lives[instruction.number] = instruction.life
            elif isinstance(instruction, Publish):
                view = instruction.view
                assert view.number > views[-1]
                views.append(view.number)
                assert set(view.members) <= set(lives)
                assert not any(membership.is_server(n) for n in view.members)
                assert all(n in lives for n in range(3, 3 + servers)), "without a server nobody can go on"
                if policy == "replace-only" and not supervision.gave_up and supervision._phase == "running":
                    assert view.members == (0, 1, 2)
            elif isinstance(instruction, End):
                ends.append(instruction)

    for _ in range(data.draw(st.integers(0, 15))):
        now += 0.1
        kind = data.draw(st.sampled_from(["die", "ready", "late", "tick"]))
        if kind == "die" and lives:
            number = data.draw(st.sampled_from(sorted(lives)))
            life = lives.pop(number)
            earlier.append((number, life))
            take(supervision.on_exit(Exit(number, 1, None, 9, life), now))
        elif kind == "ready" and lives:
            number = data.draw(st.sampled_from(sorted(lives)))
            take(supervision.on_ready(number, lives[number], now))
        elif kind == "late" and earlier:
            number, life = data.draw(st.sampled_from(earlier))
            take(supervision.on_ready(number, life, now))
            take(supervision.on_exit(Exit(number, 1, None, 9, life), now))
            take(supervision.on_failed(Failed(number, "PeerLost", "", "", 9, [], True, life, False), now))
        else:
            take(supervision.on_tick(now))
    for number in sorted(lives):
        if not membership.is_server(number):
            take(supervision.on_finished(Finished(number, False, {"metrics": {}}), now))
    for _ in range(3):  # whoever was launched meanwhile ends, too
        for number, life in sorted(lives.items()):
            take(supervision.on_exit(Exit(number, 1, 0, None, life), now))
        now += 100.0
        take(supervision.on_tick(now))
    assert len(ends) == 1


def test_who_was_lost_with_its_place_is_not_waited_for():
    supervision = Supervision(Membership(3, policy="shrink-and-replace"))
    for rank in range(3):
        supervision.on_start(rank, 0.0)
    given_out = supervision.on_exit(Exit(1, 0, None, None, reason="was lost with its place"), 1.0)
    (lost,) = [i for i in given_out if isinstance(i, Lost)]
    assert lost.cause.in_words() == "was lost with its place"
    assert supervision.on_exit(exited(2, code=1), 1.0) == [], "who ended by itself may have said why"
