"""The supervision of workers under every interleaving of events."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.control import Failed, Finished, GroupCreated, Stranded
from syncline.coordinator.membership import KillProcess, Membership, PublishView, StartProcess, View
from syncline.coordinator.supervision import (
    FAILING_GRACE_S,
    MESSAGE_GRACE_S,
    STOPPING_GRACE_S,
    EndRun,
    KillAll,
    ReleaseServers,
    ReportFailure,
    SendAbort,
    SendStop,
    Supervision,
)  # fmt: skip
from syncline.engines.engine import Exit


def stopping(size: int) -> Supervision:
    """Of a run that ends when a worker fails."""
    return Supervision(Membership(size, policy="stop"))


def finished(worker_id: int, *, early: bool = False) -> Finished:
    return Finished(worker_id, early, {"metrics": {}})


def failed(worker_id: int, *, consequence: bool = False) -> Failed:
    kind = "PeerFailed" if consequence else "ValueError"
    return Failed(worker_id, kind, "message", "", 3, [], consequence, is_first_step=False)


def exited(worker_id: int, code: int | None = 0, signal: int | None = None) -> Exit:
    return Exit(worker_id, 100 + worker_id, code, signal)


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
    """Feed a script of events, then let all processes exit and time pass; returns the instructions."""
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
            given_out += supervision.on_exit(Exit(value, 0, None, None, reason="was lost with its node"), now)
        elif kind == "interrupt":
            given_out += supervision.on_interrupt(now)
        else:
            now += value
            given_out += supervision.on_tick(now)
    for worker_id in range(3):
        given_out += supervision.on_exit(exited(worker_id), now)
    return [*given_out, *supervision.on_tick(now + 2 * MESSAGE_GRACE_S)]


@given(events)
def test_every_run_ends_exactly_once_when_all_processes_are_gone(script):
    supervision = stopping(3)
    instructions = play(supervision, script)
    ends = [i for i in instructions if isinstance(i, EndRun)]
    assert len(ends) == 1
    assert instructions[-1] == ends[0], "nothing is done after the end"
    assert supervision.phase == "ended"


@given(events)
def test_a_failure_is_never_reported_as_a_success(script):
    supervision = stopping(3)
    (end,) = [i for i in play(supervision, script) if isinstance(i, EndRun)]
    if end.outcome == "failed":
        assert supervision.failures.root_cause() is not None
    if end.outcome in ("finished", "stopped"):
        assert supervision.summary is not None, "a worker finishes after everything is saved"
    elif supervision.failures.crashes or any(not f.consequence for f in supervision.failures.exceptions):
        assert end.outcome == "failed"


@given(events)
def test_the_root_cause_is_never_a_consequence_if_there_is_a_real_one(script):
    supervision = stopping(3)
    play(supervision, script)
    cause = supervision.failures.root_cause()
    if isinstance(cause, Failed) and cause.consequence:
        assert all(f.consequence for f in supervision.failures.exceptions)
        assert not supervision.failures.crashes


@given(events)
def test_abort_and_stop_are_sent_at_most_once_each(script):
    instructions = play(stopping(3), script)
    assert sum(isinstance(i, SendAbort) for i in instructions) <= 1
    assert sum(isinstance(i, SendStop) for i in instructions) <= 1


def test_a_worker_that_does_not_notice_a_failure_is_killed_after_a_while():
    supervision = stopping(2)
    assert supervision.on_failed(failed(0), 0.0) == [SendAbort(failed(0))]
    supervision.on_exit(exited(0, 1), 0.1)
    assert supervision.on_tick(FAILING_GRACE_S - 0.1) == []
    assert supervision.on_tick(FAILING_GRACE_S) == [KillAll()]
    assert supervision.on_exit(exited(1, None, 9), FAILING_GRACE_S + 0.1) == [EndRun("failed")]
    assert supervision.failures.root_cause() == failed(0)


def test_the_first_interrupt_stops_and_the_second_one_kills():
    supervision = stopping(2)
    assert supervision.on_interrupt(0.0) == [SendStop()]
    assert supervision.on_interrupt(0.1) == [KillAll()]
    supervision.on_exit(exited(0, None, 9), 0.2)
    assert supervision.on_exit(exited(1, None, 9), 0.2) == [EndRun("killed")]


def test_workers_that_do_not_stop_when_asked_are_killed_after_the_limit():
    supervision = stopping(1)
    supervision.on_interrupt(0.0)
    assert supervision.on_tick(STOPPING_GRACE_S - 1) == []
    assert supervision.on_tick(STOPPING_GRACE_S) == [KillAll()]


def test_a_last_message_may_arrive_after_the_exit():
    supervision = stopping(1)
    assert supervision.on_exit(exited(0), 0.0) == []
    assert supervision.on_tick(MESSAGE_GRACE_S / 2) == []
    assert supervision.on_finished(finished(0), MESSAGE_GRACE_S / 2) == [EndRun("finished")]


def test_a_worker_killed_by_a_signal_is_a_failure_at_once():
    supervision = stopping(2)
    assert supervision.on_exit(exited(1, None, 9), 0.0) == [SendAbort(exited(1, None, 9))]
    supervision.on_failed(failed(0, consequence=True), 0.1)
    assert supervision.failures.root_cause() == exited(1, None, 9)


def test_a_run_in_which_all_stopped_early_has_stopped():
    supervision = stopping(1)
    supervision.on_interrupt(0.0)
    supervision.on_finished(finished(0, early=True), 0.1)
    assert supervision.on_exit(exited(0), 0.2) == [EndRun("stopped")]


# Recovery


def recovering(size: int, **settings: object) -> Supervision:
    return Supervision(Membership(size, **settings))  # type: ignore[arg-type]


def test_the_others_continue_at_once_and_the_replacement_joins_when_it_is_ready():
    supervision = recovering(3)
    lost, launch, publish = supervision.on_exit(exited(1, None, 9), 0.0)
    assert isinstance(lost, ReportFailure)
    assert launch == StartProcess(1, 1)
    assert publish == PublishView(View(2, (0, 2)))
    assert supervision.on_ready(1, 0) == [], "an earlier life"
    assert supervision.on_ready(1, 1) == [PublishView(View(3, (0, 1, 2)))]
    assert supervision.on_ready(1, 1) == [], "said before"


def test_replace_only_waits_for_the_replacement():
    supervision = recovering(2, policy="replace-only")
    assert not any(isinstance(i, PublishView) for i in supervision.on_exit(exited(0, None, 9), 0.0))
    assert supervision.on_ready(0, 1) == [PublishView(View(2, (0, 1)))]


def test_shrink_starts_no_replacement():
    supervision = recovering(3, policy="shrink")
    assert supervision.on_exit(exited(0, None, 9), 0.0)[1:] == [PublishView(View(2, (1, 2)))]


def test_a_failed_server_is_always_replaced_and_waited_for():
    supervision = recovering(2, servers=1, policy="shrink")
    assert supervision.on_exit(exited(2, None, 9), 0.0)[1:] == [StartProcess(2, 1)]
    assert supervision.on_ready(2, 1) == [PublishView(View(2, (0, 1)))]


def test_a_run_whose_last_worker_fails_continues_with_its_replacement():
    supervision = recovering(1)
    assert supervision.on_exit(exited(0, None, 9), 0.0)[1:] == [StartProcess(0, 1)]
    assert supervision.on_ready(0, 1) == [PublishView(View(2, (0,)))]


def test_after_too_many_failures_the_others_save_and_the_run_ends_as_failed():
    supervision = recovering(2, max_failures=1, within_s=10.0)
    supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_ready(1, 1)
    instructions = supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.2)
    assert [i.view.members for i in instructions if isinstance(i, PublishView)] == [(0,)]
    assert SendStop(by_user=False) in instructions
    assert not any(isinstance(i, StartProcess) for i in instructions)
    supervision.on_finished(finished(0, early=True), 0.3)
    assert supervision.on_exit(exited(0), 0.4) == [EndRun("failed")]
    assert supervision.gave_up
    assert supervision.failures.root_cause() == Exit(1, 5, None, 9, life=1)


def test_failures_long_ago_do_not_count():
    supervision = recovering(2, max_failures=1, within_s=10.0)
    supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_ready(1, 1)
    assert StartProcess(1, 2) in supervision.on_exit(Exit(1, 5, None, 9, life=1), 20.0)


def test_the_same_exception_at_the_same_step_ends_the_run():
    supervision = recovering(2)
    assert supervision.on_failed(failed(1), 0.0) == []
    assert StartProcess(1, 1) in supervision.on_exit(exited(1, 1), 0.1)
    again = Failed(1, "ValueError", "message", "", 3, [], False, life=1, is_first_step=False)
    assert supervision.on_failed(again, 1.0) == [SendAbort(again)]


def test_an_exception_in_the_very_first_step_ends_the_run():
    first = Failed(1, "ValueError", "message", "", 0, [], False)
    assert recovering(2).on_failed(first, 0.0) == [SendAbort(first)]


def test_a_worker_that_fails_while_stopping_is_not_replaced_but_the_others_still_save():
    supervision = recovering(2)
    supervision.on_interrupt(0.0)
    instructions = supervision.on_exit(exited(1, None, 9), 0.1)
    assert PublishView(View(2, (0,))) in instructions
    assert not any(isinstance(i, StartProcess) for i in instructions)
    supervision.on_finished(finished(0, early=True), 0.2)
    assert supervision.on_exit(exited(0), 0.3) == [EndRun("stopped")]


def test_a_worker_that_fails_after_another_has_finished_changes_nothing():
    supervision = recovering(2)
    supervision.on_finished(finished(0), 0.0)
    supervision.on_exit(exited(0), 0.1)
    assert supervision.on_exit(exited(1, None, 9), 0.2) == [EndRun("finished")]


def test_a_replacement_that_comes_too_late_is_not_waited_for():
    supervision = recovering(2)
    supervision.on_exit(exited(1, None, 9), 0.0)
    instructions = supervision.on_finished(finished(0), 0.1)
    assert instructions == [KillProcess(1), SendAbort(None, workers_only=True)]
    supervision.on_exit(exited(0), 0.2)
    assert supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.3) == [EndRun("finished")]


def test_a_worker_whose_connection_broke_gets_a_new_view_of_the_same_members():
    supervision = recovering(2)
    assert supervision.on_stranded(Stranded(1, 0, 1), 0.0) == [PublishView(View(2, (0, 1)))]
    assert supervision.on_stranded(Stranded(0, 0, 1), 0.1) == [], "that View is over already"
    assert supervision.on_stranded(Stranded(0, 3, 2), 0.2) == [], "not of this life"


def test_a_worker_that_waits_for_a_replacement_gets_no_view_before_it():
    supervision = recovering(2, policy="replace-only")
    supervision.on_exit(exited(1, None, 9), 0.0)
    assert supervision.on_stranded(Stranded(0, 0, 1), 1.0) == []
    assert supervision.on_ready(1, 1) == [PublishView(View(2, (0, 1)))]


def test_servers_are_released_when_the_workers_are_done():
    supervision = recovering(1, servers=1)
    supervision.on_finished(finished(0), 0.0)
    assert supervision.on_exit(exited(0), 0.1) == [ReleaseServers()]
    supervision.on_finished(Finished(1, False, {}), 0.2)
    assert supervision.on_exit(exited(1), 0.3) == [EndRun("finished")]


def test_workers_can_be_added_and_removed_but_never_all():
    supervision = recovering(2)
    assert supervision.resize(1) == [StartProcess(2, 0)]
    assert supervision.on_ready(2, 0) == [PublishView(View(2, (0, 1, 2)))]
    assert supervision.resize(-1) == [PublishView(View(3, (0, 1)))]
    supervision.on_finished(Finished(2, False, {}), 0.1)
    assert supervision.on_exit(exited(2), 0.2) == [], "as it should"
    assert supervision.resize(-5) == [PublishView(View(4, (0,)))]
    assert supervision.resize(-1) == []


@given(st.data(), st.sampled_from(["shrink-and-replace", "replace-only", "shrink"]), st.integers(0, 2))
def test_under_every_interleaving_views_name_only_running_workers_and_the_run_ends_once(data, policy, servers):
    """Deaths, joins, late and repeated messages of any life, in any order; then all workers finish."""
    supervision = recovering(3, servers=servers, policy=policy, max_failures=5)
    membership = supervision.membership
    lives = dict.fromkeys(range(3 + servers), 0)  # of the processes that run
    views, now, ends = [1], 0.0, []
    earlier: list[tuple[int, int]] = []

    def take(instructions: list[object]) -> None:
        for instruction in instructions:
            assert not ends, "nothing is done after the end"
            if isinstance(instruction, StartProcess):
                assert instruction.worker_id not in lives, "two lives of one process"
                lives[instruction.worker_id] = instruction.life
            elif isinstance(instruction, PublishView):
                view = instruction.view
                assert view.number > views[-1]
                views.append(view.number)
                assert set(view.members) <= set(lives)
                assert not any(membership.is_server(n) for n in view.members)
                assert all(n in lives for n in range(3, 3 + servers)), "no View without all servers"
                if policy == "replace-only" and not supervision.gave_up and supervision.phase == "running":
                    assert view.members == (0, 1, 2)
            elif isinstance(instruction, EndRun):
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
            take(supervision.on_ready(number, lives[number]))
        elif kind == "late" and earlier:
            number, life = data.draw(st.sampled_from(earlier))
            take(supervision.on_ready(number, life))
            take(supervision.on_exit(Exit(number, 1, None, 9, life), now))
            take(supervision.on_failed(Failed(number, "PeerFailed", "", "", 9, [], True, life, False), now))
        else:
            take(supervision.on_tick(now))
    for number in sorted(lives):
        if not membership.is_server(number):
            take(supervision.on_finished(Finished(number, False, {"metrics": {}}), now))
    for _ in range(3):  # processes that were launched meanwhile exit, too
        for number, life in sorted(lives.items()):
            take(supervision.on_exit(Exit(number, 1, 0, None, life), now))
        now += 100.0
        take(supervision.on_tick(now))
    assert len(ends) == 1


def test_the_last_message_of_a_worker_on_a_lost_node_is_not_waited_for():
    supervision = Supervision(Membership(3, policy="shrink-and-replace"))
    for worker_id in range(3):
        supervision.heartbeats.on_start(worker_id, 0, 0.0)
    given_out = supervision.on_exit(Exit(1, 0, None, None, reason="was lost with its node"), 1.0)
    (lost,) = [i for i in given_out if isinstance(i, ReportFailure)]
    assert lost.cause.describe() == "was lost with its node"
    assert supervision.on_exit(exited(2, code=1), 1.0) == [], (
        "a process that exited by itself may have sent its exception"
    )


# Scripts that train with torch.distributed themselves


def created(worker_id: int, *, view: int = 1, life: int = 0) -> GroupCreated:
    return GroupCreated(worker_id, life, view)


def training_together(size: int, **settings: object) -> Supervision:
    supervision = recovering(size, **settings)
    for worker_id in range(size):
        assert supervision.on_group_created(created(worker_id)) == []
    return supervision


def test_workers_whose_script_has_a_group_restart_together_and_a_view_has_all_of_them():
    supervision = training_together(3)
    report, *decisions = supervision.on_exit(exited(1, None, 9), 0.0)
    assert isinstance(report, ReportFailure)
    assert sorted(decisions, key=repr) == [KillProcess(0), KillProcess(2), StartProcess(1, 1)]
    assert supervision.on_ready(1, 1) == [], "the others are still to come"
    assert supervision.on_failed(failed(0, consequence=True), 0.1) == []
    assert supervision.on_exit(exited(0, 1), 0.2) == [StartProcess(0, 1)]
    assert supervision.on_exit(exited(2, None, 9), 0.2) == [StartProcess(2, 1)]
    assert supervision.on_ready(0, 1) == []
    assert supervision.on_ready(2, 1) == [PublishView(View(2, (0, 1, 2)))]
    assert supervision.failures.crashes == [exited(1, None, 9)], "those that were killed for it have not failed"


def test_with_shrink_the_script_starts_again_on_the_remaining_workers():
    supervision = training_together(3, policy="shrink")
    assert KillProcess(0) in supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_exit(exited(0, None, 9), 0.1)
    supervision.on_exit(exited(2, None, 9), 0.1)
    supervision.on_ready(0, 1)
    assert supervision.on_ready(2, 1) == [PublishView(View(2, (0, 2)))]


def test_a_script_with_a_group_has_finished_when_all_workers_have():
    supervision = training_together(2)
    assert supervision.on_finished(finished(0), 0.0) == []
    assert supervision.on_exit(exited(0), 0.0) == []
    assert supervision.summary is None
    _, *decisions = supervision.on_exit(exited(1, None, 9), 0.1)
    assert decisions == [StartProcess(0, 1), StartProcess(1, 1)], "the one that had finished is not killed"
    supervision.on_ready(0, 1)
    supervision.on_ready(1, 1)
    for worker_id in range(2):
        supervision.on_finished(Finished(worker_id, False, {"metrics": {}}, life=1), 0.2)
    supervision.on_exit(Exit(0, 1, 0, None, life=1), 0.3)
    assert supervision.on_exit(Exit(1, 1, 0, None, life=1), 0.3) == [EndRun("finished")]


def test_too_many_failures_end_a_script_with_a_group():
    supervision = training_together(2, max_failures=1, within_s=10.0)
    supervision.on_exit(exited(1, None, 9), 0.0)
    supervision.on_exit(exited(0, None, 9), 0.0)
    supervision.on_ready(0, 1)
    supervision.on_ready(1, 1)
    assert supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.2) == [SendAbort(Exit(1, 5, None, 9, life=1))]


def test_a_replacement_that_creates_a_group_before_it_is_in_a_view_restarts_with_the_others():
    supervision = recovering(2)
    supervision.on_exit(exited(1, None, 9), 0.0)
    assert supervision.on_group_created(created(1, view=0, life=1)) == [KillProcess(0), KillProcess(1)]
    assert supervision.on_exit(exited(0, None, 9), 0.1) == [StartProcess(0, 1)]
    assert supervision.on_exit(Exit(1, 5, None, 9, life=1), 0.1) == [StartProcess(1, 2)]
    supervision.on_ready(0, 1)
    assert supervision.on_ready(1, 2) == [PublishView(View(3, (0, 1)))]


def test_a_group_of_a_view_that_has_changed_meanwhile_makes_all_restart():
    supervision = recovering(2)
    supervision.on_exit(exited(1, None, 9), 0.0)  # before any worker has created its group
    assert supervision.membership.view == View(2, (0,))
    assert supervision.on_group_created(created(0)) == [KillProcess(0)]
    supervision.on_ready(1, 1)
    supervision.on_exit(exited(0, None, 9), 0.1)
    assert supervision.on_ready(0, 1) == [PublishView(View(3, (0, 1)))]


together_events = st.lists(
    st.tuples(
        st.sampled_from(
            ["finished", "failed", "consequence", "exit", "killed", "ready", "created", "interrupt", "tick"]
        ),
        st.integers(0, 2),
    ),
    max_size=40,
)


@given(together_events, st.sampled_from(["shrink-and-replace", "replace-only", "shrink", "stop"]))
def test_under_every_interleaving_workers_that_restart_together_never_meet_an_earlier_life(script, policy):
    supervision = Supervision(Membership(3, policy=policy, max_failures=4))
    alive, lives, now = set(range(3)), dict.fromkeys(range(3), 0), 0.0
    groups = dict.fromkeys(range(3), 1)  # the View in which each process runs its script; 0: it waits for one
    begun = dict.fromkeys(range(3), True)  # whether it runs its script already, perhaps before it is in a View
    ends = 0

    def carry_out(instructions: list[object]) -> None:
        nonlocal ends
        for instruction in instructions:
            if isinstance(instruction, StartProcess):
                assert instruction.worker_id not in alive, "two lives of one process must not overlap"
                alive.add(instruction.worker_id)
                lives[instruction.worker_id] = instruction.life
                groups[instruction.worker_id] = 0
                begun[instruction.worker_id] = not supervision.membership.restarts_together
            elif isinstance(instruction, PublishView) and supervision.membership.restarts_together:
                waiting = {n for n in instruction.view.members if groups[n] == 0}
                if supervision.phase == "running":
                    assert waiting == set(instruction.view.members), "all of its members are new"
                groups.update(dict.fromkeys(instruction.view.members, instruction.view.number))
            elif isinstance(instruction, PublishView):
                groups.update(dict.fromkeys(instruction.view.members, instruction.view.number))
            elif isinstance(instruction, EndRun):
                ends += 1

    def end(n: int, code: int | None) -> None:
        if n in alive:
            alive.discard(n)
            carry_out(supervision.on_exit(Exit(n, n, code, None if code is not None else 9, life=lives[n]), now))

    for kind, n in script:
        now += 0.01
        if kind == "finished" and n in alive:
            carry_out(supervision.on_finished(Finished(n, False, {"metrics": {}}, life=lives[n]), now))
        elif kind in ("failed", "consequence") and n in alive:
            failure = msgspec.structs.replace(failed(n, consequence=kind == "consequence"), life=lives[n])
            carry_out(supervision.on_failed(failure, now))
        elif kind in ("exit", "killed"):
            end(n, 0 if kind == "exit" else None)
        elif kind == "ready" and n in alive and groups[n] == 0 and not begun[n]:
            carry_out(supervision.on_ready(n, lives[n]))
        elif kind == "created" and n in alive and (groups[n] or begun[n]):
            carry_out(supervision.on_group_created(created(n, view=groups[n], life=lives[n])))
        elif kind == "interrupt":
            carry_out(supervision.on_interrupt(now))
        elif kind == "tick":
            now += n
            carry_out(supervision.on_tick(now))
    for _ in range(12):  # each end may start others
        now += 1.0
        for n in sorted(alive):
            end(n, None)
        carry_out(supervision.on_tick(now + 2 * MESSAGE_GRACE_S))
    assert ends == 1
